"""Laws of layouts, for any lengths and rank counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import (
    TOKEN_SPAN,
    Documents,
    Layout,
    contiguous,
    from_spans,
    row_zigzag,
    zigzag,
)
from tests.layout.layouts import equal_tokens

lengths = st.lists(st.integers(0, 60), max_size=8)
ranks = st.integers(1, 9)
builders = st.sampled_from([zigzag, contiguous, row_zigzag, equal_tokens])


@given(lengths, ranks, builders)
def test_every_token_is_held_once_in_ascending_order(lengths, ranks, build):
    layout = build(Documents(lengths), ranks)
    layout.check()
    held = [layout.tokens(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(sum(lengths)))
    assert all((np.diff(tokens) > 0).all() for tokens in held)
    assert [len(tokens) for tokens in held] == layout.token_counts.tolist()


@given(lengths, ranks, builders)
def test_unshard_is_the_inverse_of_shard_for_numpy_and_torch(lengths, ranks, build):
    layout = build(Documents(lengths), ranks)
    x = np.random.default_rng(0).standard_normal((sum(lengths), 3))
    assert np.array_equal(layout.unshard([layout.shard(x, rank) for rank in range(ranks)]), x)
    t = torch.from_numpy(x)
    assert torch.equal(layout.unshard([layout.shard(t, rank) for rank in range(ranks)]), t)


@given(lengths, ranks)
def test_zigzag_takes_chunk_i_and_its_mirror(lengths, ranks):
    documents = Documents(lengths)
    layout = zigzag(documents, ranks)
    for rank in range(ranks):
        expected: list[int] = []
        for offset, length in zip(documents.offsets.tolist(), lengths, strict=False):
            for chunk in sorted({rank, 2 * ranks - 1 - rank}):
                expected.extend(
                    range(offset + chunk * length // (2 * ranks), offset + (chunk + 1) * length // (2 * ranks))
                )
        assert layout.tokens(rank).tolist() == expected


@given(lengths, ranks, builders)
def test_positions_agree_with_tokens(lengths, ranks, build):
    documents = Documents(lengths)
    layout = build(documents, ranks)
    for rank in range(ranks):
        tokens = layout.tokens(rank)
        ids = documents.document_of(tokens)
        assert np.array_equal(layout.positions(rank), tokens - documents.offsets[ids])


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
    st.sampled_from([zigzag, contiguous]),
)
def test_groups_keep_documents_on_their_ranks(lengths, ranks, random, build):
    groups = [random.sample(range(ranks), random.randint(1, ranks)) for _ in lengths]
    layout = build(Documents(lengths), ranks, groups)
    layout.check()
    for rank in range(ranks):
        assert set(layout.rank_spans(rank)["doc"].tolist()) <= {
            doc for doc, group in enumerate(groups) if rank in group
        }


def test_shard_and_unshard_are_differentiable():
    layout = zigzag(Documents([7, 0, 5]), 3)
    x = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: layout.unshard([layout.shard(t, rank) for rank in range(3)]), x)


@given(lengths, st.integers(1, 4), st.integers(1, 4))
def test_layouts_that_split_heads_round_trip(lengths, ranks, heads):
    documents = Documents(lengths)
    everything = np.concatenate([zigzag(documents, 1).rank_spans(0)] * ranks)
    everything["rank"] = np.repeat(np.arange(ranks), len(everything) // ranks)
    cuts = np.arange(ranks + 1) * heads // ranks
    layout = Layout(documents, ranks, everything).with_heads(np.stack([cuts[:-1], cuts[1:]], 1))
    layout.check(heads)
    x = np.random.default_rng(0).standard_normal((sum(lengths), heads, 2))
    assert np.array_equal(layout.unshard([layout.shard(x, rank) for rank in range(ranks)], heads), x)


def test_spans_that_touch_become_one():
    spans = np.array([(0, 0, 3, 5), (0, 0, 0, 3), (1, 0, 5, 5), (1, 0, 5, 9)], TOKEN_SPAN)
    layout = from_spans(Documents([9]), 2, spans)
    assert layout.spans.tolist() == [(0, 0, 0, 5), (1, 0, 5, 9)]


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(0, 0, 0, 4), (1, 0, 5, 9)], "token 4"),
        ([(0, 0, 0, 5), (1, 0, 4, 9)], "held by 2 ranks"),
        ([(0, 0, 0, 9), (2, 0, 0, 1)], "does not exist"),
        ([(0, 0, 0, 10), (1, 0, 4, 9)], "leaves its document"),
        ([(0, 0, 4, 9), (0, 0, 0, 4)], "rank 0"),
    ],
)
def test_broken_layouts_are_refused(spans, says):
    with pytest.raises(PlanError, match=says):
        Layout(Documents([9]), 2, np.array(spans, TOKEN_SPAN)).check()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([3, -1], "document 1 has length -1"),
        ([[1, 2]], "integers of one dimension"),
        ([1.5], "lengths is float64"),
        ([2**31], "split longer documents"),
        ([2**30] * 2, "split the batch"),
        ([2**62] * 4, "document 0 has length"),
        (5, r"lengths is int64 of shape \[\]"),
        ([[1], [2, 3]], "NumPy cannot read"),
    ],
)
def test_bad_lengths_are_refused(bad, says):
    with pytest.raises(ConfigError, match=says):
        Documents(bad)


def test_bad_arguments_are_refused():
    documents = Documents([5, 6])
    layout = zigzag(documents, 2)
    with pytest.raises(ConfigError, match="10 rows, but the documents have 11 tokens"):
        layout.shard(np.zeros(10), 0)
    with pytest.raises(ConfigError, match="rank 2 does not exist"):
        layout.shard(np.zeros(11), 2)
    with pytest.raises(ConfigError, match="1 shards for 2 ranks"):
        layout.unshard([np.zeros(5)])
    with pytest.raises(ConfigError, match="shard of rank 1 has 9 rows"):
        layout.unshard([layout.shard(np.zeros(11), 0), np.zeros(9)])
    with pytest.raises(ConfigError, match="ranks is 0"):
        zigzag(documents, 0)
    for doc_ranks in ([[0], []], [[0], [1, 1]], [[0], [2]]):
        with pytest.raises(ConfigError, match="document 1 has ranks"):
            zigzag(documents, 2, doc_ranks)
    with pytest.raises(ConfigError, match="1 entries for 2 documents"):
        zigzag(documents, 2, [[0]])


def test_documents_compare_and_hash_by_their_lengths():
    assert Documents([1, 0, 2]) == Documents(np.array([1, 0, 2], np.int32)) != Documents([1, 2])
    assert len({Documents([4, 4]), Documents([4, 4]), Documents([8])}) == 2
    with pytest.raises(ValueError):
        Documents([1]).lengths[0] = 2


SPLIT = zigzag(Documents([30]), 2).with_heads(np.array([[0, 2], [2, 3]]))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: zigzag(Documents([30]), 3).shard([1] * 30, 0), "shard: x is a list; valid: a numpy array or a torch tensor"),
        (lambda: zigzag(Documents([30]), 3).shard(None, 0), "shard: x is a NoneType; valid"),
        (lambda: zigzag(Documents([30]), 3).shard(np.float64(3), 0), r"shard: x is a float64; valid"),
        (lambda: zigzag(Documents([30]), 3).shard(torch.tensor(3), 0), r"shard: x has shape \[\]; valid: \[tokens, ...\]"),
        (lambda: SPLIT.shard(np.zeros(30), 0), r"shard: x has shape \[30\]; valid: \[tokens, heads, ...\], as this layout"),
        (lambda: zigzag(Documents([30]), 3).shard(np.zeros(30), "0"), "rank '0' does not exist: this layout has ranks 0 to 2"),
        (lambda: zigzag(Documents([30]), 3).shard(np.zeros(30), 1.0), r"rank 1\.0 does not exist"),
        (lambda: zigzag(Documents([30]), 3).shard(np.zeros(30), -1), "rank -1 does not exist"),
        (lambda: zigzag(Documents([30]), 3).positions(None), "rank None does not exist"),
        (lambda: zigzag(Documents([30]), 2).unshard([[0] * 15, [0] * 15]), "unshard: the shard of rank 0 is a list; valid"),
        (lambda: SPLIT.unshard([np.zeros((15, 2)), np.zeros((15, 1))]), "number of heads must be given: None; valid: 3 or more"),
        (lambda: SPLIT.unshard([np.zeros((15, 2)), np.zeros((15, 1))], heads="3"), "must be given: '3'"),
        (lambda: zigzag(Documents([30]), "2"), "ranks is '2'; valid: a whole number, 1 or more"),
        (lambda: contiguous(Documents([30]), 2**80), "1 or more, at most 2147483647"),
    ],
)  # fmt: skip
def test_tensors_of_other_shapes_are_not_sharded(call, says):
    with pytest.raises(ConfigError, match=says):
        call()
