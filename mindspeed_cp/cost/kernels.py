"""Modelled seconds of every rank's attention kernels, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.cost.compute import ComputeCost
from mindspeed_cp.cost.transfers import edges, heads_of, places
from mindspeed_cp.layout import expand
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.tiles import pairs

#: Spans of keys, in the forward, whose tiles are found exactly. Larger plans, of many documents each cut over very
#: many ranks, have billions of tiles; there the tiles of some ranks, evenly spaced, stand for all.
MOST_SPANS = 2**20

#: A rank stands for others only where at least so many are looked at.
LEAST_RANKS = 4


@dataclass(frozen=True, eq=False)
class TileWork:
    """What the kernels of one direction have to do, of each rank and turn of the plan, fp64 [ranks, plan turns].

    Attributes:
        pairs: visible (query, key) pairs, times the rank's part of the heads.
        slow: the same, each tile's divided by the rows of its shorter side.
        calls: kernel calls: one for all tiles of a turn that have the same keys' slot and the same mask.
    """

    pairs: np.ndarray
    slow: np.ndarray
    calls: np.ndarray

    def seconds(self, cost: ComputeCost, backward: bool) -> np.ndarray:
        """Modelled time of the kernels, fp64 [ranks, plan turns]."""
        work = self.pairs + cost.cluster.tile_rows * self.slow
        found: np.ndarray = cost.attention_seconds(work, np.inf, self.calls, backward)
        return found


class TileCounter:
    """Counts the tiles of a plan's ranks; those of keys that both directions compute against are found once.

    Args:
        plan: any plan.
        stands: for each rank the one whose tiles stand for its own, int64 [ranks]; default: itself.
    """

    def __init__(self, plan: Plan, stands: np.ndarray | None = None) -> None:
        self._plan, self._stands = plan, np.arange(plan.ranks) if stands is None else stands
        self._chosen = np.unique(self._stands).tolist()
        self._keys: list[dict[bytes, int]] = [{} for _ in plan.pieces]  # keys of a content, and their number
        self._known: list[dict[tuple[int, int], tuple[float, float, int]]] = [{} for _ in plan.pieces]

    def work(self, direction: str) -> TileWork:
        """The work of a direction."""
        plan = self._plan
        found = np.zeros((3, plan.ranks, len(plan.turns(direction))))
        for number, (piece, place) in enumerate(zip(plan.pieces, places(plan, direction), strict=True)):
            program: Program = getattr(piece, direction)
            share = heads_of(piece.q_layout, plan.attention.heads) / plan.attention.heads
            of_ranks = [program.contents_of(rank) for rank in self._chosen]
            keys = _number_keys(program, np.concatenate(of_ranks), self._keys[number])
            ends = np.cumsum([len(contents) for contents in of_ranks])
            for rank, contents, end in zip(self._chosen, of_ranks, ends.tolist(), strict=True):
                if not len(contents):
                    continue
                each = self._of_contents(number, program, rank, contents, keys[end - len(contents) : end])
                at = place[contents["step"]] - edges(plan)
                for row, values in enumerate((each[:, 0] * share[rank], each[:, 1] * share[rank])):
                    found[row, rank] += np.bincount(at, values, found.shape[2])
                slots = int(contents["slot"].max()) + 1
                call, of = np.unique(at * slots + contents["slot"], return_inverse=True)
                masks = np.zeros(len(call), np.int64)
                np.bitwise_or.at(masks, of, each[:, 2].astype(np.int64))
                found[2, rank] += np.bincount(call // slots, np.bitwise_count(masks), found.shape[2])
        return TileWork(*found[:, self._stands])

    def _of_contents(
        self, number: int, program: Program, rank: int, contents: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Of each content (pairs, pairs over the shorter side, a bit for each mask), fp64 [contents, 3]."""
        known, numbers = self._known[number], keys.tolist()
        new = [i for i, key in enumerate(numbers) if (rank, key) not in known]
        if new:
            tiles, of = program.tiles_of(rank, contents[new])
            seen = pairs(tiles, program.attention).astype(np.float64)
            short = np.maximum(np.minimum(tiles["q_rows"], tiles["k_rows"]), 1)
            sums = [np.bincount(of, values, len(new)).tolist() for values in (seen, seen / short)]
            masks = np.zeros(len(new), np.int64)
            np.bitwise_or.at(masks, of, 1 << tiles["mask"])
            for i, *three in zip(new, *sums, masks.tolist(), strict=True):
                known[rank, numbers[i]] = tuple(three)
        return np.array([known[rank, key] for key in numbers], np.float64)


def _number_keys(program: Program, contents: np.ndarray, numbers: dict[bytes, int]) -> np.ndarray:
    """For each content a number of the keys in it, int64 [contents]; the same for the same tokens, however cut."""
    many = len(program.spans) + 1
    runs, of = np.unique(contents["first"] * many + contents["count"], return_inverse=True)
    first, count = np.divmod(runs, many)
    spans, owner = program.spans[expand(first, count)], np.repeat(np.arange(len(runs)), count)
    joins = (spans["start"][1:] == spans["stop"][:-1]) & (spans["doc"][1:] == spans["doc"][:-1])
    joins &= owner[1:] == owner[:-1]
    first = np.flatnonzero(np.append(True, ~joins)[: len(spans)])
    last = np.append(first[1:], len(spans))[: len(first)] - 1
    tokens = np.stack([spans["start"][first], spans["stop"][last]], 1)
    borders = np.searchsorted(owner[first], np.arange(len(runs) + 1)).tolist()
    own = [tokens[a:b].tobytes() for a, b in pairwise(borders)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in own], np.int64)[of]


def stand_ins(plan: Plan, most_spans: int = MOST_SPANS) -> np.ndarray:
    """For each rank the one whose tiles are looked at for it, int64 [ranks]: itself, but in plans of more than
    `most_spans` spans of keys in the forward the nearest of some."""
    spans = sum(int(piece.forward.contents["count"].sum()) for piece in plan.pieces)
    if spans <= most_spans:
        return np.arange(plan.ranks)
    count = min(plan.ranks, max(LEAST_RANKS, plan.ranks * most_spans // spans))
    chosen = np.unique(np.linspace(0, plan.ranks - 1, count).round().astype(np.int64))
    borders = (chosen[1:] + chosen[:-1] + 1) // 2
    return chosen[np.searchsorted(borders, np.arange(plan.ranks), "right")]
