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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import Documents, Layout, Redistribution, ragged_arange
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.records import TILE, Messages
from mindspeed_cp.plan.tiles import count_pairs, tiles_between

#: Limits of a pass in which tiles are derived: spans of queries and keys, and under windows, where rows of tiles are
#: counted one by one, tokens of all documents.
SPANS_PER_PASS, WINDOW_TOKENS_PER_PASS = 2**14, 2**21

#: Types in which gradients of keys and values may travel, and bytes of an element.
REDUCE_BYTES = {"float32": 4, "bfloat16": 2}

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
        return np.concatenate([np.empty(0, TILE), *(tiles for tiles, _ in self.tile_passes(self.contents_of(rank)))])

    def tile_passes(self, contents: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Derive the tiles of contents, which may be of several ranks, in a few passes.

        Yields:
            Records of dtype TILE, content by content, and the index in `contents` of each, int64 [tiles].
        """
        queries, documents = self.q_layout_compute, self.q_layout_compute.documents
        tokens = np.full(len(contents), documents.tokens)
        if documents.is_plain and len(contents):
            doc = self.spans["doc"][ragged_arange(contents["first"], contents["count"])]
            content = np.repeat(np.arange(len(contents)), contents["count"])
            first = group_starts(content, doc)
            lengths = np.maximum(documents.lengths, self.kv_documents.lengths)[doc[first]]
            tokens = np.bincount(content[first], lengths, len(contents)).astype(np.int64)
        most = MAX_TOKENS if self.attention.window is None else WINDOW_TOKENS_PER_PASS
        spans_of_content = np.diff(queries.span_offsets)[contents["rank"]] + contents["count"]
        spans_before, tokens_before = (np.append(0, np.cumsum(x)) for x in (spans_of_content, np.minimum(tokens, most)))
        begin = 0
        while begin < len(contents):
            limits = (spans_before, spans_before[begin] + SPANS_PER_PASS), (tokens_before, tokens_before[begin] + most)
            end = max(begin + 1, min(int(np.searchsorted(before, limit, "right")) - 1 for before, limit in limits))
            tiles, content = self._tiles(contents[begin:end])
            yield tiles, begin + content
            begin = end

    def _tiles(self, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Derive the tiles of some contents as those of a batch that has a document for each document of each content,
        or in trees and with blocks a copy of all documents for each."""
        queries, documents, keys = self.q_layout_compute, self.q_layout_compute.documents, self.kv_documents
        k_spans = self.spans[ragged_arange(contents["first"], contents["count"])]
        q_count = np.diff(queries.span_offsets)[contents["rank"]]
        q_index = ragged_arange(queries.span_offsets[contents["rank"]], q_count)
        # (content, document) as one number, ascending: of each span, and of each document of the new batch.
        k_pair, q_pair = (
            np.repeat(np.arange(len(contents)), count) * len(documents) + spans["doc"]
            for spans, count in ((k_spans, contents["count"]), (queries.spans[q_index], q_count))
        )
        if documents.is_plain:
            pairs = k_pair[group_starts(k_pair)]
            doc = pairs % len(documents)
            copied, copied_keys = Documents(documents.lengths[doc]), Documents(keys.lengths[doc])
            seen = np.isin(q_pair, pairs)
            q_index, q_pair = q_index[seen], q_pair[seen]
        else:
            pairs = np.arange(len(contents) * len(documents))
            copied = copied_keys = documents.copies(len(contents))
        q_spans = _renumbered(queries.spans[q_index], np.searchsorted(pairs, q_pair), documents, copied)
        k_spans = _renumbered(k_spans, np.searchsorted(pairs, k_pair), keys, copied_keys)
        tiles = tiles_between(q_spans, k_spans, copied, self.attention, copied_keys)
        content = pairs[tiles["doc"]] // len(documents)
        q_rows, k_rows = (np.cumsum(spans["stop"] - spans["start"]) for spans in (q_spans, k_spans))
        if len(tiles):  # rows of the rank and of the slot, instead of those of the new batch
            span = np.searchsorted(q_rows, tiles["q_row"], "right")
            tiles["q_row"] += (queries.span_first_rows[q_index] + q_spans["stop"] - q_spans["start"] - q_rows)[span]
            first = np.cumsum(contents["count"]) - contents["count"]
            rows_before = (k_rows - k_spans["stop"] + k_spans["start"])[first]
            tiles["k_row"] += (contents["row"] - rows_before)[content]
        tiles["doc"], tiles["k_doc"] = pairs[tiles["doc"]] % len(documents), pairs[tiles["k_doc"]] % len(documents)
        tiles["step"], tiles["slot"] = contents["step"][content], contents["slot"][content]
        return tiles, content


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
        heads, part_work = self.attention.heads, []
        for part in self.parts_or_self:
            tiles, pairs = part.forward.tiles(rank), np.zeros(part.forward.steps, np.int64)
            np.add.at(pairs, tiles["step"], count_pairs(tiles, self.attention))
            first, last = part.q_layout_compute.head_range(rank, heads)
            part_work.append(pairs * float(last - first))  # pairs alone may have 62 bits
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


def _renumbered(spans: np.ndarray, new_doc: np.ndarray, documents: Documents, copied: Documents) -> np.ndarray:
    """Renumber spans of documents to spans of the documents `new_doc` of another batch, of equal lengths."""
    out = spans.copy()
    shift = copied.offsets[new_doc] - documents.offsets[spans["doc"]]
    out["doc"] = new_doc
    for name in ("start", "stop"):
        out[name] += shift
    return out
