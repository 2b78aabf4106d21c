"""Keys and values that every rank needs, and where they are.

All ranks are computed at once, without loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import TOKEN_SPAN, Layout, intersect_runs, union_of_runs
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.problem import AttentionConfig


@dataclass(frozen=True, eq=False)
class KvFetches:
    """Runs of tokens that ranks fetch from other ranks, as columns int64 [n].

    Columns, because they are selected and sorted several times: records made planning of `direct` 1.6 times slower.

    Attributes:
        stage: stage (or round) of the schedule in which the tokens move.
        dst, src: rank that fetches, and rank that it fetches from.
        doc: document of the tokens.
        start, stop: first and last-plus-one token.
        src_row, dst_row: row of the first token in the slot of the source, and in the slot of the target.
    """

    stage: np.ndarray
    dst: np.ndarray
    src: np.ndarray
    doc: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    src_row: np.ndarray
    dst_row: np.ndarray

    def __len__(self) -> int:
        return len(self.stage)

    def __getitem__(self, index: np.ndarray) -> KvFetches:
        """Select fetches by their indices or by a mask."""
        return KvFetches(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def rows(self) -> np.ndarray:
        """Number of tokens of each fetch, int64 [n]."""
        return self.stop - self.start

    @cached_property
    def slot_begins(self) -> np.ndarray:
        """Index of the first fetch of each (stage, dst), where these lie side by side."""
        return group_starts(self.stage, self.dst)

    @cached_property
    def slot_ends(self) -> np.ndarray:
        """Index after the last fetch of each (stage, dst), where these lie side by side."""
        return np.append(self.slot_begins[1:], len(self))

    def sorted_by_slot(self) -> KvFetches:
        """Sort by stage, target and token, and place the tokens of each (stage, target) one behind the other."""
        return self[np.lexsort((self.start, self.dst, self.stage))].packed()

    def packed(self) -> KvFetches:
        """Set dst_row so that the fetches of each (stage, dst), which lie side by side, fill a slot in their order."""
        before = np.cumsum(self.rows) - self.rows
        first = self.slot_begins
        return replace(self, dst_row=before - np.repeat(before[first], self.slot_ends - first))

    def shortened(self, drop: np.ndarray, rows: np.ndarray) -> KvFetches:
        """Drop the first `drop` tokens of each fetch and keep `rows` tokens after them."""
        start = self.start + drop
        return replace(self, start=start, stop=start + rows, src_row=self.src_row + drop)

    def spans_of(self, rank: np.ndarray) -> np.ndarray:
        """Return the tokens as spans of the given ranks, records of dtype TOKEN_SPAN."""
        spans = np.empty(len(self), TOKEN_SPAN)
        spans["rank"], spans["doc"], spans["start"], spans["stop"] = rank, self.doc, self.start, self.stop
        return spans

    @staticmethod
    def concatenate(parts: Sequence[KvFetches]) -> KvFetches:
        """Concatenate lists of fetches."""
        return KvFetches(
            *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(KvFetches))
        )


@dataclass(frozen=True, eq=False)
class NeededTokens:
    """Runs of tokens that takers (ranks or nodes) need, sorted by taker and token; runs of one taker do not touch.

    Attributes:
        taker: int64 [n], ascending.
        first, last: first and last-plus-one token, int64 [n].
    """

    taker: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @staticmethod
    def union(taker: np.ndarray, first: np.ndarray, last: np.ndarray, tokens: int) -> NeededTokens:
        """Unite the runs of each taker, given in any order, of a batch of so many tokens."""
        stride = tokens + 1  # runs of two takers never touch
        runs = union_of_runs(np.stack([first + taker * stride, last + taker * stride], 1))
        taker = runs[:, 0] // stride
        return NeededTokens(taker, runs[:, 0] - taker * stride, runs[:, 1] - taker * stride)


@dataclass(frozen=True, eq=False)
class KvOwners:
    """Token spans of keys and the ranks that own them; a token has one owner in each domain.

    Attributes:
        spans: records of dtype TOKEN_SPAN.
        row: row of each span's first token in the rank's slot, int64 [spans].
        domain: takers of a domain fetch from the owners of that domain only, int64 [spans].
    """

    spans: np.ndarray
    row: np.ndarray
    domain: np.ndarray

    @staticmethod
    def of(layout: Layout, among: np.ndarray | None = None) -> KvOwners:
        """Return the owners of a layout of keys, in one domain.

        Args:
            layout: layout of the keys.
            among: bool [spans], the spans to use; default: all.
        """
        keep = np.ones(len(layout.spans), bool) if among is None else among
        spans = layout.spans[keep]
        return KvOwners(spans, layout.span_first_rows[keep], np.zeros(len(spans), np.int64))

    @cached_property
    def _addresses(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a domain have addresses of their own: the distance between two domains, the spans in the order of
        addresses, and the first and last-plus-one address of each."""
        distance = int(self.spans["stop"].max(initial=0)) + 1
        address = self.spans["start"] + self.domain * distance
        order = np.argsort(address, kind="stable")
        length = self.spans["stop"] - self.spans["start"]
        return distance, order, address[order], (address + length)[order]

    def fetch_list(self, needs: NeededTokens, domain_of: np.ndarray | None = None) -> KvFetches:
        """Return what the takers fetch, sorted by (dst, start); dst is the taker, stage and dst_row are 0. Tokens
        without an owner are left out.

        Args:
            needs: the needed tokens.
            domain_of: domain of each taker; default: one domain.
        """
        distance, order, first, last = self._addresses
        shift = 0 if domain_of is None else domain_of[needs.taker] * distance
        limit = distance - 1
        need, owner, start, stop = intersect_runs(
            np.minimum(needs.first, limit) + shift, np.minimum(needs.last, limit) + shift, first, last
        )
        span, zero = order[owner], np.zeros(len(need), np.int64)
        owner_rank, first_token, document = (
            np.ascontiguousarray(self.spans[name]) for name in ("rank", "start", "doc")
        )
        if domain_of is not None:
            start, stop = start - shift[need], stop - shift[need]  # type: ignore[index]  # an array in this case
        src_row = (self.row - first_token)[span] + start
        return KvFetches(zero, needs.taker[need], owner_rank[span], document[span], start, stop, src_row, zero)


def needed_tokens(
    queries: Layout, keys: Layout, attention: AttentionConfig, among: np.ndarray | None = None
) -> NeededTokens:
    """Return the keys that the queries of each rank see.

    Args:
        queries, keys: layouts of queries and of keys on the same ranks.
        attention: its mask and window say what is visible.
        among: bool [spans of queries], the queries to look at; default: all.
    """
    spans = queries.spans if among is None else queries.spans[among]
    left, right = attention.visible_range
    blocks, block = queries.documents.blocks, np.zeros(0, np.int64)
    if blocks is not None:
        spans, _, block = blocks.cut(spans)
    span, k_doc = queries.documents.seen_documents(np.ascontiguousarray(spans["doc"]))
    spans = spans[span]
    q_first, k_first = (  # positions of the queries' and of the keys' documents
        documents.first_positions[doc]
        for documents, doc in ((queries.documents, spans["doc"]), (keys.documents, k_doc))
    )
    shift = q_first - queries.documents.offsets[spans["doc"]] - k_first  # from a query's token to a row of the keys
    k_offset, length = keys.documents.offsets[k_doc], keys.documents.lengths[k_doc]
    first = k_offset + np.clip(spans["start"] + shift - left, 0, length)
    last = k_offset + np.clip(spans["stop"] + shift + right, 0, length)
    if blocks is not None:
        in_block = np.flatnonzero((block[span] >= 0) & (k_doc == spans["doc"]))
        of_block = block[span[in_block]]
        first[in_block] = np.minimum(first[in_block], blocks.start[of_block])
        last[in_block] = blocks.stop[of_block]
    return NeededTokens.union(spans["rank"], first, last, keys.documents.tokens)


def nodes_apart(layout: Layout, per_node: int, doc: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """Return the cyclic distance from node src to node dst among the nodes that hold the document: 1 for the next one.

    Args:
        layout: layout of the keys.
        per_node: ranks of a node.
        doc, src, dst: document and nodes, int64 [n]. A node that does not hold the document counts as the next that
            does.
    """
    nodes = layout.ranks // per_node
    held = np.unique(layout.spans["doc"] * nodes + layout.spans["rank"] // per_node)
    first = np.searchsorted(held, doc * nodes)
    count = np.maximum(np.searchsorted(held, (doc + 1) * nodes) - first, 1)
    place = [np.searchsorted(held, doc * nodes + node) - first for node in (src, dst)]
    return (place[1] - place[0]) % count
