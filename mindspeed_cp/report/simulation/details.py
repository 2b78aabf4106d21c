"""Details of a simulated layer: the tiles of each step, and the ranks that share each document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import Plan, Program
from mindspeed_cp.plan.records import int64_record
from mindspeed_cp.plan.tiles import count_pairs
from mindspeed_cp.plan.transfers import step_count, steps_of_parts
from mindspeed_cp.report.slot_rows import SlotRows

#: A tile that rank `rank` computes in step `step` of the timeline: `q_rows` queries of document `doc` at positions
#: q_first .. q_last against `k_rows` keys at positions k_first .. k_last, with `pairs` visible pairs, for `heads` query
#: heads. A tile may join several runs of tokens, so it may have fewer rows than positions.
COMPUTED_TILE = int64_record("rank step doc q_first q_last q_rows k_first k_last k_rows pairs heads part last_doc")


class ComputedTiles:
    """All tiles of some ranks in one direction of a plan.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        ranks: ranks whose tiles are computed.

    Attributes:
        tiles: records of dtype COMPUTED_TILE, by rank and step, the tiles with most work first.
    """

    def __init__(self, plan: Plan, direction: str, ranks: Sequence[int]) -> None:
        self._steps = step_count(plan, direction)
        tables = [np.empty(0, COMPUTED_TILE)]
        pairs = zip(plan.parts_or_self, steps_of_parts(plan, direction), strict=True)
        for part, (part_plan, steps) in enumerate(pairs):
            program: Program = getattr(part_plan, direction)
            heads = part_plan.q_layout_compute.head_counts(plan.attention.heads)
            for rank in ranks:
                tiles = _tiles_of_part(part_plan, program, rank)
                tiles["step"] = steps[tiles["step"]]
                tiles["heads"], tiles["part"] = heads[rank], part
                tables.append(tiles)
        all_tiles = np.concatenate(tables)
        self._key = all_tiles["rank"] * self._steps + all_tiles["step"]
        order = np.lexsort((-all_tiles["pairs"] * all_tiles["heads"].astype(float), self._key))
        self.tiles, self._key = all_tiles[order], self._key[order]

    def of(self, rank: int, step: int) -> np.ndarray:
        """Return the tiles of a rank in a step, the largest first."""
        low, high = np.searchsorted(self._key, rank * self._steps + np.array([step, step + 1]))
        return self.tiles[low:high]


def _tiles_of_part(plan: Plan, program: Program, rank: int) -> np.ndarray:
    """Return the tiles of one rank in one part, records of dtype COMPUTED_TILE; `step` is the step of the part."""
    tiles, slot_rows, layout = program.tiles(rank), SlotRows(program, [rank]), plan.q_layout_compute
    out = np.zeros(len(tiles), COMPUTED_TILE)
    out["rank"] = rank
    for name in ("step", "doc", "q_rows", "k_rows"):
        out[name] = tiles[name]
    out["pairs"] = count_pairs(tiles, plan.attention)
    if not len(tiles):
        return out
    q_first_rows = layout.span_first_rows[layout.span_offsets[rank] : layout.span_offsets[rank + 1]]
    for side, rows, documents, spans, first in (
        ("q", tiles["q_row"], plan.documents, layout.rank_spans(rank), q_first_rows),
        ("k", slot_rows.addresses(rank, tiles), plan.kv_documents, slot_rows.spans, slot_rows.first),
    ):
        for end, row in (("first", rows), ("last", rows + tiles[f"{side}_rows"] - 1)):
            tokens = _tokens_at(row, spans, first)
            doc = documents.document_of(tokens)
            out[f"{side}_{end}"] = tokens - documents.offsets[doc] + documents.first_positions[doc]
            if (side, end) == ("q", "last"):
                out["last_doc"] = doc
    return out


def _tokens_at(rows: np.ndarray, spans: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the token in each of some rows, given the spans of these rows and the first row of each span."""
    index = np.searchsorted(first, rows, "right") - 1
    return spans["start"][index] + rows - first[index]


@dataclass(frozen=True)
class DocumentShare:
    """The ranks that share one document.

    Attributes:
        doc: index of the document in the batch.
        queries: (ranks, rows) of each run of positions, in order: these ranks compute the queries of the run. Several
            ranks compute different heads.
        keys: the same for the ranks that hold keys and values when computing begins; a kv head may be on several ranks.
    """

    doc: int
    queries: tuple[tuple[tuple[int, ...], int], ...]
    keys: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def ranks(self) -> list[int]:
        """All ranks that compute a part of the document."""
        return sorted({rank for ranks, _ in self.queries for rank in ranks})


def document_shares(plan: Plan, most: int) -> list[DocumentShare]:
    """Return the shares of the longest documents of a plan, at most `most`, the longest first."""
    lengths = plan.documents.lengths
    chosen = [int(doc) for doc in np.argsort(-lengths, kind="stable")[:most] if lengths[doc] > 0]
    shares: dict[int, DocumentShare] = {}
    for part_plan in plan.parts_or_self:
        docs_of_part = [doc for doc in chosen if part_plan.documents.lengths[doc] > 0]
        queries = _runs(part_plan.q_layout_compute, part_plan.attention.heads, docs_of_part)
        same = part_plan.kv_layout_compute is part_plan.q_layout_compute
        keys = queries if same else _runs(part_plan.kv_layout_compute, part_plan.attention.kv_heads, docs_of_part)
        for doc in docs_of_part:
            shares[doc] = DocumentShare(doc, queries[doc], keys.get(doc, ()))
    return [shares[doc] for doc in chosen if doc in shares]


#: How many ranks compute a document.
ON_ONE_RANK, IN_ONE_NODE, ACROSS_NODES = "whole on one rank", "shared in a node", "shared by nodes"


def count_documents_by_spread(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return (documents, tokens) that are computed by one rank, by ranks of one node, and by ranks of several nodes."""
    ranks, nodes = np.zeros((2, len(plan.documents)), np.int64)
    for part_plan in plan.parts_or_self:
        layout, ranks_per_node = part_plan.q_layout_compute, plan.topology.ranks_per_node
        busy = layout.head_counts(part_plan.attention.heads) > 0
        spans = layout.spans[busy[layout.spans["rank"]]]
        for count, group in ((ranks, spans["rank"]), (nodes, spans["rank"] // ranks_per_node)):
            count += np.bincount(np.unique(spans["doc"] * layout.ranks + group) // layout.ranks, minlength=len(count))
    lengths = plan.documents.lengths
    masks = {ON_ONE_RANK: ranks == 1, IN_ONE_NODE: (ranks > 1) & (nodes == 1), ACROSS_NODES: nodes > 1}
    return {name: (int(mask.sum()), int(lengths[mask].sum())) for name, mask in masks.items()}


def _runs(layout: Layout, heads: int, documents: list[int]) -> dict[int, tuple[tuple[tuple[int, ...], int], ...]]:
    """Return (ranks, rows) of each run of some documents."""
    spans = layout.spans[np.isin(layout.spans["doc"], documents)]
    spans = spans[(layout.head_counts(heads) > 0)[spans["rank"]]]
    spans = spans[np.lexsort((spans["rank"], spans["start"], spans["doc"]))]
    edges = np.searchsorted(spans["doc"], [*documents, *(doc + 1 for doc in documents)])
    runs = {}
    for index, doc in enumerate(documents):
        spans_of_doc = spans[edges[index] : edges[index + len(documents)]]
        runs[doc] = _runs_of_equal_ranks(
            spans_of_doc["start"].tolist(), spans_of_doc["stop"].tolist(), spans_of_doc["rank"].tolist()
        )
    return runs


def _runs_of_equal_ranks(start: list[int], stop: list[int], rank: list[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return spans, sorted by start, as consecutive runs; neighbouring runs of the same ranks are merged."""
    borders = sorted({*start, *stop})
    runs: list[tuple[tuple[int, ...], int]] = []
    open_spans: list[tuple[int, int]] = []  # (stop, rank) of the spans that are open
    following = 0
    for low, high in pairwise(borders):
        open_spans = [span for span in open_spans if span[0] > low]
        while following < len(start) and start[following] <= low:
            open_spans.append((stop[following], rank[following]))
            following += 1
        ranks = tuple(sorted({holder for _, holder in open_spans}))
        if runs and runs[-1][0] == ranks:
            runs[-1] = (ranks, runs[-1][1] + high - low)
        else:
            runs.append((ranks, high - low))
    return tuple(runs)
