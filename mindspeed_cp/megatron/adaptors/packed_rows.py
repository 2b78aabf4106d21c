"""Documents and rows of packed sequences: from cu_seqlens, as data loaders pad and cut them.

Data loaders cut a packed row over context-parallel ranks in one of two ways, and PackedSeqParams do not say in which::

    "document"  every sequence in 2 * cp equal chunks, of which rank r holds chunks r and 2 * cp - 1 - r
                (Megatron's --sft, verl, ms-swift)
    "row"       the whole row in 2 * cp equal chunks, wherever documents end
                (Megatron's --dataloader-inter-document-masking)

With padding, ``cu_seqlens_q`` has the ends of sequences without it, ``cu_seqlens_q_padded`` with it. Padding stands
behind its sequence, so that under a causal mask no token sees it: a padded sequence is one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp import ConfigError, Documents, Plan
from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.algorithms.linear_layout import with_caller_layout
from mindspeed_cp.layout import Layout, row_zigzag, zigzag

PACKED_CUTS = ("document", "row")

#: Fields of PackedSeqParams with cumulative lengths.
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def to_host(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copy integer tensors to the host, all of a device in one copy, which waits for the work before it.

    Args:
        tensors: by name; None is left out, and the same tensor under two names is copied once.

    Raises:
        ConfigError: one of them has no integers.
    """
    given = {name: torch.as_tensor(value) for name, value in tensors.items() if value is not None}
    for name, tensor in given.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise ConfigError(f"{name} is {tensor.dtype}; valid: integers")
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for tensor in given.values():
        by_device.setdefault(tensor.device, {})[id(tensor)] = tensor
    arrays: dict[int, np.ndarray] = {}
    for distinct in by_device.values():
        flat = torch.cat([tensor.detach().reshape(-1).long() for tensor in distinct.values()]).cpu()
        parts = flat.split([tensor.numel() for tensor in distinct.values()])
        arrays |= {key: part.numpy() for key, part in zip(distinct, parts, strict=True)}
    return {name: arrays[id(tensor)].reshape(tensor.shape) for name, tensor in given.items()}


def documents_of_sequences(ends: Mapping[str, np.ndarray], mask: str) -> Documents:
    """Return the documents of packed sequences, padding included, without those of no token.

    Args:
        ends: cumulative lengths [sequences + 1] by their names in PackedSeqParams, on the host.
        mask: mask of the attention, "causal" or "full".

    Raises:
        ConfigError: cu_seqlens_q is missing, keys are of other sequences than queries, padding does not fit, or a full
            mask would show it.
    """
    if "cu_seqlens_q" not in ends:
        raise ConfigError(
            "packed_seq_params has no cu_seqlens_q; valid: 0, then the end of each sequence; or what "
            "mindspeed_cp.megatron.planned_params(plan, rank) returns"
        )
    lengths = {name: _lengths(name, array) for name, array in ends.items()}
    for suffix in ("", "_padded"):
        query, key = f"cu_seqlens_q{suffix}", f"cu_seqlens_kv{suffix}"
        if key in lengths and not np.array_equal(lengths.get(query, lengths["cu_seqlens_q"]), lengths[key]):
            raise ConfigError(
                f"{key} differs from {query}; valid: equal, as planned attention under Megatron is self-attention"
            )
    real = lengths["cu_seqlens_q"]
    padded = lengths.get("cu_seqlens_q_padded", real)
    if len(padded) != len(real) or (padded < real).any():
        raise ConfigError(
            f"cu_seqlens_q has sequences of {_short(real)} tokens, but cu_seqlens_q_padded of {_short(padded)}; valid: "
            "as many sequences, none shorter with padding than without"
        )
    if mask == "full" and not np.array_equal(padded, real):
        raise ConfigError(
            "cu_seqlens_q_padded differs from cu_seqlens_q, and with attn_mask_type no_mask tokens would see the "
            "padding behind their sequence; valid: a causal mask, or sequences without padding (planned_batch_from "
            "cuts sequences of any length)"
        )
    return Documents(padded[padded > 0])


def layout_of_cut(documents: Documents, ranks: int, cut: str) -> Layout:
    """Return the rows of every rank after a data loader has cut the packed row.

    Args:
        documents: packed sequences, padding included.
        ranks: number of context-parallel ranks.
        cut: "document" or "row".

    Raises:
        ConfigError: chunks are not equal; names the sequence.
    """
    chunks = 2 * ranks
    if ranks == 1:
        return zigzag(documents, 1)
    if cut == "row":
        if documents.tokens % chunks:
            raise ConfigError(
                f"the packed row has {documents.tokens} tokens; valid with packed_cut 'row': a multiple of 2 * "
                f"context_parallel_size, {chunks}; pad the row"
            )
        return row_zigzag(documents, ranks)
    uneven = np.flatnonzero(documents.lengths % chunks)
    if len(uneven):
        length = int(documents.lengths[uneven[0]])
        raise ConfigError(
            f"sequence {uneven[0]} of packed_seq_params has {length} tokens; valid where each sequence is cut over the "
            f"ranks: a multiple of 2 * context_parallel_size, {chunks}; pad it to {length + -length % chunks} and give "
            "the padded ends as cu_seqlens_q_padded, or cut the batch with planned_batch_from, which takes any length; "
            "if the data loader cuts the whole row (--dataloader-inter-document-masking): install(spec, suite, "
            "packed_cut='row')"
        )
    return zigzag(documents, ranks)


def build_plan_of_cut(cut: str, documents: Documents, topology: Any, *arguments: Any, **options: Any) -> Plan:
    """Build a plan whose caller holds the rows of :func:`layout_of_cut`; other arguments as for build_plan."""
    if options.get("remap") == "hidden":
        raise ConfigError(
            "remap is 'hidden'; valid for batches that a data loader has cut: 'off', since linear layers have the rows "
            "that it gave them; or cut the batch with planned_batch_from"
        )
    layout = layout_of_cut(documents, topology.ranks, cut)
    return with_caller_layout(build_plan(documents, topology, *arguments, **options), layout)


def _lengths(name: str, ends: np.ndarray) -> np.ndarray:
    """Return the lengths of sequences, int64 [sequences], from their ends [sequences + 1] or [1, sequences + 1]."""
    if ends.ndim == 2 and len(ends) == 1:
        ends = ends[0]
    try:
        return Documents.from_cu_seqlens(ends).lengths
    except ConfigError as error:
        raise ConfigError(f"packed_seq_params.{name}: {error}") from None


def _short(lengths: np.ndarray) -> str:
    return f"{lengths[:6].tolist()}{' and more' if len(lengths) > 6 else ''}"
