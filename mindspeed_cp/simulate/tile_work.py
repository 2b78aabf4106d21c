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


#: Tiles of one content: visible pairs; the same, each tile's pairs divided by the rows of its shorter side; bit set of
#: the masks; with latents, number of keys that are read.
CONTENT_WORK = np.dtype(
    [("pairs", np.float64), ("pairs_per_short_row", np.float64), ("masks", np.int64), ("keys_read", np.float64)]
)


@dataclass(frozen=True, eq=False)
class TileWork:
    """Kernel work of one direction, by rank and plan step, fp64 [ranks, plan steps].

    Attributes:
        pairs: visible (query, key) pairs times the rank's share of the heads.
        pairs_per_short_row: the same, with each tile's pairs divided by the rows of its shorter side.
        calls: kernel calls, one for all tiles of a step with the same key slot and mask.
        expansions: rows that are expanded from latents times the rank's share of the heads, once for each product of
            the expansion: one in the forward, three in the backward, which expands again and has two gradients. The
            products of the rank's own rows that the linear layers count as a projection are left out.
    """

    pairs: np.ndarray
    pairs_per_short_row: np.ndarray
    calls: np.ndarray
    expansions: np.ndarray

    def seconds(self, cost: ComputeCost, backward: bool) -> np.ndarray:
        """Return the modelled seconds of the kernels, fp64 [ranks, plan steps]."""
        work = self.pairs + cost.cluster.tile_rows * self.pairs_per_short_row
        seconds: np.ndarray = cost.attention_seconds(work, np.inf, self.calls, backward)
        return seconds + cost.expansion_seconds(self.expansions)


class TileCounter:
    """Counts the tiles of a plan's ranks; tiles of keys that both directions use are computed once.

    Args:
        plan: any plan.
        representative: for each rank the rank whose tiles are counted for it, int64 [ranks]; default: itself.
    """

    def __init__(self, plan: Plan, representative: np.ndarray | None = None) -> None:
        self._plan, self._representative = plan, np.arange(plan.ranks) if representative is None else representative
        self._counted = np.unique(self._representative)
        self._key_numbers: list[dict[bytes, int]] = [{} for _ in plan.parts_or_self]  # number of a content's keys
        self._cache: list[dict[tuple[int, int], tuple[float, ...]]] = [{} for _ in plan.parts_or_self]

    def work(self, direction: str) -> TileWork:
        """Return the work of a direction."""
        plan = self._plan
        shape = plan.ranks, len(plan.step_order(direction))
        pairs, pairs_per_short_row, calls, keys_read, own_keys_read = np.zeros((5, *shape))
        steps_by_part = steps_of_parts(plan, direction)
        for number, (part, plan_steps) in enumerate(zip(plan.parts_or_self, steps_by_part, strict=True)):
            program: Program = getattr(part, direction)
            contents = program.contents
            if len(self._counted) < plan.ranks:
                contents = contents[np.isin(contents["rank"], self._counted)]
            if not len(contents):
                continue
            work = self._work_of_contents(number, program, contents)
            rank, step = contents["rank"], plan_steps[contents["step"]] - edge_steps(plan)
            head_share = (part.q_layout_compute.head_counts(plan.attention.heads) / plan.attention.heads)[rank]
            cell = rank * shape[1] + step
            own = contents["slot"] == 0
            for total, values in (
                (pairs, work["pairs"]),
                (pairs_per_short_row, work["pairs_per_short_row"]),
                (keys_read, work["keys_read"]),
                (own_keys_read, work["keys_read"] * own),
            ):
                if values.any():
                    total += np.bincount(cell, values * head_share, total.size).reshape(shape)
            # A call takes all tiles of a step with the same slot and mask.
            slots = int(contents["slot"].max()) + 1
            cell_slot, group = np.unique(cell * slots + contents["slot"], return_inverse=True)
            masks = np.zeros(len(cell_slot), np.int64)
            np.bitwise_or.at(masks, group, work["masks"])
            bits = np.unpackbits(masks.view(np.uint8).reshape(-1, 8), axis=1).sum(1)  # np.bitwise_count is of NumPy 2
            calls += np.bincount(cell_slot // slots, bits, calls.size).reshape(shape)
        pairs, pairs_per_short_row, calls, keys_read, own_keys_read = (
            x[self._representative] for x in (pairs, pairs_per_short_row, calls, keys_read, own_keys_read)
        )
        # The linear layers count products of the rank's own rows as a projection.
        own_rows = plan.kv_layout_in.token_counts[:, None] / np.maximum(own_keys_read.sum(1, keepdims=True), 1.0)
        counted = own_keys_read * np.minimum(own_rows, 1.0)
        expansions = keys_read - counted if direction == "forward" else 3 * keys_read - 2 * counted
        return TileWork(pairs, pairs_per_short_row, calls, expansions)

    def _work_of_contents(self, number: int, program: Program, contents: np.ndarray) -> np.ndarray:
        """Return what `count_contents` does for the contents of a part, records of dtype CONTENT_WORK [contents]."""
        cache = self._cache[number]
        key_numbers = _number_keys(program, contents, self._key_numbers[number])
        keys = list(zip(contents["rank"].tolist(), key_numbers.tolist(), strict=True))
        new = {key: i for i, key in enumerate(keys) if key not in cache}
        if new:
            work = count_contents(program, contents[sorted(new.values())])
            cache.update(zip(sorted(new, key=new.__getitem__), work.tolist(), strict=True))
        return np.array([cache[key] for key in keys], CONTENT_WORK)


def count_contents(program: Program, contents: np.ndarray) -> np.ndarray:
    """Count the tiles of contents of any ranks; return records of dtype CONTENT_WORK [contents]."""
    out = np.zeros(len(contents), CONTENT_WORK)
    for tiles, content in program.tile_passes(contents):
        pairs = count_pairs(tiles, program.attention).astype(np.float64)
        short_side = np.minimum(tiles["q_rows"], tiles["k_rows"])
        out["pairs"] += np.bincount(content, pairs, len(contents))
        out["pairs_per_short_row"] += np.bincount(content, pairs / short_side, len(contents))
        np.bitwise_or.at(out["masks"], content, 1 << tiles["mask"])
        if program.attention.latent is not None:
            out["keys_read"] += _keys_read(tiles, content, len(contents))
    return out


def _keys_read(tiles: np.ndarray, content: np.ndarray, contents: int) -> np.ndarray:
    """Count the rows that any tile of a content reads, fp64 [contents]."""
    first = tiles["k_row"] + content * int((tiles["k_row"] + tiles["k_rows"]).max(initial=0))  # apart by content
    order = np.argsort(first, kind="stable")
    last = np.maximum.accumulate((first + tiles["k_rows"])[order])
    before = np.append(0, last)[:-1]  # rows below are counted
    return np.bincount(content[order], last - np.clip(first[order], before, last), contents).astype(np.float64)


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
