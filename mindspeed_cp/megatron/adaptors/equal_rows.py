"""The plan of a batch without one: whole sequences of equal length, cut as Megatron cuts them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

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
