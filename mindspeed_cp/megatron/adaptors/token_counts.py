"""Hold the number of tokens that a script's loss function returns against the tokens that have a gradient.

Megatron divides gradients by that number. Up to 0.12 it is added up over data-parallel ranks alone, so that a loss
function must return that of all context-parallel ranks; from 0.13 on it is added up over these, too. By the other rule
no loss curve looks wrong: 0.12 divides the gradients of each rank by another number, and copies of weights drift apart;
later versions divide them by context_parallel_size in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.patches.spans import SPAN

_REMEDY = "return mindspeed_cp.megatron.pretrain.loss_func(loss_mask, losses), or its second value (docs/megatron.md)"
_MARK = "_compares_token_counts"  # on the function that the config has


def compare_token_counts(chunk: nn.Module, cp_group: Any) -> None:
    """Compare the counts of a model's loss function with its gradients in the first step; in Megatron 0.12, where ranks
    may differ later, those of the ranks with each other in every step.

    The comparison runs before Megatron's ``finalize_model_grads``, the function that the model's config has.

    Args:
        chunk: the model, or one of its virtual pipeline stages; without effect for those that compute no loss.
        cp_group: its context-parallel group, in which ranks gather two numbers.
    """
    stage = next((module for module in chunk.modules() if hasattr(module, "post_process")), None)
    if stage is None or not stage.post_process:
        return
    comparison = _Comparison(cp_group)

    def after_forward(module: nn.Module, _: Any, output: Any) -> None:
        comparison.watch(output)
        config: Any = module.config
        finalize = getattr(config, "finalize_model_grads_func", None)
        if finalize is not None and not hasattr(finalize, _MARK):
            config.finalize_model_grads_func = comparison.before(finalize)

    stage.register_forward_hook(after_forward)


class _Comparison:
    """Counts of the tokens of this rank that have a gradient, until the end of the first step."""

    def __init__(self, cp_group: Any) -> None:
        self.cp_group = cp_group
        self.first = True
        self.counted: Tensor | None = None  # tokens with a gradient, on the device; None: none was watched

    def watch(self, output: Any) -> None:
        """Count the tokens of a micro-batch that get a gradient.

        Args:
            output: losses, [b, s], or logits, [b, s, vocabulary].
        """
        if self.first and isinstance(output, Tensor) and output.dim() >= 2 and output.requires_grad:
            output.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        with_gradient = gradient.ne(0)
        if gradient.dim() > 2:  # logits
            with_gradient = with_gradient.flatten(2).any(dim=2)
        count = with_gradient.sum().to(torch.int32)
        self.counted = count if self.counted is None else self.counted + count

    def before(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that compares the counts, and calls Megatron's."""

        @wraps(finalize)
        def compared(*args: Any, **kwargs: Any) -> Any:
            count = kwargs.get("num_tokens", args[1] if len(args) > 1 else None)
            if isinstance(count, Tensor) and (self.first or not SPAN.SUMS_COUNTS):
                self._compare(count)
            return finalize(*args, **kwargs)

        setattr(compared, _MARK, True)
        return compared

    def _compare(self, count: Tensor) -> None:
        """Raise ConfigError, on all ranks of the group, if their counts do not fit."""
        counted = torch.full_like(count, -1) if self.counted is None else self.counted.to(count)
        own = torch.stack([count.reshape([]), counted.reshape([])]).to(torch.int32)
        gathered = [own]
        if self.cp_group.size() > 1:
            gathered = [torch.empty_like(own) for _ in range(self.cp_group.size())]
            dist.all_gather(gathered, own, group=self.cp_group)
        pairs = [pair.tolist() for pair in gathered]
        self.first, self.counted = False, None
        problem = problem_of_counts([pair[0] for pair in pairs], [pair[1] for pair in pairs], SPAN.SUMS_COUNTS)
        if problem is not None:
            raise ConfigError(problem)


def problem_of_counts(counts: Sequence[int], counted: Sequence[int], megatron_sums: bool) -> str | None:
    """Return what is wrong with the counts of a step; None if nothing is known to be.

    Counts that are neither those of the ranks nor their sum, as a loss function with weights may have, are its own
    matter.

    Args:
        counts: what the loss function returned, over the micro-batches of a step, by context-parallel rank.
        counted: number of tokens that have a gradient, by context-parallel rank; -1: unknown.
        megatron_sums: True if Megatron adds the counts up over context-parallel ranks.
    """
    known, total = min(counted) >= 0, sum(counted)
    if known and total and not any(counts):
        return (
            f"the loss function returned a count of 0 tokens in a step, but {total} have a gradient; valid: three "
            "values, (sum of losses, number of tokens, report), since calculate_per_token_loss makes Megatron divide "
            f"by the number alone; {_REMEDY}"
        )
    uneven = known and list(counted) != [total] * len(counted)
    if megatron_sums:
        if uneven and list(counts) == [total] * len(counts):
            return (
                f"the loss function returned a count of {total} tokens on every context-parallel rank, the sum over "
                f"them; valid: each rank's own ({_listed(counted)}), since Megatron adds these up, and would divide "
                f"gradients by {len(counts)} times as many; {_REMEDY}"
            )
        return None
    if len(set(counts)) > 1 or (uneven and list(counts) == list(counted)):
        return (
            f"the loss function returned counts of {_listed(counts)} tokens on the context-parallel ranks; valid in "
            "Megatron 0.12: their sum on each, since it adds counts up over data-parallel ranks alone, and would "
            f"divide every rank's gradients by its own count, so that copies of weights drift apart; {_REMEDY}"
        )
    return None


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
