"""Redistributions: every row and head arrives at its place in the target exactly once."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Redistribution, ragged_arange


def check_redistribution(redistribution: Redistribution, name: str) -> None:
    """Check that a redistribution fills every row of its target once, with the right token.

    The adjoint uses the same rank pairs in the opposite direction, so both are proved.

    Raises:
        PlanError: names rank and row, or the pair of ranks.
    """
    for rank in range(redistribution.target.ranks):
        wanted = redistribution.target.tokens(rank)
        low, high = redistribution.target.head_range(rank, redistribution.heads)
        if low == high:
            continue
        arrived, last = np.full(len(wanted), -1), np.empty(len(wanted), np.int64)
        for pair in redistribution.rank_pairs[redistribution.rank_pairs["dst"] == rank]:
            runs, where = redistribution.runs_of(pair), f"{name}: rank {rank}, from rank {pair['src']}"
            if (pair["head"], pair["head"] + pair["heads"]) != (low, high):
                raise PlanError(
                    f"{where}: heads {pair['head']} to {pair['head'] + pair['heads'] - 1} arrive, but the rank holds "
                    f"heads "
                    f"{low} to {high - 1}"
                )
            given = redistribution.source.tokens(int(pair["src"]))
            src_rows, dst_rows = (ragged_arange(runs[side], runs["rows"]) for side in ("src_row", "dst_row"))
            outside = (dst_rows < 0) | (dst_rows >= len(wanted)) | (src_rows < 0) | (src_rows >= len(given))
            if outside.any() or len(dst_rows) != pair["rows"]:
                raise PlanError(f"{where}: its {pair['rows']} rows do not exist on both sides")
            number = np.arange(len(dst_rows))
            last[dst_rows] = number
            if (arrived[dst_rows] >= 0).any() or (last[dst_rows] != number).any():
                raise PlanError(f"{where}: a row arrives twice")
            arrived[dst_rows] = given[src_rows]
        wrong = np.flatnonzero(arrived != wanted)
        if len(wrong):
            row = int(wrong[0])
            content = "nothing" if arrived[row] < 0 else f"token {arrived[row]}"
            raise PlanError(
                f"{name}: rank {rank}, row {row}: {content} arrives, but the layout has token {wanted[row]}"
            )
