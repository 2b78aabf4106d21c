"""What ranks compute in each turn of a plan: tiles, with their documents and positions in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.cost.transfers import heads_of, places, turn_count
from mindspeed_cp.layout import expand
from mindspeed_cp.plan import Plan, Program
from mindspeed_cp.plan.records import record
from mindspeed_cp.plan.tiles import pairs

#: A tile of rank `rank` in turn `turn` (counted as in a timeline): q_rows queries of document `doc`, whose
#: positions in it are among q_first .. q_last, against k_rows keys among k_first .. k_last. `pairs` of them are
#: visible, and computed for `heads` query heads. Rows may be fewer than positions: a tile may join several runs.
PLACED = record("rank turn doc q_first q_last q_rows k_first k_last k_rows pairs heads part")


class Turns:
    """All tiles of some ranks in one direction of a plan.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        ranks: of which tiles are wanted.

    Attributes:
        tiles: records of dtype PLACED, sorted by rank and turn, then those with most pairs first.
    """

    def __init__(self, plan: Plan, direction: str, ranks: Sequence[int]) -> None:
        self._turns = turn_count(plan, direction)
        found = [np.empty(0, PLACED)]
        for part, (piece, place) in enumerate(zip(plan.pieces, places(plan, direction), strict=True)):
            program: Program = getattr(piece, direction)
            heads = heads_of(piece.q_layout, plan.attention.heads)
            for rank in ranks:
                tiles = _placed(piece, program, rank)
                tiles["turn"] = place[tiles["turn"]]
                tiles["heads"], tiles["part"] = heads[rank], part
                found.append(tiles)
        all_tiles = np.concatenate(found)
        self._key = all_tiles["rank"] * self._turns + all_tiles["turn"]
        order = np.lexsort((-all_tiles["pairs"] * all_tiles["heads"], self._key))
        self.tiles, self._key = all_tiles[order], self._key[order]

    def of(self, rank: int, turn: int) -> np.ndarray:
        """Tiles (records) of a rank in a turn, the largest first."""
        low, high = np.searchsorted(self._key, [rank * self._turns + turn, rank * self._turns + turn + 1])
        return self.tiles[low:high]


def _placed(piece: Plan, program: Program, rank: int) -> np.ndarray:
    """Tiles of one rank in one piece; `turn` is still the step."""
    tiles = program.tiles(rank)
    out = np.zeros(len(tiles), PLACED)
    if not len(tiles):
        return out
    out["rank"], out["turn"] = rank, tiles["step"]
    for name in ("doc", "q_rows", "k_rows"):
        out[name] = tiles[name]
    out["pairs"] = pairs(tiles, piece.attention)
    queries = piece.q_layout.of(rank)
    rows = np.cumsum(queries["stop"] - queries["start"]) - (queries["stop"] - queries["start"])
    starts = queries["start"] - piece.documents.offsets[queries["doc"]]
    for name, row in (("q_first", tiles["q_row"]), ("q_last", tiles["q_row"] + tiles["q_rows"] - 1)):
        at = np.searchsorted(rows, row, "right") - 1
        out[name] = starts[at] + row - rows[at]
    # Rows of all slots at all steps as one axis: keys of a content lie one after the other on it.
    wide, slots = int(program.capacity.max(initial=0)) + 1, program.capacity.shape[1]
    contents = program.contents_of(rank)
    keys = program.spans[expand(contents["first"], contents["count"])]
    of = np.repeat(np.arange(len(contents)), contents["count"])
    length = keys["stop"] - keys["start"]
    ends = np.cumsum(length)
    first = (ends - length) - np.repeat((ends - length)[_firsts(contents["count"])], contents["count"])
    axis = (contents["step"] * slots + contents["slot"])[of] * wide + contents["row"][of] + first
    starts = keys["start"] - piece.kv_documents.offsets[keys["doc"]]
    base = (tiles["step"] * slots + tiles["slot"]) * wide
    for name, row in (("k_first", tiles["k_row"]), ("k_last", tiles["k_row"] + tiles["k_rows"] - 1)):
        at = np.searchsorted(axis, base + row, "right") - 1
        out[name] = starts[at] + base + row - axis[at]
    return out


def _firsts(count: np.ndarray) -> np.ndarray:
    """For each of several runs that follow each other, the number of its first member."""
    return np.minimum(np.cumsum(count) - count, max(int(count.sum()) - 1, 0))
