"""Plan and Program: what each rank sends and computes, step by step.  Frozen data; no torch, no algorithm by name.

A rank sees numbered SLOTS of key/value rows. Slot 0 is its own shard, the others are receive buffers; each slot has a
gradient slot of the same shape. One step of a program, on every rank::

    post      fetch and reduce messages with start == step
    compute   the step's tiles, while messages travel
    finish    messages with done == step, reduces first: a reduce is ADDED to the gradient of its target rows;
              a fetch that lands replaces its target rows and starts their gradient at zero

Steps are global numbers and messages have one global order, in which every rank issues its sends and its receives. The
first unfinished message is then at the head of both ends' queues: nothing can dead-lock, even if sends block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import Documents, Layout, Redistribution, expand
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.records import TILE, Messages
from mindspeed_cp.plan.tiles import pairs, tiles_between

#: Spans of queries, times contents, whose tiles are found at once.
AT_ONCE = 2**13


@dataclass(frozen=True, eq=False)
class Program:
    """One direction (forward or backward) of a plan.

    Attributes:
        steps: number of steps.
        capacity: rows of every slot, int64 [ranks, slots].
        q_layout: where queries are.
        kv_documents: lengths of the keys; those of q_layout, but in cross-attention.
        attention: what is computed; its mask and window and the contents determine the tiles.
        contents: records of dtype CONTENT sorted by (rank, step, slot, row): which rows of which slots are computed.
        spans: records of dtype SPAN that contents refer to, ascending in token order inside one content.
        fetch: messages that carry keys and values.
        reduce: messages that carry gradients of keys and values (backward only).
    """

    steps: int
    capacity: np.ndarray
    q_layout: Layout
    kv_documents: Documents
    attention: AttentionConfig
    contents: np.ndarray
    spans: np.ndarray
    fetch: Messages
    reduce: Messages

    @property
    def ranks(self) -> int:
        """Context-parallel ranks."""
        return len(self.capacity)

    def contents_of(self, rank: int) -> np.ndarray:
        """Contents (records) of one rank, in the order of steps."""
        lo, hi = np.searchsorted(self.contents["rank"], [rank, rank + 1])
        return self.contents[lo:hi]

    def spans_in(self, content: np.ndarray) -> np.ndarray:
        """Spans (records) of one content."""
        return self.spans[content["first"] : content["first"] + content["count"]]

    def tiles(self, rank: int) -> np.ndarray:
        """Tiles of one rank, records of dtype TILE sorted by (step, slot, q_row); derived anew at every call."""
        return self.tiles_of(rank, self.contents_of(rank))[0]

    def tiles_of(self, rank: int, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tiles of some contents of a rank, content after content, and the number of each one's content in `contents`,
        int64 [tiles]."""
        q_spans = self.q_layout.of(rank)
        if not len(contents) or not len(q_spans):
            return np.empty(0, TILE), np.empty(0, np.int64)
        tokens = max(self.q_layout.documents.tokens, self.kv_documents.tokens, 1)
        at_once = max(1, min(AT_ONCE // len(q_spans), MAX_TOKENS // tokens))
        begins = range(0, len(contents), at_once)
        found = [self._tiles(q_spans, contents[i : i + at_once]) for i in begins]
        return (
            np.concatenate([tiles for tiles, _ in found]),
            np.concatenate([of + i for i, (_, of) in zip(begins, found, strict=True)]),
        )

    def _tiles(self, q_spans: np.ndarray, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tiles of some contents, as those of one large batch: a copy of all documents for each content, of which it
        has the keys."""
        documents, keys = self.q_layout.documents, self.kv_documents
        if len(contents) == 1:
            tiles = tiles_between(q_spans, self.spans_in(contents[0]), documents, self.attention, keys)
            tiles["step"], tiles["slot"] = contents["step"], contents["slot"]
            tiles["k_row"] += contents["row"]
            return tiles, np.zeros(len(tiles), np.int64)
        copies, of = len(contents), np.repeat(np.arange(len(contents)), contents["count"])
        k_spans = _copied(self.spans[expand(contents["first"], contents["count"])], of, keys)
        rows = np.bincount(of, k_spans["stop"] - k_spans["start"], copies).astype(np.int64)
        k_rows = np.cumsum(rows) - rows
        q_rows = int((q_spans["stop"] - q_spans["start"]).sum())
        q_spans = _copied(np.tile(q_spans, copies), np.repeat(np.arange(copies), len(q_spans)), documents)
        many = Documents(np.tile(documents.lengths, copies))
        many_keys = many if keys == documents else Documents(np.tile(keys.lengths, copies))
        tiles = tiles_between(q_spans, k_spans, many, self.attention, many_keys)
        copy = tiles["doc"] // len(documents)
        tiles["doc"] -= copy * len(documents)
        tiles["q_row"] -= copy * q_rows
        tiles["k_row"] += contents["row"][copy] - k_rows[copy]
        tiles["step"], tiles["slot"] = contents["step"][copy], contents["slot"][copy]
        return tiles, copy

    def work(self, rank: int) -> np.ndarray:
        """Visible (query, key) pairs of each step, int64 [steps]."""
        tiles = self.tiles(rank)
        out = np.zeros(self.steps, np.int64)
        np.add.at(out, tiles["step"], pairs(tiles, self.attention))
        return out


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that one attention layer does with one packed batch, on every rank, forward and backward.

    Compared and hashed by identity, so that what is derived from a plan can be cached beside it.

    Attributes:
        algorithm: name of the builder, for people; nothing acts on it.
        attention: what is computed.
        topology: where it runs.
        layout: what the caller holds of queries and gets of the output, all heads.
        layout_kv: what the caller holds of keys and values, all heads: `layout`, but in cross-attention.
        q_layout: where queries are computed: some heads on each rank where heads are split.
        kv_layout: where slot 0 of keys and values is; a kv head may be on several ranks.
        forward: the forward program.
        backward: the backward program.
        parts: plans over disjoint documents of the batch, which together are this one (:mod:`.combine`); the documents
            of other parts have length 0 in them. This plan's own layouts then are of the whole batch, and its programs
            have no steps. Empty: a plan that is all one.
        order: (part, step) of the forward, in the order in which every rank takes them; those of one part ascend.
        order_backward: of the backward.
        linear: the layout of the linear layers, and of the batch, where it differs from `layout`; hidden states then
            move at the borders of the attention module. None: `layout`.
    """

    algorithm: str
    attention: AttentionConfig
    topology: Topology
    layout: Layout
    layout_kv: Layout
    q_layout: Layout
    kv_layout: Layout
    forward: Program
    backward: Program
    parts: tuple[Plan, ...] = ()
    order: tuple[tuple[int, int], ...] = ()
    order_backward: tuple[tuple[int, int], ...] = ()
    linear: Layout | None = None

    @property
    def pieces(self) -> tuple[Plan, ...]:
        """The parts, or this plan itself where it has none: whatever has programs of its own."""
        return self.parts or (self,)

    @property
    def documents(self) -> Documents:
        """The batch: lengths of the queries."""
        return self.layout.documents

    @property
    def kv_documents(self) -> Documents:
        """Lengths of the keys and values: those of the queries, but in cross-attention."""
        return self.layout_kv.documents

    @property
    def ranks(self) -> int:
        """Context-parallel ranks."""
        return self.layout.ranks

    @cached_property
    def q_move(self) -> Redistribution | None:
        """From `layout` to `q_layout`; None when nothing moves. Outputs and gradients of queries go back by it."""
        return Redistribution.between(self.layout, self.q_layout, self.attention.heads)

    @cached_property
    def kv_move(self) -> Redistribution | None:
        """From `layout_kv` to `kv_layout`; None when nothing moves. Gradients go back by it, copies summed."""
        return Redistribution.between(self.layout_kv, self.kv_layout, self.attention.kv_heads)

    def turns(self, direction: str = "forward") -> tuple[tuple[int, int], ...]:
        """(piece, step) of a direction in the order in which every rank takes them."""
        if self.parts:
            return self.order if direction == "forward" else self.order_backward
        program: Program = getattr(self, direction)
        return tuple((0, step) for step in range(program.steps))

    def work_of(self, rank: int) -> np.ndarray:
        """Visible (query, key) pairs, times query heads, of one rank in each of `turns()`, int64 [turns]."""
        each = [
            piece.forward.work(rank) * np.diff(piece.q_layout.head_range(rank, self.attention.heads))
            for piece in self.pieces
        ]
        return np.array([each[part][step] for part, step in self.turns()], np.int64)

    def work(self) -> np.ndarray:
        """`work_of` every rank, int64 [ranks, turns]."""
        return np.stack([self.work_of(rank) for rank in range(self.ranks)])

    def __repr__(self) -> str:
        sent = sum(int(piece.forward.fetch.items["rows"].sum()) for piece in self.pieces)
        parts = f"{len(self.parts)} parts, " if self.parts else ""
        return (
            f"Plan({self.algorithm}, {parts}{self.ranks} ranks, {len(self.documents)} documents, "
            f"{self.documents.tokens} tokens, {len(self.turns())} forward steps, {sent} key/value rows sent)"
        )


def _copied(spans: np.ndarray, copy: np.ndarray, documents: Documents) -> np.ndarray:
    """Spans of documents as those of a copy of them."""
    out = spans.copy()
    out["doc"] += copy * len(documents)
    for name in ("start", "stop"):
        out[name] += copy * documents.tokens
    return out
