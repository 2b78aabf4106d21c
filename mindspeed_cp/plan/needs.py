"""What every rank needs of keys and values that others hold, and what of it is where.  All ranks at once, no loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import SPAN, Layout, joined, merged, overlaps
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.records import MESSAGE, RUN, Messages, record

#: Rank `dst` takes tokens start .. stop-1 of document doc from rank src, which has them from src_row on, to dst_row on;
#: `stage` is the part of the schedule that moves them.
PIECE = record("stage dst src doc start stop src_row dst_row")


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tokens for each of several takers (ranks, or nodes), by taker and token; those of one taker are apart.

    Attributes:
        taker: int64 [n], ascending.
        first, last: first and last-plus-one token, int64 [n].
    """

    taker: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @staticmethod
    def union(taker: np.ndarray, first: np.ndarray, last: np.ndarray, tokens: int) -> Runs:
        """Any runs, of a batch of so many tokens, joined for each taker."""
        stride = tokens + 1  # runs of two takers never touch
        found = merged(np.stack([first + taker * stride, last + taker * stride], 1))
        taker = found[:, 0] // stride
        return Runs(taker, found[:, 0] - taker * stride, found[:, 1] - taker * stride)

    def by(self, taker_of: np.ndarray, tokens: int) -> Runs:
        """What groups of takers need; taker_of[t] is the group of taker t."""
        return Runs.union(taker_of[self.taker], self.first, self.last, tokens)


@dataclass(frozen=True, eq=False)
class Held:
    """Where keys are: spans of tokens, each at one rank (of each domain, where domains have copies).

    Attributes:
        spans: records of dtype SPAN.
        row: row of each span's first token in the rank's slot, int64 [spans].
        domain: int64 [spans]: takers of a domain find tokens among its spans alone.
    """

    spans: np.ndarray
    row: np.ndarray
    domain: np.ndarray

    @staticmethod
    def of(layout: Layout, among: np.ndarray | None = None) -> Held:
        """What a layout holds, in one domain.

        Args:
            layout: of the keys.
            among: bool [spans]: only these spans.
        """
        keep = np.ones(len(layout.spans), bool) if among is None else among
        spans = layout.spans[keep]
        return Held(spans, layout.first_rows[keep], np.zeros(len(spans), np.int64))

    @cached_property
    def _stride(self) -> int:
        return int(self.spans["stop"].max(initial=0)) + 1

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        address = self.spans["start"] + self.domain * self._stride
        order = np.argsort(address, kind="stable")
        length = self.spans["stop"] - self.spans["start"]
        return order, address[order], (address + length)[order]

    def taken(self, runs: Runs, domain_of: np.ndarray | None = None) -> np.ndarray:
        """Pieces of what takers need, records of dtype PIECE sorted by (dst, start); dst is the taker, stage and
        dst_row are 0.  What nobody here holds is left out.

        Args:
            runs: what is needed.
            domain_of: domain of each taker; default: one domain.
        """
        order, first, last = self._sorted
        shift = 0 if domain_of is None else domain_of[runs.taker] * self._stride
        limit = self._stride - 1
        of, at, a, b = overlaps(
            np.minimum(runs.first, limit) + shift, np.minimum(runs.last, limit) + shift, first, last
        )
        found = order[at]
        out = np.zeros(len(of), PIECE)
        spans = self.spans[found]
        out["dst"], out["src"], out["doc"] = runs.taker[of], spans["rank"], spans["doc"]
        shift = 0 if domain_of is None else shift[of]  # type: ignore[index]  # an array then
        out["start"], out["stop"] = a - shift, b - shift
        out["src_row"] = self.row[found] + out["start"] - spans["start"]
        return out


def visible_runs(queries: Layout, keys: Layout, attention: AttentionConfig, among: np.ndarray | None = None) -> Runs:
    """The keys that the queries of every rank see.

    Args:
        queries, keys: layouts; the same ranks.
        attention: its mask and window say what is visible.
        among: bool [spans of queries]: only these queries.
    """
    spans = queries.spans if among is None else queries.spans[among]
    left, right = attention.reach
    offset, k_offset = queries.documents.offsets[spans["doc"]], keys.documents.offsets[spans["doc"]]
    length = keys.documents.lengths[spans["doc"]]
    first = k_offset + np.clip(spans["start"] - offset - left, 0, length)
    last = k_offset + np.clip(spans["stop"] - offset + right, 0, length)
    return Runs.union(spans["rank"], first, last, keys.documents.tokens)


def filled(pieces: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """The pieces with dst_row set: those of one (stage, dst) lie one behind the other in their order.

    Args:
        pieces: records of dtype PIECE, those of one (stage, dst) side by side.
        among: bool [pieces]: only these take up rows.
    """
    length = pieces["stop"] - pieces["start"]
    if among is not None:
        length = length * among
    out = pieces.copy()
    before = np.cumsum(length) - length
    first = begins(pieces["stage"], pieces["dst"])
    out["dst_row"] = before - np.repeat(before[first], np.diff(np.append(first, len(pieces))))
    return out


def node_distance(layout: Layout, per_node: int, doc: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """How many places from node src to node dst, among the nodes that hold the document: 1 for the next one, and so on
    round to the first.

    Args:
        layout: of the keys.
        per_node: ranks of a node.
        doc, src, dst: document and nodes, int64 [n]. A node that does not hold the document counts as the next one.
    """
    nodes = layout.ranks // per_node
    held = np.unique(layout.spans["doc"] * nodes + layout.spans["rank"] // per_node)
    first = np.searchsorted(held, doc * nodes)
    count = np.maximum(np.searchsorted(held, (doc + 1) * nodes) - first, 1)
    place = [np.searchsorted(held, doc * nodes + node) - first for node in (src, dst)]
    return (place[1] - place[0]) % count


def begins(*keys: np.ndarray) -> np.ndarray:
    """Where, in columns sorted together, a new combination begins."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    new = np.ones(len(keys[0]), bool)
    new[1:] = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        new[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(new)


def as_spans(pieces: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The tokens of pieces as spans of the ranks given."""
    out = np.empty(len(pieces), SPAN)
    out["rank"] = rank
    for name in ("doc", "start", "stop"):
        out[name] = pieces[name]
    return out


def messages_of(
    pieces: np.ndarray, start: np.ndarray, done: np.ndarray, src_slot: np.ndarray, dst_slot: np.ndarray
) -> Messages:
    """One message for every stage, source and target; rows that follow each other on both sides are one run.

    Args:
        pieces: records of dtype PIECE.
        start, done, src_slot, dst_slot: of each piece; the same for all of one stage, source and target.
    """
    if not len(pieces):
        return Messages.none()
    order = np.lexsort((pieces["dst_row"], pieces["src"], pieces["dst"], pieces["stage"]))
    pieces = pieces[order]
    runs = np.empty(len(pieces), RUN)
    runs["src_row"], runs["dst_row"] = pieces["src_row"], pieces["dst_row"]
    runs["rows"] = pieces["stop"] - pieces["start"]
    first = begins(pieces["stage"], pieces["dst"], pieces["src"])
    new = np.zeros(len(runs), bool)
    new[first] = True
    whole, kept = joined(runs, ("src_row", "dst_row"), new)
    items = np.empty(len(first), MESSAGE)
    items["src"], items["dst"] = pieces["src"][first], pieces["dst"][first]
    for name, column in (("start", start), ("done", done), ("src_slot", src_slot), ("dst_slot", dst_slot)):
        items[name] = column[order[first]]
    items["first"] = np.searchsorted(kept, first)
    items["count"] = np.diff(np.append(items["first"], len(whole)))
    items["rows"] = np.add.reduceat(runs["rows"], first)
    return Messages(items, whole)


def together(lists: list[Messages], ranks: int) -> Messages:
    """Several lists of messages as one, in global order."""
    lists = [x for x in lists if len(x)]
    if not lists:
        return Messages.none()
    items = []
    total = 0
    for x in lists:
        mine = x.items.copy()
        mine["first"] += total
        total += len(x.runs)
        items.append(mine)
    return Messages(np.concatenate(items), np.concatenate([x.runs for x in lists])).sorted()
