"""A part of the proof: a move between layouts brings every row and head to its place, once."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Redistribution, expand


def check_move(move: Redistribution, name: str) -> None:
    """Raise PlanError naming the rank and row that a move does not fill, fills twice, or fills with another token.

    Forward and adjoint use the same parts, one way and the other, so both are proved.
    """
    for rank in range(move.target.ranks):
        wanted = move.target.tokens(rank)
        low, high = move.target.head_range(rank, move.heads)
        if low == high:
            continue
        got = np.full(len(wanted), -1)
        for part in move.parts[move.parts["dst"] == rank]:
            runs = move.runs_of(part)
            where, rows = f"{name}: rank {rank}, from rank {part['src']}", expand(runs["dst_row"], runs["rows"])
            if (part["head"], part["head"] + part["heads"]) != (low, high):
                raise PlanError(f"{where}: heads {part['head']} and on, but the rank holds heads {low} to {high - 1}")
            held = move.source.tokens(int(part["src"]))
            taken = expand(runs["src_row"], runs["rows"])
            outside = (rows < 0) | (rows >= len(wanted)) | (taken < 0) | (taken >= len(held))
            if outside.any() or len(rows) != part["rows"]:
                raise PlanError(f"{where}: its {part['rows']} rows do not exist on both sides")
            if (got[rows] >= 0).any() or len(np.unique(rows)) != len(rows):
                raise PlanError(f"{where}: a row is brought twice")
            got[rows] = held[taken]
        wrong = np.flatnonzero(got != wanted)
        if len(wrong):
            row = int(wrong[0])
            found = "nothing" if got[row] < 0 else f"token {got[row]}"
            raise PlanError(
                f"{name}: rank {rank}, row {row}: {found} is brought, but the layout has token {wanted[row]}"
            )
