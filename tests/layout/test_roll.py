"""Rolls by k inside documents against a plain loop over tokens, for any layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import Documents, PlanError
from mindspeed_cp.layout import Layout, Roll, contiguous, equal_token_layout, row_zigzag, zigzag
from tests.layout.layouts import equal_tokens

lengths = st.lists(st.integers(0, 30), max_size=6)
LAYOUTS = (zigzag, contiguous, equal_tokens, row_zigzag)


def dense_roll(x: np.ndarray, documents: Documents, shift: int, fill: float) -> np.ndarray:
    """Roll the whole row, token by token."""
    out = np.full_like(x, fill)
    for first, last in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        for token in range(first, last):
            if first <= token + shift < last:
                out[token] = x[token + shift]
    return out


def rolled(roll: Roll, x: np.ndarray, fill: float) -> list[np.ndarray]:
    """Roll the shards of all ranks as the lists of rows say."""
    layout, move = roll.layout, roll.redistribution
    out = [np.full_like(layout.shard(x, rank), fill) for rank in range(layout.ranks)]
    for pair in move.rank_pairs:
        given_rows = layout.shard(x, int(pair["src"]))[roll.source_rows(int(pair["src"]))]
        target = roll.target_rows(int(pair["dst"]))
        for run in move.runs_of(pair):
            rows = target[run["dst_row"] : run["dst_row"] + run["rows"]]
            out[pair["dst"]][rows] = given_rows[run["src_row"] : run["src_row"] + run["rows"]]
    return out


def documents_on_ranks(documents: Documents, ranks: int, numbers: list[int]) -> Layout:
    """Give each document to few ranks, as balanced layouts do."""
    return zigzag(documents, ranks, [sorted({(n + i) % ranks for i in range(1 + n % 3)}) for n in numbers])


@settings(max_examples=300, deadline=None)
@given(lengths, st.integers(1, 6), st.integers(-4, 4), st.sampled_from(LAYOUTS))
def test_every_row_gets_the_row_of_the_same_document(lengths, ranks, shift, layout):
    documents = Documents(lengths)
    x = np.arange(1.0, documents.tokens + 1)
    roll = Roll(layout(documents, ranks), shift)
    assert np.array_equal(roll.layout.unshard(rolled(roll, x, -7.0)), dense_roll(x, documents, shift, -7.0))


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 6), st.integers(1, 5), st.data())
def test_documents_on_few_ranks_and_linear_layouts(lengths, ranks, shift, data):
    documents = Documents(lengths)
    numbers = data.draw(st.lists(st.integers(0, 11), min_size=len(lengths), max_size=len(lengths)))
    attention = documents_on_ranks(documents, ranks, numbers)
    x = np.arange(1.0, documents.tokens + 1)
    for layout in (attention, equal_token_layout(attention, 1)):
        roll = Roll(layout, shift)
        assert np.array_equal(layout.unshard(rolled(roll, x, 0.0)), dense_roll(x, documents, shift, 0.0))


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(-4, 4), st.sampled_from(LAYOUTS))
def test_the_adjoint_is_the_roll_back(lengths, ranks, shift, layout):
    documents = Documents(lengths)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-9, 10, documents.tokens).astype(float) for _ in range(2))
    forward, backward = (Roll(layout(documents, ranks), number) for number in (shift, -shift))
    there, back = (roll.layout.unshard(rolled(roll, values, 0.0)) for roll, values in ((forward, x), (backward, y)))
    assert there @ y == x @ back


def test_few_rows_leave_their_rank():
    """Only the first rows behind each border of a rank's chunks travel, 2 borders for each rank."""
    documents = Documents([64, 64])
    for ranks in (2, 4):
        for shift in (1, 2):
            sent = Roll(zigzag(documents, ranks), shift).redistribution.remote_pairs["rows"]
            assert sent.sum() == 2 * (2 * ranks - 2) * shift


def test_a_layout_that_splits_heads_is_refused():
    layout = zigzag(Documents([8]), 2).with_heads(np.array([[0, 1], [1, 2]]))
    with pytest.raises(PlanError, match="roll: the layout splits heads"):
        Roll(layout, 1)
