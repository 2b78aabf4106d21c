"""Byte tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.data import EOD, VOCAB_SIZE, detokenize, tokenize
from tests.data.corpora import law


@law
@given(st.binary(max_size=300))
def test_detokenize_is_the_inverse_of_tokenize(content: bytes) -> None:
    tokens = tokenize(content)
    assert tokens.dtype == np.int64 and len(tokens) == len(content) + 1 and tokens[-1] == EOD
    assert detokenize(tokens) == content


def test_every_byte_and_eod_have_their_own_token_below_the_vocabulary_size() -> None:
    tokens = tokenize(bytes(range(256)))
    assert sorted(tokens.tolist()) == list(range(VOCAB_SIZE))


def test_without_end_there_is_no_eod() -> None:
    assert tokenize(b"if", end=False).tolist() == [105, 102]
    assert tokenize(b"", end=False).tolist() == []
    assert tokenize(b"").tolist() == [EOD]
