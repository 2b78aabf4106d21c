"""Where the tiles of a plan lie in the attention matrix of the whole batch.

A tile is rows of a rank's queries against rows of a slot. In the attention matrix, all queries of the batch downwards
and all its keys to the right, these rows are tokens here and there: a tile becomes one polygon for each run of queries
and run of keys in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mindspeed_cp.plan import BAND, CAUSAL, Plan


class Area(NamedTuple):
    """What a rank computes in one step between one run of queries and one run of keys.

    Attributes:
        step: of the forward; in a plan of parts its turn.
        owner: rank that holds the keys and values in `plan.kv_layout`.
        corners: (key token, query token), [corners, 2], in the order of an outline.
    """

    step: int
    owner: int
    corners: np.ndarray


class _Runs(NamedTuple):
    """Rows of a shard or slot as runs of tokens: rows row[i] and on are tokens start[i] .. stop[i]-1, of owner[i]."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    owner: np.ndarray

    @staticmethod
    def of(spans: np.ndarray, owner: np.ndarray, first_row: int = 0) -> _Runs:
        length = spans["stop"] - spans["start"]
        return _Runs(first_row + np.cumsum(length) - length, spans["start"], spans["stop"], owner)

    def between(self, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, last row plus one, token of the first row, owner) of each run among rows low .. high-1."""
        at = max(int(np.searchsorted(self.row, low, "right")) - 1, 0)
        for row, start, stop, owner in zip(*(column[at:].tolist() for column in self), strict=True):
            first, last = max(row, low), min(row + stop - start, high)
            if row >= high:
                break
            if first < last:
                yield first, last, start + first - row, owner


def areas(plan: Plan, rank: int) -> Iterator[Area]:
    """All that a rank computes in the forward, for its heads in each part."""
    turn_of = {turn: number for number, turn in enumerate(plan.turns())}
    for number, piece in enumerate(plan.pieces):
        shift = plan.kv_documents.offsets - piece.kv_documents.offsets, plan.documents.offsets - piece.documents.offsets
        for doc, area in _areas(piece, rank):
            yield Area(turn_of[number, area.step], area.owner, area.corners + [by[doc] for by in shift])


def _areas(plan: Plan, rank: int) -> Iterator[tuple[int, Area]]:
    """Of a plan without parts, with the document of each."""
    program, spans = plan.forward, plan.q_layout.of(rank)
    queries, owner = _Runs.of(spans, spans["rank"]), owner_of_keys(plan, rank)
    held: dict[tuple[int, int], list[tuple[int, int, _Runs]]] = {}
    for content in program.contents_of(rank):
        spans = program.spans_in(content)
        row, rows = int(content["row"]), int((spans["stop"] - spans["start"]).sum())
        runs = _Runs.of(spans, owner(spans["start"]), row)
        held.setdefault((int(content["step"]), int(content["slot"])), []).append((row, rows, runs))
    left, right = plan.attention.reach
    for tile in program.tiles(rank):
        step, q_row, q_rows, k_row, k_rows = (int(tile[n]) for n in ("step", "q_row", "q_rows", "k_row", "k_rows"))
        (runs,) = (runs for row, rows, runs in held[step, int(tile["slot"])] if row <= k_row < row + rows)
        low, high = -np.inf, np.inf  # query row y of the tile sees its key rows y + low .. y + high
        if tile["mask"] == CAUSAL:
            high = k_rows - q_rows + 0.5
        elif tile["mask"] == BAND:
            apart = int(tile["q_pos"] - tile["k_pos"])
            low, high = apart - left - 0.5, apart + right + 0.5
        for first, last, query, _ in queries.between(q_row, q_row + q_rows):
            for k_first, k_last, key, of in runs.between(k_row, k_row + k_rows):
                box = (k_first - k_row, first - q_row, k_last - k_row, last - q_row)
                corners = clipped(box, low, high)
                if size(corners) > 0.5:  # below one pair: the corner of a stair of the neighbouring run
                    yield int(tile["doc"]), Area(step, of, corners + np.array([key - box[0], query - box[1]]))


def owners(plan: Plan, rank: int) -> list[list[int]]:
    """For each turn the ranks whose keys and values the rank has before it, as in `Area.owner`."""
    found: dict[tuple[int, int], set[int]] = {turn: set() for turn in plan.turns()}
    for number, piece in enumerate(plan.pieces):
        owner = owner_of_keys(piece, rank)
        for content in piece.forward.contents_of(rank):
            spans = piece.forward.spans_in(content)
            found[number, int(content["step"])].update(owner(spans["start"]).tolist())
    return [sorted(ranks) for ranks in found.values()]


def visible(plan: Plan) -> Iterator[np.ndarray]:
    """What the mask lets queries see: the corners (key token, query token) of an outline for each document."""
    left, right = plan.attention.reach
    queries, keys = plan.documents, plan.kv_documents
    for doc in np.flatnonzero((queries.lengths > 0) & (keys.lengths > 0)).tolist():
        box = (0, 0, int(keys.lengths[doc]), int(queries.lengths[doc]))
        corners = clipped(box, -left - 0.5, right + 0.5)
        if len(corners):
            yield corners + np.array([keys.offsets[doc], queries.offsets[doc]])


def clipped(box: tuple[int, int, int, int], low: float, high: float) -> np.ndarray:
    """Corners of the part of the box (x first, y first, x last, y last) where y + low <= x <= y + high.

    Rows and columns are whole numbers, and row i sees columns up to i + b: the line x = y + b + 0.5 goes through the
    middle of those stairs, so that areas are counts.
    """
    x0, y0, x1, y1 = box
    corners = [(float(x0), float(y0)), (float(x1), float(y0)), (float(x1), float(y1)), (float(x0), float(y1))]
    for bound, sign in ((high, 1), (low, -1)):
        if np.isinf(bound):
            continue
        kept: list[tuple[float, float]] = []
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
            a, b = sign * (ay + bound - ax), sign * (by + bound - bx)  # not negative: inside
            if a >= 0:
                kept.append((ax, ay))
            if (a > 0 > b) or (a < 0 < b):
                share = a / (a - b)
                kept.append((ax + share * (bx - ax), ay + share * (by - ay)))
        corners = kept
    return np.array(corners) if len(corners) > 2 else np.empty((0, 2))


def size(corners: np.ndarray) -> float:
    """Area inside an outline (shoelace formula)."""
    x, y = corners.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def owner_of_keys(plan: Plan, rank: int) -> Callable[[np.ndarray], np.ndarray]:
    """For tokens of a plan without parts, the rank in `plan.kv_layout` from which their keys come to this rank; where
    copies of kv heads are on several ranks, the one among those that exchange messages with this rank."""
    items, together = plan.forward.fetch.items, {rank}
    while True:
        near = np.isin(items["src"], list(together)) | np.isin(items["dst"], list(together))
        more = together.union(items["src"][near].tolist(), items["dst"][near].tolist())
        if more == together:
            break
        together = more
    spans = plan.kv_layout.spans
    spans = spans[np.isin(spans["rank"], list(together))]
    spans = spans[np.argsort(spans["start"], kind="stable")]
    starts, ranks = spans["start"], spans["rank"]
    return lambda tokens: ranks[np.searchsorted(starts, tokens, "right") - 1]
