"""Blocks of tokens that see each other both ways: cuts and counts against a walk over tokens; bad input."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents
from mindspeed_cp.layout import contiguous
from mindspeed_cp.plan.problem import document_pairs, run_pairs
from tests.engine.draw import blocks, parents


def visible(documents: Documents, left: int) -> np.ndarray:
    """Whether query (row) sees key (column) of its document; bool [tokens, tokens]."""
    token = np.arange(documents.tokens)
    doc, block = documents.document_of(token), np.full(documents.tokens, -1)
    assert documents.blocks is not None
    for number, (start, stop) in enumerate(zip(documents.blocks.start, documents.blocks.stop, strict=True)):
        block[start:stop] = number
    ahead = token[:, None] - token[None, :]
    same = (block[:, None] == block[None, :]) & (block[:, None] >= 0)
    return (doc[:, None] == doc[None, :]) & (((ahead >= 0) & (ahead <= left)) | same)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 14), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([None, (0, 0), (3, 0), (9, 0)]),
    st.randoms(use_true_random=False),
)
def test_cuts_and_counts_are_those_of_the_tokens(
    lengths: list[int], ranks: int, window: tuple[int, int] | None, rng: Random
) -> None:
    spans = blocks(lengths, rng)
    documents = Documents(lengths, None, spans)
    if not spans:
        assert documents.blocks is None
        return
    attention = AttentionConfig(1, window=window)
    pairs = visible(documents, attention.visible_range[0]).sum(1)
    token = np.arange(documents.tokens)
    doc = documents.document_of(token)
    assert documents.blocks is not None
    expected = [next((i for i, (a, b) in enumerate(spans) if a <= t < b), -1) for t in token.tolist()]
    assert documents.blocks.of(token).tolist() == expected
    by_document = np.bincount(doc, pairs, len(lengths))
    assert document_pairs(documents, documents, attention).tolist() == by_document.tolist()
    alone = run_pairs(doc, token, token + 1, documents, documents, attention)
    assert alone.tolist() == pairs.tolist()
    for rank in range(ranks):
        held = contiguous(documents, ranks).rank_spans(rank)
        cut, source, block = documents.blocks.cut(held)
        tokens = [t for span in cut for t in range(span["start"], span["stop"])]
        assert tokens == [t for span in held for t in range(span["start"], span["stop"])]
        for span, index, number in zip(cut, source.tolist(), block.tolist(), strict=True):
            assert {expected[t] for t in range(span["start"], span["stop"])} == {number}
            assert span["doc"] == held["doc"][index]


def test_copies_and_parts_keep_their_blocks() -> None:
    documents = Documents([5, 3, 4], [-1, 0, -1], [(1, 4), (6, 8), (8, 12)])
    copied = documents.copies(2)
    assert copied.lengths.tolist() == [5, 3, 4] * 2 and copied.parents.tolist() == [-1, 0, -1, -1, 3, -1]
    assert copied.blocks is not None and copied.blocks.start.tolist() == [1, 6, 8, 13, 18, 20]
    part = documents.with_lengths(np.array([0, 0, 4]))
    assert part.blocks is not None and part.blocks.start.tolist() == [0] and part.blocks.stop.tolist() == [4]
    assert part.with_lengths(documents.lengths) == documents != part
    assert documents != Documents([5, 3, 4], [-1, 0, -1]) != Documents([5, 3, 4])
    assert repr(documents) == "Documents([5, 3, 4], parents=[-1, 0, -1], blocks=3, tokens=12)"
    assert Documents([5], None, []).blocks is None and Documents([5], None, np.zeros((0, 2), int)).is_plain
    assert parents(3, Random(0))[1] == 0


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(3, 3)], r"blocks\[0\] is \[3, 3\]; valid: a first token and a last-plus-one token after it, 0 to 12"),
        ([(0, 2), (5, 13)], r"blocks\[1\] is \[5, 13\]; valid: .* 0 to 12"),
        ([(-1, 2)], r"blocks\[0\] is \[-1, 2\]"),
        (
            [(4, 8), (2, 3)],
            r"blocks\[1\] is \[2, 3\], but blocks\[0\] is \[4, 8\]; valid: .* ascending order that do not",
        ),
        ([(0, 3), (2, 4)], r"blocks\[1\] is \[2, 4\], but blocks\[0\] is \[0, 3\]"),
        (
            [(3, 6)],
            r"blocks\[0\] is \[3, 6\], but document 0 ends at token 5; valid: a block of tokens of one document",
        ),
        ([1, 2], r"blocks has shape \[2\]; valid: \[blocks, 2\]"),
        ([(1, 2, 3)], r"blocks has shape \[1, 3\]"),
        (
            [(1.5, 2)],
            r"blocks is float64 of shape \[1, 2\]; valid: integers of shape \[blocks, 2\], first and last-plus",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused(spans: list, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Documents([5, 0, 7], None, spans)
