"""A micro-batch without plan: whole sequences of equal length, cut as Megatron cuts them.

One that has documents is refused: attention would cross them without a word.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.layout import Layout
from mindspeed_cp.megatron.adaptors.batch import planned_params
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams


@lru_cache(maxsize=8)
def params_of_equal_rows(
    rows: int,
    batch_size: int,
    ranks: int,
    rank: int,
    attention: AttentionConfig,
    algorithm: str,
    options: tuple[tuple[str, Any], ...],
) -> PlannedBatchParams:
    """Return the parameters of `batch_size` whole sequences as documents, of which each rank holds `rows` rows.

    They are unambiguous only for Megatron's own slicing, two equal chunks of every sequence on every rank: an odd count
    does not determine the length of the sequence, and an algorithm may need other tokens on this rank.
    """
    if ranks > 1 and rows % 2:
        raise ConfigError(
            f"query has {rows} rows of each sequence on rank {rank}, an odd number, and no plan; pass "
            "packed_seq_params=planned_params(plan, rank, 'sbhd'), or use sequence lengths divisible by 2 * "
            "context_parallel_size"
        )
    documents = Documents([rows * ranks] * batch_size)
    plan = build_plan(documents, Topology(1, ranks), attention, algorithm, **dict(options))
    if plan.linear_layout is not None or not _is_megatrons_zigzag(plan.layout, rank, rows, batch_size):
        raise ConfigError(
            f"algorithm {algorithm!r} has other tokens on rank {rank} than Megatron's zig-zag of chunks, by which a "
            "batch without a plan is cut; pass packed_seq_params=planned_params(plan, rank, 'sbhd') and cut the batch "
            "with planned_batch, or use algorithm 'ring'"
        )
    return planned_params(plan, rank, "sbhd", batch_size=batch_size)


def _is_megatrons_zigzag(layout: Layout, rank: int, rows: int, batch_size: int) -> bool:
    """True if the rank holds chunks `rank` and 2 * ranks - 1 - rank of the 2 * ranks chunks of every sequence."""
    if layout.ranks == 1:
        return True
    half = rows // 2
    chunks = np.array([rank, 2 * layout.ranks - 1 - rank])
    own = (chunks[:, None] * half + np.arange(half)).reshape(-1)
    starts = np.arange(batch_size)[:, None] * rows * layout.ranks
    return np.array_equal(layout.tokens(rank), (starts + own).reshape(-1))


_REMEDY = (
    "pass packed_seq_params of a plan of the documents (mindspeed_cp.megatron.planned_batch, or get_batch of "
    "mindspeed_cp.megatron.pretrain)"
)

#: Arguments of Megatron's training scripts that say that rows consist of documents.
_DOCUMENT_FLAGS = ("reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking")


def refuse_documents_without_plan(position_ids: Tensor | None, cp_group: Any) -> None:
    """Raise ConfigError if anything says that a micro-batch without plan has documents inside its rows.

    That are the arguments of Megatron's training script, if this process has any, and positions that differ from those
    of whole rows, which every rank holds as two chunks, as Megatron cuts them.

    Args:
        position_ids: this rank's positions, [batch_size, rows]; None on later pipeline stages.
        cp_group: the context-parallel group.
    """
    for flag in _DOCUMENT_FLAGS:
        if getattr(_training_arguments(), flag, False):
            raise ConfigError(
                f"{flag} is True, but the micro-batch has no plan, without which attention would cross its documents; "
                f"{_REMEDY}"
            )
    if position_ids is None or position_ids.dim() != 2 or not position_ids.shape[1]:
        return
    expected = _positions_of_whole_rows(position_ids.shape[1], cp_group.size(), cp_group.rank(), position_ids)
    if expected is not None and not torch.equal(position_ids, expected.expand_as(position_ids)):
        row, column = (position_ids != expected).nonzero()[0].tolist()
        raise ConfigError(
            f"position_ids[{row}, {column}] is {int(position_ids[row, column])} and would be {int(expected[column])} "
            f"in a whole row, so that the row has documents or padding, but the micro-batch has no plan; {_REMEDY}"
        )


def _positions_of_whole_rows(rows: int, ranks: int, rank: int, like: Tensor) -> Tensor | None:
    """Return the positions of chunks `rank` and 2 * ranks - 1 - rank; None for an odd number of rows, which attention
    refuses."""
    if ranks == 1:
        return torch.arange(rows, device=like.device, dtype=like.dtype)
    if rows % 2:
        return None
    half = torch.arange(rows // 2, device=like.device, dtype=like.dtype)
    return torch.cat([half + rank * len(half), half + (2 * ranks - 1 - rank) * len(half)])


def _training_arguments() -> Any:
    """Return the arguments of Megatron's training script; None where no such script runs."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
