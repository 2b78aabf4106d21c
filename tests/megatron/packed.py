"""Batches as Megatron's data loaders cut them, with plain PackedSeqParams; nothing here knows a plan or a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron import megatron_imports, planned_batch_from

with megatron_imports():
    from megatron.core.packed_seq_params import PackedSeqParams


def zigzag_rows(start: int, length: int, ranks: int, rank: int) -> list[int]:
    """Chunks rank and 2 * ranks - 1 - rank of the 2 * ranks chunks of a sequence."""
    if ranks == 1:
        return list(range(start, start + length))
    assert length % (2 * ranks) == 0
    chunk = length // (2 * ranks)
    return [start + c * chunk + i for c in (rank, 2 * ranks - 1 - rank) for i in range(chunk)]


def ends(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def plain_params(lengths: Sequence[int], padded: Sequence[int] | None = None, **changes: Any) -> Any:
    """PackedSeqParams as Megatron makes them; `padded` are the lengths with padding, `changes` other values of fields."""
    fields = dict(
        qkv_format="thd", cu_seqlens_q=ends(lengths), cu_seqlens_kv=ends(lengths),
        max_seqlen_q=max(padded or lengths, default=0), max_seqlen_kv=max(padded or lengths, default=0),
    )  # fmt: skip
    if padded is not None:
        fields |= dict(cu_seqlens_q_padded=ends(padded), cu_seqlens_kv_padded=ends(padded))
    params = PackedSeqParams(**fields)
    for name, value in changes.items():  # also fields that this Megatron does not have
        setattr(params, name, value)
    return params


def cut_batch(
    whole: dict[str, torch.Tensor], lengths: Sequence[int], way: str, ranks: int, rank: int
) -> tuple[dict[str, torch.Tensor], Any]:
    """This rank's rows of a batch [tokens] and its positions, each [1, t], and plain PackedSeqParams; positions of mrope,
    [3, tokens], if it has them, as [3, 1, t]. `way` is "document": each sequence is cut; "padded": padded before; or
    "row": the whole row is cut."""
    whole = dict(whole)
    mrope = whole.pop("position_ids", None)
    padded = [length + -length % (4 * ranks) for length in lengths] if way == "padded" else list(lengths)
    total = sum(padded)
    offsets = [0, *np.cumsum(padded)]
    places = np.concatenate([offset + np.arange(n) for offset, n in zip(offsets, lengths, strict=False)]).astype(int)
    full = {name: torch.zeros(total, dtype=value.dtype) for name, value in whole.items()}
    full["tokens"] += 5  # the padding has tokens that could be seen
    for name, value in whole.items():
        full[name][places] = value
    full["position_ids"] = torch.cat([torch.arange(n) for n in padded])
    if mrope is not None:
        full["position_ids"] = torch.zeros(total, 3, dtype=mrope.dtype)
        full["position_ids"][places] = mrope.T
    cuts = [(0, total)] if way == "row" else list(zip(offsets, padded, strict=False))
    rows = [row for start, length in cuts for row in zigzag_rows(int(start), length, ranks, rank)]
    params = plain_params(lengths, padded if way == "padded" else None)
    batch = {name: value[rows][None] for name, value in full.items()}
    if mrope is not None:
        batch["position_ids"] = batch["position_ids"].permute(2, 0, 1).contiguous()
    return batch, params


def plan_whole(
    whole: dict[str, torch.Tensor], lengths: Sequence[int], config: Any, suite: SuiteSettings, dropout_seed: int
) -> tuple[dict[str, Any], Any]:
    """Plan the batch as a loader with packed sequences gives it, with all that Megatron's has."""
    batch = {name: value[:, None] if name == "position_ids" else value[None] for name, value in whole.items()}
    batch |= dict(attention_mask=None, local_cp_size=None, cu_seqlens=ends(lengths)[None], max_seqlen=torch.zeros(1))
    return planned_batch_from(batch, config, suite, dropout_seed=dropout_seed)
