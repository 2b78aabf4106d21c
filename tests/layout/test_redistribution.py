"""Moves between layouts: every (token, head) arrives, copies come back to their owner, bytes are what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import Documents, PlanError
from mindspeed_cp.layout import (
    TOKEN_SPAN,
    Layout,
    Redistribution,
    contiguous,
    intersect_runs,
    union_of_runs,
    zigzag,
)
from tests.layout.layouts import equal_tokens

lengths = st.lists(st.integers(0, 40), max_size=6)
SOURCES = (zigzag, contiguous, equal_tokens)


def everything(documents: Documents, ranks: int, ranges: np.ndarray) -> Layout:
    """All tokens on every rank, for some heads."""
    rows = [
        (rank, doc, a, b)
        for rank in range(ranks)
        for doc, (a, b) in enumerate(zip(documents.offsets[:-1], documents.offsets[1:], strict=True))
        if b > a
    ]
    return Layout(documents, ranks, np.array(rows, TOKEN_SPAN)).with_heads(ranges)


def forward(move: Redistribution, x: np.ndarray) -> list[np.ndarray]:
    """Every rank's target rows, moved as the parts say."""
    out = []
    for rank in range(move.target.ranks):
        low, high = move.target.head_range(rank, move.heads)
        out.append(np.full((move.target.token_counts[rank], high - low, *x.shape[2:]), -1.0))
    for part in move.rank_pairs:
        given = move.source.shard(x, part["src"])
        for run in move.runs_of(part):
            rows = given[run["src_row"] : run["src_row"] + run["rows"], part["head"] : part["head"] + part["heads"]]
            out[part["dst"]][run["dst_row"] : run["dst_row"] + run["rows"]] = rows
    return out


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 6), st.integers(1, 7), st.sampled_from(SOURCES), st.randoms())
def test_every_token_and_head_arrives_and_goes_back(lengths, ranks, heads, source, random):
    documents = Documents(lengths)
    ranges = np.array([sorted((random.randint(0, heads), random.randint(0, heads))) for _ in range(ranks)])
    target = everything(documents, ranks, ranges)
    move = Redistribution(source(documents, ranks), target, heads)
    x = np.random.default_rng(0).random((documents.tokens, heads))
    for rank, part in enumerate(forward(move, x)):
        assert np.array_equal(part, target.shard(x, rank))
    times = np.zeros((documents.tokens, heads))
    for part in move.rank_pairs:
        for run in move.runs_of(part):
            tokens = move.source.tokens(part["src"])[run["src_row"] : run["src_row"] + run["rows"]]
            times[tokens, part["head"] : part["head"] + part["heads"]] += 1
    held = [((ranges[:, 0] <= head) & (ranges[:, 1] > head)).sum() for head in range(heads)]
    assert np.array_equal(times, np.tile(held, (len(x), 1)))


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 6), st.sampled_from(SOURCES), st.sampled_from(SOURCES))
def test_whole_rows_move_between_any_two_layouts(lengths, ranks, source, target):
    documents = Documents(lengths)
    move = Redistribution.between(source(documents, ranks), target(documents, ranks), 3)
    if move is None:
        return
    x = np.arange(documents.tokens * 3.0).reshape(-1, 3)
    for rank, part in enumerate(forward(move, x)):
        assert np.array_equal(part, move.target.shard(x, rank))
    assert not move.has_copies


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(2, 6))
def test_what_is_sent_is_what_others_hold(lengths, ranks):
    documents = Documents(lengths)
    edges = np.arange(ranks + 1) * 12 // ranks
    move = Redistribution(
        equal_tokens(documents, ranks), everything(documents, ranks, np.stack([edges[:-1], edges[1:]], 1)), 12
    )
    for adjoint, end in ((False, "src"), (True, "dst")):
        for rank in range(ranks):
            given_parts, got = move.sends_and_receives(rank, adjoint)
            assert (given_parts[end] == rank).all() and (got["src" if end == "dst" else "dst"] == rank).all()
            peers = given_parts["dst" if end == "src" else "src"]
            assert (peers ^ rank == np.sort(peers ^ rank)).all() and rank not in peers
            kept = move.local_pair(rank)
            assert kept is None or kept["src"] == kept["dst"] == rank


def test_equal_layouts_need_no_move():
    documents = Documents([10, 3])
    assert Redistribution.between(zigzag(documents, 3), zigzag(documents, 3), 4) is None


def test_copies_are_told():
    documents = Documents([9])
    for ranges, copies in (([[0, 1], [1, 2]], False), ([[0, 1], [0, 2]], True)):
        move = Redistribution(equal_tokens(documents, 2), everything(documents, 2, np.array(ranges)), 2)
        assert move.has_copies is copies


def test_a_source_that_splits_heads_is_refused():
    documents = Documents([9])
    split = everything(documents, 2, np.array([[0, 1], [1, 2]]))
    with pytest.raises(PlanError, match="the source splits heads"):
        Redistribution(split, equal_tokens(documents, 2), 2)
    with pytest.raises(PlanError, match="different ranks or documents"):
        Redistribution(equal_tokens(documents, 3), split, 2)


runs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8).map(
    lambda pairs: np.array([(a, a + n) for a, n in pairs], np.int64).reshape(-1, 2)
)


@settings(max_examples=300, deadline=None)
@given(runs, runs)
def test_runs_are_merged_and_overlapped_like_sets(a, b):
    def numbers(runs: np.ndarray) -> set[int]:
        return {n for first, last in runs.tolist() for n in range(first, last)}

    union_a, other = union_of_runs(a), union_of_runs(b)
    assert numbers(union_a) == numbers(a) and (union_a[1:, 0] > union_a[:-1, 1]).all()
    i, j, first, last = intersect_runs(union_a[:, 0], union_a[:, 1], other[:, 0], other[:, 1])
    assert numbers(np.stack([first, last], 1)) == numbers(a) & numbers(b) and (last > first).all()
    assert ((union_a[i, 0] <= first) & (last <= union_a[i, 1]) & (other[j, 0] <= first) & (last <= other[j, 1])).all()
