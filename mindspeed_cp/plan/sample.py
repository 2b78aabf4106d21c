"""A small sample of a plan's attention: a run of queries of one head, and where the keys that it sees are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.layout import Documents, ragged_arange
from mindspeed_cp.plan.program import Plan

QUERIES = 16  # most queries of a sample
PAIRS = 2**16  # most pairs of a query and a key, unless one query sees more


@dataclass(frozen=True)
class AttentionSample:
    """Some queries of one head, neighbours in a document and on a rank, and the keys that any of them sees.

    Attributes:
        head, kv_head: the query head and the kv head that it reads.
        rank: rank that holds the queries in plan.layout.
        row, rows: first row and number of the queries there.
        document: number of the document.
        position: position of the first query, in a tree on the path from the root.
        first_key, keys: position of the first key, and number of keys; in a tree on the document's path.
    """

    head: int
    kv_head: int
    rank: int
    row: int
    rows: int
    document: int
    position: int
    first_key: int
    keys: int

    def key_rows(self, plan: Plan, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys that a rank holds in plan.kv_layout_in: their rows, and positions after first_key, int64
        [rows] each."""
        tokens = plan.kv_layout_in.tokens(rank)
        number = self.key_numbers(plan.kv_documents, tokens)
        rows = np.flatnonzero(number >= 0)
        return rows, number[rows]

    def blocks(self, plan: Plan) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the block of each query and of each key, or -1, int64 [rows] and [keys]; None if the plan has none."""
        documents = plan.documents
        if documents.blocks is None:
            return None
        _, path = documents.seen_documents(np.array([self.document]))
        tokens = ragged_arange(documents.offsets[path], documents.lengths[path])
        block = documents.blocks.of(tokens)
        return block[self.position : self.position + self.rows], block[self.first_key : self.first_key + self.keys]

    def key_numbers(self, keys: Documents, tokens: np.ndarray) -> np.ndarray:
        """Return the position after first_key of each token among the keys, -1 if it is not among them, int64
        [tokens]."""
        number = np.full(len(tokens), -1)
        _, path = keys.seen_documents(np.array([self.document]))
        for doc in path.tolist():
            begin, end = keys.offsets[doc : doc + 2]
            position = tokens - begin + keys.first_positions[doc] - self.first_key
            is_key = (tokens >= begin) & (tokens < end) & (position >= 0) & (position < self.keys)
            number[is_key] = position[is_key]
        return number


def draw_sample(plan: Plan, generator: np.random.Generator) -> AttentionSample | None:
    """Draw a head and a token, and take the queries from that token on; None if the batch has no tokens. Every rank
    draws the same with an equal generator."""
    attention, documents = plan.attention, plan.documents
    if not documents.tokens:
        return None
    head, token = int(generator.integers(attention.heads)), int(generator.integers(documents.tokens))
    spans = plan.layout.spans
    index = int(np.flatnonzero((spans["start"] <= token) & (token < spans["stop"]))[0])
    document = int(spans["doc"][index])
    position = token - int(documents.offsets[document]) + int(documents.first_positions[document])
    rows = min(QUERIES, int(spans["stop"][index]) - token)
    while rows > 1 and rows * _keys(plan, token, position, rows)[1] > PAIRS:
        rows -= 1
    first_key, keys = _keys(plan, token, position, rows)
    return AttentionSample(
        head=head,
        kv_head=head * attention.kv_heads // attention.heads,
        rank=int(spans["rank"][index]),
        row=int(plan.layout.span_first_rows[index]) + token - int(spans["start"][index]),
        rows=rows,
        document=document,
        position=position,
        first_key=first_key,
        keys=keys,
    )


def _keys(plan: Plan, token: int, position: int, rows: int) -> tuple[int, int]:
    """Return the position of the first key and the number of keys that the queries of some tokens see.

    Args:
        plan: any plan.
        token, position: the first query.
        rows: number of queries.
    """
    left, right = plan.attention.visible_range
    documents, blocks = plan.kv_documents, plan.documents.blocks
    document = int(plan.documents.document_of(np.asarray(token)))
    length = int(documents.first_positions[document] + documents.lengths[document])
    first, last = max(0, position - left), min(length, position + rows + right)
    if blocks is not None:
        of_ends = blocks.of(np.array([token, token + rows - 1]))
        if of_ends[0] >= 0:
            first = min(first, position + int(blocks.start[of_ends[0]]) - token)
        if of_ends[1] >= 0:
            last = position + int(blocks.stop[of_ends[1]]) - token
    return first, max(0, last - first)
