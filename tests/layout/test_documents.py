"""Documents from what programs have instead of lengths."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, documents, ragged_arange

lengths = st.lists(st.integers(0, 60), max_size=8)
positive = st.lists(st.integers(1, 60), max_size=8)
kinds = st.sampled_from([np.asarray, list, lambda x: torch.tensor(np.asarray(x), dtype=torch.int32)])


@given(lengths, kinds)
def test_lengths_and_cu_seqlens_are_inverse(lengths: list[int], kind: Any) -> None:
    expected = Documents(lengths)
    assert Documents.from_lengths(kind(lengths)) == expected
    assert Documents.from_cu_seqlens(kind(expected.offsets.tolist())) == expected


@given(positive, kinds)
def test_positions_show_documents_that_have_tokens(lengths: list[int], kind: Any) -> None:
    positions = ragged_arange(np.zeros(len(lengths), np.int64), np.array(lengths, np.int64)).tolist()
    assert Documents.from_position_ids(kind(positions)) == Documents(lengths)


@given(positive, st.integers(0, 5), kinds)
def test_documents_end_with_their_eod(lengths: list[int], tail: int, kind: Any) -> None:
    tokens = [token for length in lengths for token in [*[7] * (length - 1), 3]]
    expected = [*lengths, *([tail] if tail else [])]
    assert Documents.from_eod(kind(tokens + [7] * tail), 3) == Documents(expected)


@given(st.lists(st.integers(0, 2), max_size=24))
def test_eod_separates_what_a_reset_attention_mask_separates(tokens: list[int]) -> None:
    """Megatron's --reset-attention-mask: what follows an end-of-document token sees neither it nor what is before."""
    size = len(tokens)
    visible = np.tril(np.ones((size, size), bool))
    for i, token in enumerate(tokens):
        if token == 0:
            visible[i + 1 :, : i + 1] = False
    doc = Documents.from_eod(tokens, 0).document_of(np.arange(size))
    assert np.array_equal(visible, np.tril(doc[:, None] == doc))


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_a_row_ends_a_document(rows: int, width: int, data: st.DataObject) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(0, 3), min_size=rows * width, max_size=rows * width)))
    tokens = tokens.reshape(rows, width)
    by_row = [Documents.from_eod(row, 0) for row in tokens]
    expected = Documents(np.concatenate([each.lengths for each in by_row]))
    assert Documents.from_eod(tokens, 0) == expected
    positions = np.concatenate([np.arange(length) for length in expected.lengths]).reshape(rows, width)
    assert Documents.from_position_ids(positions) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents.from_cu_seqlens([]), "cu_seqlens is empty; valid: 0, then the end of each document"),
        (lambda: Documents.from_cu_seqlens([3, 7]), "cu_seqlens starts at 3; valid: 0"),
        (
            lambda: Documents.from_cu_seqlens([0, 7, 3, 9]),
            r"cu_seqlens\[2\] is 3 after 7; valid: 7 or more, the end of",
        ),
        (lambda: Documents.from_cu_seqlens([[0, 7]]), r"cu_seqlens is int64 of shape \[1, 2\]; valid: integers of one"),
        (lambda: Documents.from_cu_seqlens([0.0, 7.0]), "cu_seqlens is float64"),
        (lambda: Documents.from_cu_seqlens(7), r"cu_seqlens is int64 of shape \[\]"),
        (lambda: Documents.from_cu_seqlens([0, 2**31]), "document 0 has length 2147483648; valid"),
        (lambda: Documents.from_lengths([3, -1]), "document 1 has length -1"),
        (lambda: Documents.from_lengths([[3], [1, 2]]), "lengths is a list that NumPy cannot read"),
        (lambda: Documents.from_lengths(torch.empty(3, device="meta")), "lengths is a Tensor that NumPy cannot read"),
        (lambda: Documents.from_eod([1, 2], 0.5), "eod is 0.5; valid: the number of the end-of-document token"),
        (
            lambda: Documents.from_eod(np.zeros((2, 2, 2), int), 0),
            r"tokens is int64 of shape \[2, 2, 2\]; valid: .*row",
        ),
        (lambda: Documents.from_eod([True], 1), "tokens is bool"),
        (lambda: Documents.from_position_ids([1, 2]), r"position_ids\[0\] is 1, the first of a row; valid: 0"),
        (
            lambda: Documents.from_position_ids([0, 1, 3]),
            r"position_ids\[2\] is 3 after 1; valid: 2, the next of its do",
        ),
        (lambda: Documents.from_position_ids([0, -1]), r"position_ids\[1\] is -1 after 0; valid: 1"),
        (lambda: Documents.from_position_ids([[0, 1], [2, 3]]), r"position_ids\[1, 0\] is 2, the first of a row; v"),
        (lambda: Documents.from_position_ids([[0, 1], [0, 2]]), r"position_ids\[1, 1\] is 2 after 0; valid: 1"),
    ],
)
def test_arrays_without_documents_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_examples_are_true() -> None:
    results = doctest.testmod(documents)
    assert (results.failed, results.attempted) == (0, 8)
