"""Modelled seconds of every rank's attention kernels in each plan step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.cluster.compute import ComputeCost
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.tiles import count_pairs
from mindspeed_cp.plan.transfers import edge_steps, steps_of_parts

#: Key spans in the forward up to which the tiles of all ranks are counted. Larger plans, with many documents cut over
#: very many ranks, have billions of tiles; there evenly spaced ranks represent all.
SIMULATED_SPANS = 2**20

#: The same limit where a choice must be fast.
COARSE_SPANS = 2**16

#: Least number of ranks that are counted if some ranks represent others.
MIN_COUNTED_RANKS = 4


@dataclass(frozen=True, eq=False)
class TileWork:
    """Kernel work of one direction, by rank and plan step, fp64 [ranks, plan steps].

    Attributes:
        pairs: visible (query, key) pairs times the rank's share of the heads.
        pairs_per_short_row: the same, with each tile's pairs divided by the rows of its shorter side.
        calls: kernel calls, one for all tiles of a step with the same key slot and mask.
    """

    pairs: np.ndarray
    pairs_per_short_row: np.ndarray
    calls: np.ndarray

    def seconds(self, cost: ComputeCost, backward: bool) -> np.ndarray:
        """Return the modelled seconds of the kernels, fp64 [ranks, plan steps]."""
        work = self.pairs + cost.cluster.tile_rows * self.pairs_per_short_row
        seconds: np.ndarray = cost.attention_seconds(work, np.inf, self.calls, backward)
        return seconds


class TileCounter:
    """Counts the tiles of a plan's ranks; tiles of keys that both directions use are computed once.

    Args:
        plan: any plan.
        representative: for each rank the rank whose tiles are counted for it, int64 [ranks]; default: itself.
    """

    def __init__(self, plan: Plan, representative: np.ndarray | None = None) -> None:
        self._plan, self._representative = plan, np.arange(plan.ranks) if representative is None else representative
        self._counted = np.unique(self._representative).tolist()
        self._key_numbers: list[dict[bytes, int]] = [{} for _ in plan.parts_or_self]  # number of a content's keys
        self._cache: list[dict[tuple[int, int], tuple[float, float, int]]] = [{} for _ in plan.parts_or_self]

    def work(self, direction: str) -> TileWork:
        """Return the work of a direction."""
        plan = self._plan
        out = np.zeros((3, plan.ranks, len(plan.step_order(direction))))
        for number, (part, plan_steps) in enumerate(
            zip(plan.parts_or_self, steps_of_parts(plan, direction), strict=True)
        ):
            program: Program = getattr(part, direction)
            head_share = part.q_layout_compute.head_counts(plan.attention.heads) / plan.attention.heads
            contents_of_ranks = [program.contents_of(rank) for rank in self._counted]
            keys = _number_keys(program, np.concatenate(contents_of_ranks), self._key_numbers[number])
            ends = np.cumsum([len(contents) for contents in contents_of_ranks])
            for rank, contents, end in zip(self._counted, contents_of_ranks, ends.tolist(), strict=True):
                if len(contents):
                    sums = self._of_contents(number, program, rank, contents, keys[end - len(contents) : end])
                    _add_rank(
                        out[:, rank], sums, plan_steps[contents["step"]] - edge_steps(plan), contents, head_share[rank]
                    )
        return TileWork(*out[:, self._representative])

    def _of_contents(
        self, number: int, program: Program, rank: int, contents: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Return (pairs, pairs over the shorter side, bit set of masks) of each content, fp64 [contents, 3]."""
        cache, key_numbers = self._cache[number], keys.tolist()
        new = [i for i, key in enumerate(key_numbers) if (rank, key) not in cache]
        if new:
            tiles, content = program.tiles_of(rank, contents[new])
            pairs = count_pairs(tiles, program.attention).astype(np.float64)
            short_side = np.maximum(np.minimum(tiles["q_rows"], tiles["k_rows"]), 1)
            sums = [np.bincount(content, values, len(new)).tolist() for values in (pairs, pairs / short_side)]
            masks = np.zeros(len(new), np.int64)
            np.bitwise_or.at(masks, content, 1 << tiles["mask"])
            for i, *values in zip(new, *sums, masks.tolist(), strict=True):
                cache[rank, key_numbers[i]] = tuple(values)
        return np.array([cache[rank, key] for key in key_numbers], np.float64)


def _add_rank(out: np.ndarray, sums: np.ndarray, step: np.ndarray, contents: np.ndarray, head_share: float) -> None:
    """Add the work of a rank's contents to `out` [3, plan steps]; `step` is the plan step of each content."""
    steps = out.shape[1]
    for row in range(2):
        out[row] += np.bincount(step, sums[:, row] * head_share, steps)
    slots = int(contents["slot"].max()) + 1
    step_slot, group = np.unique(step * slots + contents["slot"], return_inverse=True)
    masks = np.zeros(len(step_slot), np.int64)
    np.bitwise_or.at(masks, group, sums[:, 2].astype(np.int64))
    out[2] += np.bincount(step_slot // slots, _bits(masks), steps)


def _bits(masks: np.ndarray) -> np.ndarray:
    """Return the number of bits that are set in each of masks, int64 [n] (np.bitwise_count is of NumPy 2)."""
    bits: np.ndarray = np.unpackbits(masks.view(np.uint8).reshape(-1, 8), axis=1).sum(1)
    return bits


def _number_keys(program: Program, contents: np.ndarray, numbers: dict[bytes, int]) -> np.ndarray:
    """Return a number for the keys of each content, int64 [contents]: equal for the same tokens, however cut."""
    many = len(program.spans) + 1
    runs, run_of_content = np.unique(contents["first"] * many + contents["count"], return_inverse=True)
    first, count = np.divmod(runs, many)
    spans, owner = program.spans[ragged_arange(first, count)], np.repeat(np.arange(len(runs)), count)
    joined = (spans["start"][1:] == spans["stop"][:-1]) & (spans["doc"][1:] == spans["doc"][:-1])
    joined &= owner[1:] == owner[:-1]
    first = np.flatnonzero(np.append(True, ~joined)[: len(spans)])
    last = np.append(first[1:], len(spans))[: len(first)] - 1
    tokens = np.stack([spans["start"][first], spans["stop"][last]], 1)
    bounds = np.searchsorted(owner[first], np.arange(len(runs) + 1)).tolist()
    keys = [tokens[begin:end].tobytes() for begin, end in pairwise(bounds)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)[run_of_content]


def representative_ranks(plan: Plan, max_exact_spans: int = SIMULATED_SPANS) -> np.ndarray:
    """Return for each rank the rank whose tiles are counted for it, int64 [ranks].

    This is the rank itself, or, in plans with more than `max_exact_spans` key spans in the forward, the nearest of some
    evenly spaced ranks.
    """
    spans = sum(int(part.forward.contents["count"].sum()) for part in plan.parts_or_self)
    if spans <= max_exact_spans:
        return np.arange(plan.ranks)
    count = min(plan.ranks, max(MIN_COUNTED_RANKS, plan.ranks * max_exact_spans // spans))
    counted = np.unique(np.linspace(0, plan.ranks - 1, count).round().astype(np.int64))
    borders = (counted[1:] + counted[:-1] + 1) // 2
    return counted[np.searchsorted(borders, np.arange(plan.ranks), "right")]
