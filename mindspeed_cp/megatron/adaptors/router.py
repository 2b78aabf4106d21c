"""PlannedRouter: a router of experts whose balancing losses do not depend on which rank holds which tokens; and rows of
padding for the routers of layers that Megatron or MindSpeed does not tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.mindspeed_compat import replaced_by
from mindspeed_cp.megatron.patches.compat import replaced


class PlannedRouter(TopKRouter):
    """Megatron's TopKRouter with exact balancing losses; :func:`install` puts it into specs with experts.

    Megatron takes every rank to hold as many tokens as this one, and (0.16) divides the gradients of the auxiliary and
    the z-loss by the number of tensor- and context-parallel ranks where the loss is a sum over tokens
    (calculate_per_token_loss). Here tokens are counted, and every rank's share of a loss has the same weight: the
    number of tokens of the whole micro-batch, as on one rank.

    Rows of padding count as tokens unless the model is called with ``**params.padding_arguments(model)``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calculate_per_token_loss = False  # the weight by tokens is given below, not by Megatron's rule
        self._tokens: Tensor | None = None

    def _apply_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: Any, **__: Any) -> Tensor:
        with self._counted(routing_map):
            return super()._apply_aux_loss(probs, scores, routing_map, with_padding_mask=True)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, seq_length: int, bsz: int, *_: Any, **__: Any
    ) -> Tensor:
        with self._counted(routing_map):
            return super()._apply_seq_aux_loss(probs, scores, routing_map, seq_length, bsz, with_padding_mask=True)

    def _apply_global_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: Any, **__: Any) -> Tensor:
        with self._counted(routing_map):
            return super()._apply_global_aux_loss(probs, scores, routing_map, with_padding_mask=True)

    @contextmanager
    def _counted(self, routing_map: Tensor) -> Iterator[None]:
        """Set self._tokens within the block to the number of tokens of the micro-batch over all ranks that share it."""
        total = routing_map.sum(dtype=torch.float32) / self.topk  # rows of padding go to no expert here
        dist.all_reduce(total, group=self.tp_cp_group)
        with replaced(self, "_tokens", total):
            yield

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Log the loss and add its gradient once, as Megatron does; then add the rest of its weight."""
        assert self._tokens is not None
        activation = super().attach_and_log_load_balancing_loss(activation, aux_loss_coeff, aux_loss, *args, **kwargs)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * (self._tokens - 1))

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the gradient of the sum over tokens; Megatron adds that of this rank's mean once."""
        coeff = self.config.moe_z_loss_coeff
        if coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        ranks = self.tp_cp_group.size()
        own = z_loss_func(logits, coeff / ranks, padding_mask=padding_mask)
        rows = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        logits = super().apply_z_loss(logits, padding_mask)
        return MoEAuxLossAutoScaler.apply(logits, own * (rows * ranks - 1))

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if not self.enable_expert_bias:
            return
        if padding_mask is not None:  # Megatron 0.16 would take it for a row of the map
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        super()._apply_expert_bias(routing_map)


_RECOMPUTATION = "megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward"


def give_padding(layer: nn.Module) -> None:
    """Give a layer with experts the rows of padding of packed_seq_params, where it is called without padding_mask."""
    layer.register_forward_pre_hook(_mark_padding, with_kwargs=True)


def give_padding_to_recomputed(chunk: nn.Module) -> None:
    """Call :func:`give_padding` for the layers of a model that MindSpeed recomputes.

    Its function for ``--recompute-method block`` and ``--swap-attention`` takes a padding_mask for Megatron 0.16, and
    calls layers without. In 0.12 there is none.
    """
    if not replaced_by(_RECOMPUTATION):
        return
    if "padding_mask" not in signature(TransformerBlock._checkpointed_forward).parameters:
        return
    for block in chunk.modules():
        if isinstance(block, TransformerBlock) and block.config.num_moe_experts:
            for layer in block.layers:
                give_padding(layer)


def _mark_padding(
    layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a layer with the rows of padding that its router has."""
    params, config = named.get("packed_seq_params"), layer.config
    if not isinstance(params, PlannedBatchParams) or not params.linear_padding or named.get("padding_mask") is not None:
        return None
    hidden: Tensor = arguments[0] if arguments else named["hidden_states"]
    mask = params.padding_mask(hidden.device)
    if config.sequence_parallel:  # type: ignore[union-attr]
        share = len(hidden)
        first = share * layer.self_attention.core_attention.tp_group.rank()  # type: ignore[union-attr,operator]
        mask = mask[:, first : first + share]
    return arguments, {**named, "padding_mask": mask}
