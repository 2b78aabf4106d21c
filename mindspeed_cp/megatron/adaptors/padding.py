"""Rows of padding for the routers of layers that Megatron or MindSpeed does not tell."""

from __future__ import annotations

from inspect import signature
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.mindspeed_compat import replaced_by

_RECOMPUTATION = "megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward"


def give_padding(layer: nn.Module) -> None:
    """Give a layer with experts the rows of padding of packed_seq_params, where it is called without padding_mask."""
    layer.register_forward_pre_hook(_mark_padding, with_kwargs=True)


def give_padding_to_recomputed(chunk: nn.Module) -> None:
    """Call :func:`give_padding` for the layers of a model that MindSpeed recomputes.

    Its function for ``--recompute-method block`` and ``--swap-attention`` takes a padding_mask for Megatron 0.16, and
    calls layers without. Before 0.16 there is none.
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
