"""Content of the tile map of a plan: polygons of tiles in the attention matrix, and captions.

A tile is rows of a rank's queries against rows of a slot. In the attention matrix of the whole batch, queries
downwards and keys to the right, these rows may be several runs of tokens: a tile becomes one polygon for each run of
queries and run of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mindspeed_cp.layout import intersect_runs
from mindspeed_cp.plan import BAND, CAUSAL, Plan
from mindspeed_cp.report.plan.summary import PlanSummary
from mindspeed_cp.report.polygons import clip_to_band, polygon_area
from mindspeed_cp.report.slot_rows import SlotRows
from mindspeed_cp.report.text import format_count


class TilePolygon(NamedTuple):
    """What a rank computes in one step between one run of queries and one run of keys.

    Attributes:
        step: number of the forward step, in the order of `plan.step_order()`.
        owner: rank that holds the keys and values in `plan.kv_layout_compute`.
        corners: (key token, query token) of each corner along the outline, [corners, 2].
    """

    step: int
    owner: int
    corners: np.ndarray


def tile_polygons(plan: Plan, rank: int) -> Iterator[TilePolygon]:
    """Yield all that a rank computes in the forward, for its heads in each part."""
    step_numbers = {part_step: number for number, part_step in enumerate(plan.step_order())}
    for part, part_plan in enumerate(plan.parts_or_self):
        offsets = np.stack([part_plan.kv_documents.offsets, part_plan.documents.offsets], 1)[:-1]
        shift = np.stack([plan.kv_documents.offsets, plan.documents.offsets], 1)[:-1] - offsets
        for k_doc, q_doc, polygon in _polygons_of_part(part_plan, rank):
            moved = polygon.corners + np.array([shift[k_doc, 0], shift[q_doc, 1]])
            yield TilePolygon(step_numbers[part, polygon.step], polygon.owner, moved)


def _polygons_of_part(plan: Plan, rank: int) -> Iterator[tuple[int, int, TilePolygon]]:
    """Yield (document of the keys, of the queries, polygon) of a plan without parts."""
    program, layout = plan.forward, plan.q_layout_compute
    tiles, slot_rows, queries = program.tiles(rank), SlotRows(program, [rank]), layout.rank_spans(rank)
    owners = kv_source_lookup(plan, rank)(slot_rows.spans["start"]).tolist()
    q_rows = layout.span_first_rows[layout.span_offsets[rank] : layout.span_offsets[rank + 1]]
    q_last = q_rows + queries["stop"] - queries["start"]
    q_runs = _runs_of_tiles(tiles["q_row"], tiles["q_rows"], queries, q_rows, q_last)
    k_rows = slot_rows.addresses(rank, tiles)
    k_runs = _runs_of_tiles(k_rows, tiles["k_rows"], slot_rows.spans, slot_rows.first, slot_rows.last)
    left, right = plan.attention.reach
    for tile, tile_queries, tile_keys in zip(tiles, q_runs, k_runs, strict=True):
        low, high = -np.inf, np.inf  # query row y of the tile sees its key rows y + low .. y + high
        if tile["mask"] == CAUSAL:
            high = int(tile["k_rows"]) - int(tile["q_rows"]) + 0.5
        elif tile["mask"] == BAND:
            offset = int(tile["q_pos"] - tile["k_pos"])
            low, high = offset - left - 0.5, offset + right + 0.5
        for q_span, q_first, q_last, query in tile_queries:
            for span, k_first, k_last, key in tile_keys:
                corners = clip_to_band((k_first, q_first, k_last, q_last), low, high)
                if polygon_area(corners) > 0.5:  # below one pair: the corner of a stair of the neighbouring run
                    corners += np.array([key - k_first, query - q_first])
                    q_doc = int(queries["doc"][q_span])
                    yield int(tile["k_doc"]), q_doc, TilePolygon(int(tile["step"]), owners[span], corners)


def _runs_of_tiles(
    begin: np.ndarray, rows: np.ndarray, spans: np.ndarray, first: np.ndarray, last: np.ndarray
) -> list[list[list[int]]]:
    """Return for each tile its runs of tokens: [index of the span, first row in the tile, last row plus one, token].

    Args:
        begin, rows: first row of each tile, and number of its rows.
        spans: records of dtype TOKEN_SPAN.
        first, last: rows of the spans, ascending.
    """
    tile, span, low, high = intersect_runs(begin, begin + rows, first, last)
    tokens = spans["start"][span] + low - first[span]
    runs = np.stack([span, low - begin[tile], high - begin[tile], tokens], 1).tolist()
    edges = np.searchsorted(tile, np.arange(len(begin) + 1)).tolist()
    return [runs[i:j] for i, j in pairwise(edges)]


def kv_sources(plan: Plan, rank: int) -> list[list[int]]:
    """Return for each step the ranks that hold the keys and values on which the rank computes, as in
    `TilePolygon.owner`."""
    sources: dict[tuple[int, int], set[int]] = {part_step: set() for part_step in plan.step_order()}
    for number, part_plan in enumerate(plan.parts_or_self):
        owner = kv_source_lookup(part_plan, rank)
        for content in part_plan.forward.contents_of(rank):
            spans = part_plan.forward.spans_in(content)
            sources[number, int(content["step"])].update(owner(spans["start"]).tolist())
    return [sorted(ranks) for ranks in sources.values()]


def mask_outlines(plan: Plan) -> Iterator[np.ndarray]:
    """Yield for each document, and in a tree for each document with each of its ancestors, the corners (key token,
    query token) of the outline of the visible pairs."""
    left, right = plan.attention.reach
    queries, keys = plan.documents, plan.kv_documents
    index, seen = queries.seen_documents(np.arange(len(queries)))
    for doc, k_doc in zip(index.tolist(), seen.tolist(), strict=True):
        if not queries.lengths[doc] or not keys.lengths[k_doc]:
            continue
        box = (0, 0, int(keys.lengths[k_doc]), int(queries.lengths[doc]))
        ahead = int(queries.first_positions[doc] - keys.first_positions[k_doc])
        corners = clip_to_band(box, ahead - left - 0.5, ahead + right + 0.5)
        if len(corners):
            yield corners + np.array([keys.offsets[k_doc], queries.offsets[doc]])
    if queries.blocks is not None:
        for start, stop in zip(queries.blocks.start.tolist(), queries.blocks.stop.tolist(), strict=True):
            yield np.array([(start, start), (stop, start), (stop, stop), (start, stop)], np.float64)


def kv_source_lookup(plan: Plan, rank: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from tokens to the ranks from which their keys come to this rank, for a plan without parts.

    The ranks are those of `plan.kv_layout_compute`. Of several copies of a kv head, the source is the rank that
    exchanges messages with this rank.
    """
    items, connected = plan.forward.fetch.items, {rank}
    while True:
        is_connected = np.isin(items["src"], list(connected)) | np.isin(items["dst"], list(connected))
        extended = connected.union(items["src"][is_connected].tolist(), items["dst"][is_connected].tolist())
        if extended == connected:
            break
        connected = extended
    spans = plan.kv_layout_compute.spans
    spans = spans[np.isin(spans["rank"], list(connected))]
    spans = spans[np.argsort(spans["start"], kind="stable")]
    starts, ranks = spans["start"], spans["rank"]
    return lambda tokens: ranks[np.searchsorted(starts, tokens, "right") - 1]


def describe_documents(lengths: np.ndarray, kv_lengths: np.ndarray) -> str:
    """Return "3 documents (700, 30, 4,100 tokens)"; in cross-attention with the numbers of queries and keys."""
    is_crossed = kv_lengths is not lengths
    if 0 < len(lengths) <= 6:
        queries, keys = (", ".join(map(format_count, values)) for values in (lengths, kv_lengths))
        amount = f"{queries} queries; {keys} keys" if is_crossed else f"{queries} tokens"
        return f"1 document of {amount}" if len(lengths) == 1 else f"{len(lengths)} documents ({amount})"
    amount = f"{format_count(lengths.sum())} {'queries' if is_crossed else 'tokens'}"
    return f"{len(lengths):,} documents, {amount}" + (
        f" and {format_count(kv_lengths.sum())} keys" if is_crossed else ""
    )


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 2-3" or "ranks 0, 2, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 or ranks[1] == ranks[0] + 1:
        if ranks[-1] - ranks[0] == len(ranks) - 1:
            return f"ranks {ranks[0]}-{ranks[-1]}"
        if len(ranks) > 3:
            return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks))}"


def describe_holding(plan: Plan, summary: PlanSummary, rank: int) -> str:
    """Return what a rank holds: "2,125 tokens, 3 whole documents"; in cross-attention queries and keys."""
    tokens = format_count(summary.tokens[rank])
    if summary.kv_lengths is not summary.lengths:
        return f"{tokens} queries, {format_count(plan.kv_layout_in.token_counts[rank])} keys"
    spans = plan.layout.rank_spans(rank)
    whole = int((spans["stop"] - spans["start"] == plan.documents.lengths[spans["doc"]]).sum())
    if not whole or plan.ranks == 1:
        return f"{tokens} token{'s' * (tokens != '1')}"
    return f"{tokens} tokens, {whole:,} whole document{'s' * (whole > 1)}"


def describe_kv_source(plan: Plan, rank: int, kv_sources: Sequence[int]) -> str:
    """Return the ranks whose keys and values a rank computes on, such as "K/V of ranks 0, 2".

    `kv_sources` has at least one rank. After a redistribution the text names the ranks that sent to them.
    """
    if plan.kv_redistribution is None:
        return "own K/V" if list(kv_sources) == [rank] else f"K/V of {describe_ranks(kv_sources)}"
    parts = plan.kv_redistribution.rank_pairs
    sources = sorted(set(parts["src"][np.isin(parts["dst"], kv_sources)].tolist()))
    return f"K/V of {'all ranks' if len(sources) == plan.ranks else describe_ranks(sources)}"


def describe_arrivals(plan: Plan, rank: int, step: int) -> str:
    """Return what arrives during a step, in a plan without parts: "← 1,207 rows from rank 3"; empty for nothing."""
    items = plan.forward.fetch.items
    arriving = items[(items["dst"] == rank) & (items["done"] == step)]
    if not len(arriving):
        return ""
    return f"← {format_count(arriving['rows'].sum())} rows from {describe_ranks(sorted(set(arriving['src'].tolist())))}"


def redistribution_groups(plan: Plan) -> list[list[int]]:
    """Return groups of ranks that exchange rows before and after the steps, in any part; without ranks that exchange
    nothing."""
    group = np.arange(plan.ranks)
    for part_plan in plan.parts_or_self:
        for move in filter(None, (part_plan.q_redistribution, part_plan.kv_redistribution)):
            for src, dst in zip(move.rank_pairs["src"], move.rank_pairs["dst"], strict=True):
                group[group == max(group[src], group[dst])] = min(group[src], group[dst])
    groups = [np.flatnonzero(group == number).tolist() for number in np.unique(group)]
    return [ranks for ranks in groups if len(ranks) > 1]
