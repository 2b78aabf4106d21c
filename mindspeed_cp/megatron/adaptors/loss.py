"""The loss of a planned batch: global sum over global count, independent of the distribution of tokens.

Every rank returns the sum of its tokens' losses and their number; gradients and the reported loss are the sums over all
data- and context-parallel ranks divided by the count over all of them. A mean of the ranks' means would differ whenever
ranks hold unequal counts, as they do with packed documents.

The counts that a script's own loss function returns are held against the gradients of the tokens' losses.
Megatron divides gradients by that count. In 0.12 it is added up over data-parallel ranks alone, so that a loss function
must return that of all context-parallel ranks; later versions add it up over these, too. By the other rule no loss
curve looks wrong: 0.12 divides the gradients of each rank by another number, and copies of weights drift apart; later
versions divide them by context_parallel_size in addition.

A number alone does not show which rule a loss follows: one that is divided, or multiplied by context_parallel_size, in
the script may need the other one. So the loss is judged whose gradients say what it is: the plain sum over tokens,
where every token's gradient is the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import wraps
from math import isclose
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.patches import versions

REPORT_KEY = "lm loss"
MAX_COUNT = 2**31 - 1  # Megatron's schedules add token counts up in int32


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute Megatron's three-value loss; bind the mask for each micro-batch: ``partial(loss_function,
    batch["loss_mask"])``.

    Needs ``calculate_per_token_loss=True``, which PlannedAttention checks when it is built: with False, Megatron would
    divide each rank's sum by that rank's own count.

    Args:
        loss_mask: this rank's mask, [1, t] or [b, s]: 0 or 1 (a weight counts as one token). As in Megatron's own
            loss_func, losses are multiplied by it, so that a NaN in a masked row makes the loss NaN.
        losses: the model's output for labels, of as many elements.

    Returns:
        (sum of masked losses, float32 scalar; number of counted tokens, int32 scalar; {"lm loss": [sum, count] float32}
        for Megatron's own logging). Zeros for a rank without tokens. Megatron 0.12 adds the
        second value up over data-parallel ranks alone, so there it is that of all context-parallel ranks.

    Raises:
        ConfigError: mask and losses differ in size.
    """
    if loss_mask.numel() != losses.numel():
        raise ConfigError(
            f"loss_mask has shape {list(loss_mask.shape)}, but the model's losses {list(losses.shape)}; slice "
            "loss_mask with the batch: planned_batch does"
        )
    mask = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * mask).sum()
    count = mask.count_nonzero()
    report = torch.stack([total.detach(), count.to(total.dtype)])
    return total, versions.counted_tokens(count.to(torch.int32)), {REPORT_KEY: report}


def check_tokens_per_step(tokens: int) -> None:
    """Raise ConfigError if a step has more tokens than Megatron's int32 count holds: the count would turn negative.

    Args:
        tokens: upper bound over all ranks, data parallel ones included: rows of a step x context.
    """
    if tokens > MAX_COUNT:
        raise ConfigError(
            f"a step has up to {tokens} tokens; valid: at most {MAX_COUNT}, since Megatron counts them in int32; use a "
            "smaller global batch or context"
        )


_REMEDY = (
    "return mindspeed_cp.megatron.loss_function(loss_mask, losses), in Megatron's scripts "
    "mindspeed_cp.megatron.pretrain.loss_func, or its second value (docs/megatron.md)"
)
_LOSSES = "_losses_of_tokens"  # of a stage: its _Losses, or None if it has no loss
_COMPARES = "_compares_token_counts"  # of the function that a config has
_TOLERANCE = 0.01  # relative, of gradients in bf16


class LossKind(IntEnum):
    """What the gradients of a rank's tokens say of its loss."""

    NONE = 0  # no token had a gradient
    SUM = 1  # of the tokens' losses
    OTHER = 2  # weights, or a division of its own
    UNKNOWN = 3  # the model returns no losses of tokens


def compare_token_counts(chunk: nn.Module, cp_group: Any) -> None:
    """Compare the counts of a model's loss function with its gradients, in the first step in which tokens have any; in
    Megatron 0.12, where ranks may differ later, counts of losses that cannot be judged in every step.

    The comparison runs before Megatron's ``finalize_model_grads``, the function that the config of the model, or of the
    first virtual stage, has. A second call changes nothing.

    Args:
        chunk: the model, or one of its virtual pipeline stages.
        cp_group: its context-parallel group, in which ranks gather three numbers.
    """
    stage = _stage_of(chunk)
    if stage is None or hasattr(stage, _LOSSES):
        return
    losses = _Losses(cp_group) if stage.post_process else None
    setattr(stage, _LOSSES, losses)

    def before_forward(module: nn.Module, _: Any) -> None:
        config: Any = module.config
        finalize = getattr(config, "finalize_model_grads_func", None)
        if finalize is not None and not hasattr(finalize, _COMPARES):
            config.finalize_model_grads_func = _comparing(finalize, config)
            _Losses.are_compared = True

    stage.register_forward_pre_hook(before_forward)
    if losses is not None:
        stage.register_forward_hook(lambda module, _, output: losses.watch(output))


def _stage_of(chunk: nn.Module) -> Any:
    """Return the module of Megatron's model inside its wrappers, or None."""
    return next((module for module in chunk.modules() if hasattr(module, "post_process")), None)


def _comparing(finalize: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """Return a function that compares the counts of a step, and calls Megatron's."""

    @wraps(finalize)
    def compared(model: Sequence[nn.Module], num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        for chunk in () if num_tokens is None else model:
            losses = getattr(_stage_of(chunk), _LOSSES, None)
            if losses is not None and losses.seen:
                losses.compare(num_tokens, getattr(config, "grad_scale_func", None))
        return finalize(model, num_tokens, *args, **kwargs)

    setattr(compared, _COMPARES, True)
    return compared


class _Losses:
    """Gradients of the losses of this rank's tokens, over the micro-batches of a step, until they were judged."""

    #: Some config of this process has a function that compares. With virtual stages it is that of the first one.
    are_compared: ClassVar[bool] = False

    def __init__(self, cp_group: Any) -> None:
        self.cp_group = cp_group
        self.judged = False
        self._clear()

    def _clear(self) -> None:
        self.seen = False  # a micro-batch, since the last comparison
        self.known = False  # one with losses of tokens
        self.sizes: list[Tensor] = []  # of gradients: how many are not 0, the smallest one of these, and the largest

    def watch(self, output: Any) -> None:
        """Look at the gradients of a micro-batch.

        Args:
            output: losses, [b, s]; others, as logits, are not looked at.
        """
        if self.judged or not self.are_compared or not torch.is_grad_enabled():
            return
        self.seen = True
        if isinstance(output, Tensor) and output.dim() == 2 and output.requires_grad:
            self.known = True
            output.register_hook(self._look)

    def _look(self, gradient: Tensor) -> None:
        if gradient.numel():
            size = gradient.detach().abs().float()
            smallest = size.masked_fill(size == 0, float("inf")).min()
            self.sizes.append(torch.stack([size.count_nonzero(), smallest, size.max()]))

    def compare(self, count: Tensor, scaled: Callable[[Tensor], Tensor] | None) -> None:
        """Raise ConfigError, on all ranks of the group, if their counts do not fit their losses.

        Args:
            count: of a step, as the loss function returned it.
            scaled: multiplies a loss by the loss scale; None: there is none.
        """
        factor = 1.0 if scaled is None else float(scaled(torch.ones((), device=count.device)))
        counted, kind = self._kind(factor)
        own = torch.tensor([int(count), counted, kind], dtype=torch.int32, device=count.device)
        gathered = [torch.empty_like(own) for _ in range(self.cp_group.size())]
        dist.all_gather(gathered, own, group=self.cp_group)
        counts, counted_of, kinds = zip(*torch.stack(gathered).tolist(), strict=True)
        self._clear()
        self.judged = versions.SUMS_OVER_RANKS if LossKind.UNKNOWN in kinds else any(kinds)
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        problem = problem_of_counts(counts, counted_of, kinds, versions.SUMS_OVER_RANKS, replicas)
        if problem is not None:
            raise ConfigError(problem)

    def _kind(self, factor: float) -> tuple[int, LossKind]:
        """Return the number of tokens with a gradient, and what these are where the loss is multiplied by a factor."""
        sizes = [size for size in torch.stack(self.sizes).tolist() if size[0]] if self.sizes else []
        if not sizes:
            return 0, LossKind.NONE if self.known else LossKind.UNKNOWN
        kind = LossKind.OTHER
        if all(isclose(edge, factor, rel_tol=_TOLERANCE) for size in sizes for edge in size[1:]):
            kind = LossKind.SUM
        return int(sum(size[0] for size in sizes)), kind


def problem_of_counts(
    counts: Sequence[int], counted: Sequence[int], kinds: Sequence[int], megatron_sums: bool, replicas: int
) -> str | None:
    """Return what is wrong with the counts of a step; None if nothing is known to be.

    Args:
        counts: what the loss function returned, over the micro-batches of a step, by context-parallel rank.
        counted: number of tokens that have a gradient, by context-parallel rank.
        kinds: of the losses, by context-parallel rank (:class:`LossKind`).
        megatron_sums: True if Megatron adds the counts up over context-parallel ranks.
        replicas: ranks whose gradients Megatron adds up: data-parallel times context-parallel ones.
    """
    total = sum(counted)
    if not any(counts):
        if replicas == 1 or not total:
            return None
        return (
            f"the loss function returned a loss of {total} tokens without their number (two values, or a number of 0); "
            "valid: three values, (sum of losses, number of tokens, report), since with calculate_per_token_loss "
            f"Megatron adds up the gradients of {replicas} ranks and divides them by that number alone; {_REMEDY}"
        )
    is_sum = LossKind.SUM in kinds and all(kind in (LossKind.SUM, LossKind.NONE) for kind in kinds)
    split = is_sum and list(counted) != [total] * len(counted)
    if megatron_sums:
        if split and list(counts) == [total] * len(counts):
            return (
                f"the loss function returned a count of {total} tokens on every context-parallel rank, the sum over "
                f"them; valid: each rank's own ({', '.join(map(str, counted))}), since Megatron adds these up, and "
                f"would divide gradients by {len(counts)} times as many; {_REMEDY}"
            )
        return None
    if len(set(counts)) == 1 and not (split and list(counts) == list(counted)):
        return None
    result = (
        "every rank's gradients by its own count, so that copies of weights drift apart"
        if len(set(counts)) > 1
        else "gradients by a part of them"
    )
    return (
        f"the loss function returned counts of {', '.join(map(str, counts))} tokens on the context-parallel ranks; "
        "valid in Megatron 0.12: their sum on each, since it adds counts up over data-parallel ranks alone, and would "
        f"divide {result}; {_REMEDY}"
    )
