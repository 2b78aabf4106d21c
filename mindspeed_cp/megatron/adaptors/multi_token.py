"""Multi-token prediction: tokens, labels and loss masks of later positions, by the plan of the micro-batch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn

from mindspeed_cp import ConfigError, context_parallel_roll
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.router import give_padding
from mindspeed_cp.megatron.patches.multi_token import multi_token_by_plan

_LABELS = 4  # position among the arguments of GPTModel.forward


class PlannedRolls:
    """Rolls of this rank's rows of a micro-batch.

    Args:
        core: a planned attention of the model, which knows the group, and the plans of batches without one.
    """

    def __init__(self, core: PlannedAttention) -> None:
        self._core = core
        self.ranks = int(core.cp_group.size())

    def roll(self, tensor: Tensor, shift: int, given: PackedSeqParams | None) -> Tensor:
        """Return the rows `shift` tokens later in the same document, 0 where it has none.

        Args:
            tensor: [..., 1, s], rows of this rank; rows of padding stay as they are, and so does a padding mask.
            shift: number of tokens.
            given: the micro-batch's packed_seq_params.

        Raises:
            ConfigError: the shape is not that of this rank's rows.
        """
        if tensor.dtype is torch.bool:  # a padding mask, under sequence parallelism of this rank's share
            return tensor
        params = self._params(given)
        length, padded = params.linear_rows, params.linear_rows + params.linear_padding
        if tensor.dim() < 2 or list(tensor.shape[-2:]) != [1, padded]:
            raise ConfigError(
                f"multi-token prediction rolls a tensor of shape {list(tensor.shape)}, but rank {params.rank} of the "
                f"plan has [1, {padded}], rows of padding included; cut tokens, labels and loss_mask with the same "
                "plan: planned_batch does"
            )
        assert params.plan is not None
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

    def rows_of_documents(self, like: Tensor, given: PackedSeqParams | None) -> Tensor:
        """Return 1.0 for rows of documents and 0.0 for rows of padding, fp32 [1, s]."""
        return (~self._params(given).padding_mask(like.device)).float()

    def _params(self, given: PackedSeqParams | None) -> PlannedBatchParams:
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
        assert given is not None  # attention has refused a micro-batch without a plan
        return self._core.packed.planned(given, self._core.cp_group)


class RollScope:
    """Hooks around the forward of a model, in which Megatron rolls by the plan."""

    def __init__(self, core: PlannedAttention) -> None:
        self._rolls = PlannedRolls(core)
        self._patches = ExitStack()

    def before(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Patch Megatron.

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
        self._patches.enter_context(multi_token_by_plan(self._rolls))

    def after(self, *_: Any) -> None:
        """Undo the patches."""
        self._patches.close()


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
        scope = RollScope(core)
        model.rolls_by_plan = scope  # type: ignore[assignment]
        model.register_forward_pre_hook(scope.before, with_kwargs=True)
        model.register_forward_hook(scope.after, always_call=True)
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
