"""Plan and Program: what each rank sends and computes, step by step.  Frozen data, independent of any algorithm.

A slot is a numbered buffer of K/V rows on a rank: slot 0 is its own shard, the others are receive buffers. Each slot
has a gradient slot of the same shape. A step is a numbered point in the order of a program, the same on all
ranks. In each step, every rank does this::

    post      fetch and reduce messages with start == step
    compute   the tiles of the step, while messages travel
    finish    messages with done == step, reduces first: a reduce is ADDED to the gradients of its target rows;
              a fetch replaces its target rows and sets their gradients to zero

Messages have one global order in which every rank issues its sends and receives. The first unfinished message is
therefore at the head of the queues of both its ends, and a dead-lock is impossible even if sends block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import Documents, Layout, Redistribution, ragged_arange
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.records import TILE, Messages
from mindspeed_cp.plan.tiles import count_pairs, tiles_between

#: Limit of query spans x contents for which tiles are derived in one batch.
SPANS_PER_BATCH = 2**13


#: Types in which gradients of keys and values may travel, and bytes of an element.
REDUCE_BYTES = {"float32": 4, "bfloat16": 2}

#: How messages travel: each by itself, or those with the same first and last step as one all-to-all-v of all ranks.

#: The two programs of a plan, in the order in which ranks run them.
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Program:
    """One direction (forward or backward) of a plan.

    Tiles are not stored: they follow from contents, queries and mask, and are derived for each rank on demand.

    Attributes:
        steps: number of steps.
        capacity: number of rows of each slot, int64 [ranks, slots].
        q_layout_compute: layout of the queries during the steps.
        kv_documents: lengths of the keys; equal to the documents of q_layout_compute except in cross-attention.
        attention: definition of attention.
        contents: records of dtype CONTENT sorted by (rank, step, slot, row): slot rows that are computed in each step.
        spans: records of dtype TOKEN_SPAN that contents refer to, ascending in token order within one content.
        fetch: messages that carry keys and values.
        reduce: messages that carry gradients of keys and values (backward only).
    """

    steps: int
    capacity: np.ndarray
    q_layout_compute: Layout
    kv_documents: Documents
    attention: AttentionConfig
    contents: np.ndarray
    spans: np.ndarray
    fetch: Messages
    reduce: Messages

    @property
    def ranks(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.capacity)

    def contents_of(self, rank: int) -> np.ndarray:
        """Return the contents of one rank in step order, records of dtype CONTENT."""
        lo, hi = np.searchsorted(self.contents["rank"], [rank, rank + 1])
        return self.contents[lo:hi]

    def spans_in(self, content: np.ndarray) -> np.ndarray:
        """Return the spans of one content, records of dtype TOKEN_SPAN."""
        return self.spans[content["first"] : content["first"] + content["count"]]

    def tiles(self, rank: int) -> np.ndarray:
        """Derive the tiles of one rank, records of dtype TILE sorted by (step, slot, q_row); not cached."""
        return self.tiles_of(rank, self.contents_of(rank))[0]

    def tiles_of(self, rank: int, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Derive the tiles of some contents of a rank.

        Returns:
            Records of dtype TILE [tiles], content by content, and the index in `contents` of each, int64 [tiles].
        """
        q_spans = self.q_layout_compute.rank_spans(rank)
        if not len(contents) or not len(q_spans):
            return np.empty(0, TILE), np.empty(0, np.int64)
        tokens = max(self.q_layout_compute.documents.tokens, self.kv_documents.tokens, 1)
        batch = max(1, min(SPANS_PER_BATCH // len(q_spans), MAX_TOKENS // tokens))
        begins = range(0, len(contents), batch)
        derived = [self._tiles(q_spans, contents[i : i + batch]) for i in begins]
        return (
            np.concatenate([tiles for tiles, _ in derived]),
            np.concatenate([index + i for i, (_, index) in zip(begins, derived, strict=True)]),
        )

    def _tiles(self, q_spans: np.ndarray, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Derive the tiles of some contents in one pass, as tiles of a batch with one copy of all documents for each
        content."""
        documents, keys = self.q_layout_compute.documents, self.kv_documents
        if len(contents) == 1:
            tiles = tiles_between(q_spans, self.spans_in(contents[0]), documents, self.attention, keys)
            tiles["step"], tiles["slot"] = contents["step"], contents["slot"]
            tiles["k_row"] += contents["row"]
            return tiles, np.zeros(len(tiles), np.int64)
        copies, copy = len(contents), np.repeat(np.arange(len(contents)), contents["count"])
        k_spans = _in_copies(self.spans[ragged_arange(contents["first"], contents["count"])], copy, keys)
        rows = np.bincount(copy, k_spans["stop"] - k_spans["start"], copies).astype(np.int64)
        k_rows = np.cumsum(rows) - rows
        q_rows = int((q_spans["stop"] - q_spans["start"]).sum())
        q_spans = _in_copies(np.tile(q_spans, copies), np.repeat(np.arange(copies), len(q_spans)), documents)
        copied = documents.copies(copies)
        copied_keys = copied if keys == documents else keys.copies(copies)
        tiles = tiles_between(q_spans, k_spans, copied, self.attention, copied_keys)
        copy = tiles["doc"] // len(documents)
        tiles["doc"] -= copy * len(documents)
        tiles["k_doc"] -= copy * len(documents)
        tiles["q_row"] -= copy * q_rows
        tiles["k_row"] += contents["row"][copy] - k_rows[copy]
        tiles["step"], tiles["slot"] = contents["step"][copy], contents["slot"][copy]
        return tiles, copy

    def pairs_per_step(self, rank: int) -> np.ndarray:
        """Count the visible (query, key) pairs that a rank computes in each step, int64 [steps]."""
        tiles = self.tiles(rank)
        pairs = np.zeros(self.steps, np.int64)
        np.add.at(pairs, tiles["step"], count_pairs(tiles, self.attention))
        return pairs


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that one attention layer does with one packed batch, on all ranks, forward and backward.

    Plans compare and hash by identity, so derived data can be cached beside them.

    Attributes:
        algorithm: name of the builder, for display only.
        attention: definition of attention.
        topology: ranks and nodes.
        layout: rows of q that the caller passes, and of the output that it gets; all heads.
        kv_layout_in: rows of k and v that the caller passes, all heads; equals `layout` except in cross-attention.
        q_layout_compute: rows and heads of q during the steps; ranks have ranges of heads where heads are split.
        kv_layout_compute: rows and heads of slot 0 of k and v during the steps; a kv head may be on several ranks.
        forward: forward program.
        backward: backward program.
        parts: plans over disjoint documents that together make this plan (:mod:`mindspeed_cp.plan.parts`); documents of
            other parts have length 0 in them. The layouts of this plan then cover the whole batch, and its own programs
            have no steps. Empty for a plan that is not divided.
        forward_order: (part, step) of the forward steps in execution order, the same on all ranks; the steps of one
            part ascend.
        backward_order: the same for the backward.
        linear_layout: layout of the linear layers and of the batch, if it differs from `layout`; hidden states are then
            redistributed before and after the attention module. None: `layout`.
        reduce_dtype: type in which gradients of keys and values travel ("float32", "bfloat16"); ranks sum them in fp32.
    """

    algorithm: str
    attention: AttentionConfig
    topology: Topology
    layout: Layout
    kv_layout_in: Layout
    q_layout_compute: Layout
    kv_layout_compute: Layout
    forward: Program
    backward: Program
    parts: tuple[Plan, ...] = ()
    forward_order: tuple[tuple[int, int], ...] = ()
    backward_order: tuple[tuple[int, int], ...] = ()
    linear_layout: Layout | None = None
    reduce_dtype: str = "float32"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradients that travel between ranks."""
        return REDUCE_BYTES[self.reduce_dtype]

    @property
    def parts_or_self(self) -> tuple[Plan, ...]:
        """The plans that have programs: the parts, or this plan itself if it has no parts."""
        return self.parts or (self,)

    @property
    def batch_layout(self) -> Layout:
        """Layout of the batch, embeddings and linear layers: `linear_layout`, or `layout` if that is None."""
        return self.layout if self.linear_layout is None else self.linear_layout

    @property
    def documents(self) -> Documents:
        """Documents of the batch, by lengths of the queries."""
        return self.layout.documents

    @property
    def kv_documents(self) -> Documents:
        """Documents by lengths of the keys; equal to `documents` except in cross-attention."""
        return self.kv_layout_in.documents

    @property
    def ranks(self) -> int:
        """Number of context-parallel ranks."""
        return self.layout.ranks

    @cached_property
    def q_redistribution(self) -> Redistribution | None:
        """Redistribution of q from `layout` to `q_layout_compute`, None if they are the same; its adjoint moves outputs
        and dq."""
        return Redistribution.between(self.layout, self.q_layout_compute, self.attention.heads)

    @cached_property
    def kv_redistribution(self) -> Redistribution | None:
        """Redistribution of k and v from `kv_layout_in` to `kv_layout_compute`, None if they are the same; its adjoint
        moves dk and dv and sums copies."""
        return Redistribution.between(self.kv_layout_in, self.kv_layout_compute, self.attention.kv_row.heads)

    def step_order(self, direction: str = "forward") -> tuple[tuple[int, int], ...]:
        """Return (part, step) of the steps of a direction, in execution order; a plan without parts is part 0."""
        if self.parts:
            return self.forward_order if direction == "forward" else self.backward_order
        program: Program = getattr(self, direction)
        return tuple((0, step) for step in range(program.steps))

    def work_of(self, rank: int) -> np.ndarray:
        """Return visible (query, key) pairs x query heads of one rank in each step of `step_order()`, fp64 [steps]."""
        heads = self.attention.heads
        part_work = [
            part.forward.pairs_per_step(rank) * np.diff(part.q_layout_compute.head_range(rank, heads)).astype(float)
            for part in self.parts_or_self
        ]  # pairs alone may have 62 bits
        return np.array([part_work[part][step] for part, step in self.step_order()], np.float64)

    def work(self) -> np.ndarray:
        """Return `work_of` for all ranks, fp64 [ranks, steps]."""
        return np.stack([self.work_of(rank) for rank in range(self.ranks)])

    def __repr__(self) -> str:
        sent = sum(int(part.forward.fetch.items["rows"].sum()) for part in self.parts_or_self)
        parts = f"{len(self.parts)} parts, " if self.parts else ""
        return (
            f"Plan({self.algorithm}, {parts}{self.ranks} ranks, {len(self.documents)} documents, "
            f"{self.documents.tokens} tokens, {len(self.step_order())} forward steps, {sent} key/value rows sent)"
        )


def _in_copies(spans: np.ndarray, copy: np.ndarray, documents: Documents) -> np.ndarray:
    """Renumber spans of documents to spans of the copies given, in a batch of copies of all documents."""
    out = spans.copy()
    out["doc"] += copy * len(documents)
    for name in ("start", "stop"):
        out[name] += copy * documents.tokens
    return out
