"""Modelled seconds of every rank's attention kernels in each plan step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.cluster.compute import ComputeCost
from mindspeed_cp.layout import Documents, ragged_arange
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.tiles import count_pairs, tiles_between
from mindspeed_cp.plan.transfers import edge_steps, steps_of_parts

#: Key spans in the forward up to which the tiles of all ranks are counted. Larger plans, with many documents cut over
#: very many ranks, have billions of tiles; there evenly spaced ranks represent all.
SIMULATED_SPANS = 2**20

#: The same limit where a choice must be fast.
COARSE_SPANS = 2**16

#: Spans of queries and keys whose tiles are derived in one pass.
SPANS_PER_PASS = 2**14

#: Tokens of all documents of a pass where rows of tiles are counted one by one.
WINDOW_TOKENS_PER_PASS = 2**21

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
    """Count the tiles of contents of any ranks in a few passes.

    Args:
        program: a direction of a plan.
        contents: records of dtype CONTENT, sorted by rank.

    Returns:
        Records of dtype CONTENT_WORK [contents].
    """
    queries = program.q_layout_compute
    if not queries.documents.is_plain:
        return _count_by_rank(program, contents)
    q_count = np.diff(queries.span_offsets)[contents["rank"]]
    most = MAX_TOKENS if program.attention.window is None else WINDOW_TOKENS_PER_PASS
    tokens = np.minimum(_tokens_of_documents(program, contents), most)
    spans_before, tokens_before = (np.append(0, np.cumsum(x)) for x in (q_count + contents["count"], tokens))
    out, begin = np.zeros(len(contents), CONTENT_WORK), 0
    while begin < len(contents):
        limits = (spans_before, spans_before[begin] + SPANS_PER_PASS), (tokens_before, tokens_before[begin] + most)
        end = max(begin + 1, min(int(np.searchsorted(before, limit, "right")) - 1 for before, limit in limits))
        out[begin:end] = _count_pass(program, contents[begin:end])
        begin = end
    return out


def _tokens_of_documents(program: Program, contents: np.ndarray) -> np.ndarray:
    """Return the sum of the lengths of the documents of each content, int64 [contents]."""
    spans = program.spans[ragged_arange(contents["first"], contents["count"])]
    content = np.repeat(np.arange(len(contents)), contents["count"])
    new = np.append(True, (spans["doc"][1:] != spans["doc"][:-1]) | (content[1:] != content[:-1]))[: len(spans)]
    lengths = np.maximum(program.q_layout_compute.documents.lengths, program.kv_documents.lengths)
    return np.bincount(content[new], lengths[spans["doc"][new]], len(contents)).astype(np.int64)


def _count_pass(program: Program, contents: np.ndarray) -> np.ndarray:
    """Do as `count_contents` in one pass: as tiles of a batch that has a document for each document of each content."""
    queries, documents, keys = program.q_layout_compute, program.q_layout_compute.documents, program.kv_documents
    k_spans = program.spans[ragged_arange(contents["first"], contents["count"])]
    k_key = np.repeat(np.arange(len(contents)), contents["count"]) * len(documents) + k_spans["doc"]
    q_count = np.diff(queries.span_offsets)[contents["rank"]]
    q_spans = queries.spans[ragged_arange(queries.span_offsets[contents["rank"]], q_count)]
    q_key = np.repeat(np.arange(len(contents)), q_count) * len(documents) + q_spans["doc"]
    pairs = k_key[np.append(True, k_key[1:] != k_key[:-1])[: len(k_key)]]  # (content, document), ascending
    q_pair, k_pair = (np.minimum(np.searchsorted(pairs, key), max(len(pairs) - 1, 0)) for key in (q_key, k_key))
    seen = pairs[q_pair] == q_key if len(pairs) else np.zeros(len(q_key), bool)
    content, doc = np.divmod(pairs, max(len(documents), 1))
    copied, copied_keys = Documents(documents.lengths[doc]), Documents(keys.lengths[doc])
    tiles = tiles_between(
        _renumbered(q_spans[seen], q_pair[seen], documents, copied),
        _renumbered(k_spans, k_pair, keys, copied_keys),
        copied,
        program.attention,
        copied_keys,
    )
    return _sums(tiles, content[tiles["doc"]], len(contents), program)


def _count_by_rank(program: Program, contents: np.ndarray) -> np.ndarray:
    """Do as `count_contents` for trees and blocks, rank by rank."""
    out = np.zeros(len(contents), CONTENT_WORK)
    first, last = (np.searchsorted(contents["rank"], np.arange(program.ranks), side) for side in ("left", "right"))
    for rank, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if end > begin:
            tiles, of_tile = program.tiles_of(rank, contents[begin:end])
            tiles["k_row"] += of_tile * int((tiles["k_row"] + tiles["k_rows"]).max(initial=0))  # apart by content
            out[begin:end] = _sums(tiles, of_tile, end - begin, program)
    return out


def _sums(tiles: np.ndarray, of_tile: np.ndarray, contents: int, program: Program) -> np.ndarray:
    """Return the work of each content, records of dtype CONTENT_WORK.

    Args:
        tiles: records of dtype TILE; rows of different contents have different numbers.
        of_tile: content of each tile, int64 [tiles].
        contents: number of contents.
        program: program of the tiles.
    """
    count = count_pairs(tiles, program.attention).astype(np.float64)
    short_side = np.maximum(np.minimum(tiles["q_rows"], tiles["k_rows"]), 1)
    out = np.zeros(contents, CONTENT_WORK)
    out["pairs"] = np.bincount(of_tile, count, contents)
    out["pairs_per_short_row"] = np.bincount(of_tile, count / short_side, contents)
    np.bitwise_or.at(out["masks"], of_tile, 1 << tiles["mask"])
    if program.attention.latent is not None:
        out["keys_read"] = _keys_read(tiles, of_tile, contents)
    return out


def _keys_read(tiles: np.ndarray, of_tile: np.ndarray, contents: int) -> np.ndarray:
    """Count the rows that any tile of a content reads; contents have different rows. Returns fp64 [contents]."""
    order = np.argsort(tiles["k_row"], kind="stable")
    last = np.maximum.accumulate((tiles["k_row"] + tiles["k_rows"])[order])
    before = np.append(0, last)[:-1]  # rows below are counted
    return np.bincount(of_tile[order], last - np.clip(tiles["k_row"][order], before, last), contents).astype(np.float64)


def _renumbered(spans: np.ndarray, new_doc: np.ndarray, documents: Documents, copied: Documents) -> np.ndarray:
    """Renumber spans of documents to spans of the documents `new_doc` of another batch, of equal lengths."""
    out = spans.copy()
    shift = copied.offsets[new_doc] - documents.offsets[spans["doc"]]
    out["doc"] = new_doc
    for name in ("start", "stop"):
        out[name] += shift
    return out


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
