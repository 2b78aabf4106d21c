"""Multi-token prediction: tokens, labels and loss masks of later positions, by the plan of the micro-batch.

Functions of Megatron are patched while a model with planned attention runs its forward:

=====================================  ==========  ==========================================
problem                                versions    patch
=====================================  ==========  ==========================================
roll_tensor takes ranks to hold        0.16-       it rolls by the plan of the micro-batch,
Megatron's zig-zag of each document                  and counts the tokens of all ranks
full recomputation saves               0.16, 0.17  parameters stay outside of what is saved
packed_seq_params as a tensor
process_mtp_loss weighs losses by the  0.17-       losses are weighed by the tokens of all
tokens of each rank                                  ranks
=====================================  ==========  ==========================================

Megatron 0.12 refuses packed_seq_params there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn

from mindspeed_cp import ConfigError, context_parallel_roll
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.router import give_padding
from mindspeed_cp.megatron.patches.compat import replaced

_LABELS = 4  # position among the arguments of GPTModel.forward
_HAS_LOSS_FUNCTION = hasattr(multi_token_prediction, "process_mtp_loss")


class PlannedRolls:
    """Rolls of this rank's rows of a micro-batch, and hooks around the forward of a model, in which Megatron rolls so.

    Args:
        core: a planned attention of the model, which knows the group, and the plans of batches without one.
    """

    def __init__(self, core: PlannedAttention) -> None:
        self._core = core
        self.ranks = int(core.cp_group.size())
        self._patches = ExitStack()

    def roll(self, tensor: Tensor, shift: int, given: PackedSeqParams | None) -> Tensor:
        """Return the rows `shift` tokens later in the same document, 0 where it has none.

        Args:
            tensor: [..., 1, t], rows of this rank; rows of padding stay as they are, and so does a padding mask.
            shift: number of tokens.
            given: the micro-batch's packed_seq_params.

        Raises:
            ConfigError: the shape is not that of this rank's rows.
        """
        if tensor.dtype is torch.bool:  # a padding mask, under sequence parallelism of this rank's share
            return tensor
        params = self.params_of(given)
        length, padded = params.linear_rows, params.linear_rows + params.linear_padding
        if tensor.dim() < 2 or list(tensor.shape[-2:]) != [1, padded]:
            raise ConfigError(
                f"multi-token prediction rolls a tensor of shape {list(tensor.shape)}, but rank {params.rank} of the "
                f"plan has [1, {padded}], rows of padding included; cut tokens, labels and loss_mask "
                "with the same plan: planned_batch does"
            )
        rows = tensor[..., 0, :length].movedim(-1, 0)
        rolled = context_parallel_roll(
            rows, params.plan, shift, self._core.cp_group, timeout=self._core.suite.timeout_seconds
        )
        return torch.cat([rolled.movedim(0, -1).unsqueeze(-2), tensor[..., length:]], -1)

    def total(self, values: Tensor) -> Tensor:
        """Sum values over all context-parallel ranks, in at least fp32: half precision rounds counts above 256."""
        total = values.detach().sum(dtype=torch.promote_types(values.dtype, torch.float32))
        if self.ranks > 1:
            dist.all_reduce(total, group=self._core.cp_group)
        return total

    def before(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Patch Megatron before the forward of a model.

        Raises:
            ConfigError: labels come without a loss mask, or a loss mask is not floating point.
        """
        labels = named.get("labels", arguments[_LABELS] if len(arguments) > _LABELS else None)
        mask = named.get("loss_mask")
        has_labels = labels is not None or mask is not None  # else Megatron makes them from tokens
        if has_labels and not (isinstance(mask, Tensor) and mask.is_floating_point()):
            described = mask.dtype if isinstance(mask, Tensor) else mask
            raise ConfigError(
                f"loss_mask of the model is {described}; valid with labels and mtp_num_layers: the batch's loss_mask, "
                "floating point, which says which labels the losses of multi-token prediction count: "
                "model(..., labels=batch['labels'], loss_mask=batch['loss_mask'])"
            )
        self._patches.close()  # of a forward that ended without its hooks
        self._patches.enter_context(multi_token_by_plan(self))

    def after(self, *_: Any) -> None:
        """Undo the patches, after the forward."""
        self._patches.close()

    def params_of(self, given: PackedSeqParams | None) -> PlannedBatchParams:
        """Return the parameters of a micro-batch with its plans, checked."""
        if isinstance(given, PlannedBatchParams):
            if given.pooled:
                raise ConfigError(
                    "the micro-batch is pooled over all data-parallel replicas, and multi-token prediction counts "
                    "tokens over context-parallel ranks; plan it over the context-parallel ranks, or set "
                    "mtp_num_layers to None"
                )
            if given.linear.documents.trees is not None:
                raise ConfigError(
                    "the micro-batch is one of trees, and a token has several successors in a tree, while multi-token "
                    "prediction takes one; set mtp_num_layers to None, or give each trajectory as a document of its own"
                )
            return given
        return self._core.plan_of(given)[0]


@contextmanager
def multi_token_by_plan(rolls: PlannedRolls) -> Iterator[None]:
    """Let Megatron's multi-token prediction roll rows by `rolls` inside this block."""
    with ExitStack() as stack:
        # Megatron divides a rank's sum of losses by the count, and takes the mean over ranks; with a loss function of
        # its own it divides gradients by the count too, and never by less than 1.
        roll = _roll_tensor(rolls, 1 if _HAS_LOSS_FUNCTION else rolls.ranks)
        for module in (multi_token_prediction, gpt_model):
            if hasattr(module, "roll_tensor"):
                stack.enter_context(replaced(module, "roll_tensor", roll))
        recomputation = MultiTokenPredictionLayer._checkpointed_forward
        if "packed_seq_params" not in signature(recomputation).parameters:
            recomputes = _saves_tensors_alone(recomputation)
            stack.enter_context(replaced(MultiTokenPredictionLayer, "_checkpointed_forward", recomputes))
        if _HAS_LOSS_FUNCTION:
            loss = _weighs_by_all_tokens(multi_token_prediction.process_mtp_loss, rolls)
            stack.enter_context(replaced(gpt_model, "process_mtp_loss", loss))
            helper = _logs_a_sum(multi_token_prediction.MTPLossLoggingHelper, rolls.ranks)
            stack.enter_context(replaced(multi_token_prediction, "MTPLossLoggingHelper", helper))
        yield


def _roll_tensor(rolls: PlannedRolls, shares: int) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """Return a function for roll_tensor: rolled rows, and for a loss mask the counted tokens of all ranks / shares."""

    def roll_tensor(
        tensor: Tensor | None, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        if tensor is None:  # position_ids of a model without learned positions
            return None, None
        assert dims in (-1, tensor.dim() - 1), "Megatron rolls the last dimension"
        rolled = rolls.roll(tensor, -shifts, packed_seq_params)
        if not rolled.is_floating_point():  # nobody counts tokens, labels and positions
            return rolled, rolled.sum()
        return rolled, rolls.total(rolled).clamp(min=1) / shares

    return roll_tensor


def _saves_tensors_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _checkpointed_forward(layer: Any, forward: Callable[..., Any], **arguments: Any) -> Any:
        saved = {name: value for name, value in arguments.items() if value is None or isinstance(value, Tensor)}
        kept = {name: value for name, value in arguments.items() if name not in saved}

        def run(*values: Any, **named: Any) -> Any:
            return forward(**dict(zip(saved, values, strict=False)), **named, **kept)

        return original(layer, run, **saved)

    return _checkpointed_forward


def _weighs_by_all_tokens(original: Callable[..., Tensor], rolls: PlannedRolls) -> Callable[..., Tensor]:
    """Return a function for process_mtp_loss, whose weight is (all tokens) / (all tokens that are left after a roll).

    Megatron has that weight from each rank's tokens. Without calculate_per_token_loss it divides by the count of
    roll_tensor alone, here that of all ranks; the factor has the rest.
    """

    @wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Tensor:
        values: dict[str, Any] = signature(original).bind(*args, **kwargs).arguments
        given: Any = values.get("packed_seq_params")
        mask: Any = values.get("loss_mask")
        if values["labels"] is None and values.get("input_ids") is not None:
            tokens = values["input_ids"]
            mask = (~rolls.params_of(given).padding_mask(tokens.device)).float() if mask is None else mask
            values["labels"], mask = rolls.roll(tokens, 1, given), rolls.roll(mask, 1, given)
        if values["labels"] is None:
            return original(**values)
        config = copy.copy(values["config"])
        config.calculate_per_token_loss = False
        config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * rolls.total(mask)
        return original(**{**values, "loss_mask": mask, "config": config})

    return process_mtp_loss


def _logs_a_sum(helper: type, ranks: int) -> type:
    """Return MTPLossLoggingHelper for losses that are a rank's share: the mean that it takes over ranks is the sum."""
    names = ("save_loss_to_tracker", "save_metrics_to_tracker")  # the second one in 0.19
    (name,) = (name for name in names if hasattr(helper, name))
    original = getattr(helper, name)

    def save(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        original(loss * ranks, *args, **kwargs)

    return type(helper.__name__, (helper,), {name: staticmethod(save)})


def install_multi_token(chunk: nn.Module, core: PlannedAttention | None) -> None:
    """Let models with multi-token prediction roll by the plan of each micro-batch; a second call changes nothing.

    Args:
        chunk: a model, bare or wrapped.
        core: one of its planned attentions.

    Raises:
        ConfigError: a pipeline stage computes losses of multi-token prediction, but has no attention.
    """
    for model in chunk.modules():
        config = getattr(model, "config", None)
        if not (hasattr(model, "mtp_process") and getattr(config, "mtp_num_layers", None)):
            continue
        if not (model.mtp_process or model.post_process) or hasattr(model, "rolls_by_plan"):
            continue
        if core is None:
            raise ConfigError(
                "install_model: this pipeline stage computes the losses of multi-token prediction, but has no "
                "attention; valid: a pipeline layout that puts them on a stage with layers"
            )
        rolls = PlannedRolls(core)
        model.rolls_by_plan = rolls  # type: ignore[assignment]
        model.register_forward_pre_hook(rolls.before, with_kwargs=True)
        model.register_forward_hook(rolls.after, always_call=True)
        for layer in model.modules():
            if isinstance(layer, MultiTokenPredictionLayer):
                _install_layer(layer)


def _install_layer(layer: MultiTokenPredictionLayer) -> None:
    """Number the attention of a layer behind those of the decoder, and give its router the rows of padding."""
    inner: Any = getattr(layer, "transformer_layer", None) or layer.mtp_model_layer  # 0.19 has another name
    for module in inner.modules():
        if isinstance(module, PlannedAttention):
            module.layers_before = layer.config.num_layers + layer.layer_number - module.layer_number
    if layer.config.num_moe_experts:
        give_padding(inner)
