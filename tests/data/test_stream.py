"""Streams of packed rows: the laws that training relies on."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.data import stream as stream_module
from mindspeed_cp.data.corpus import EOD, VOCAB_SIZE, open_corpus
from mindspeed_cp.data.dispatch import Dispatcher
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.errors import ConfigError
from tests.data.corpora import ListCorpus, epoch_of, first_epoch, law, same

corpora = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any).map(ListCorpus)
contexts = st.integers(2, 24)
seeds = st.integers(0, 3)
lookaheads = st.integers(1, 12)


def stream_of(corpus: ListCorpus, context: int, seed: int, *replicas: int, lookahead: int) -> PackedStream:
    """A stream whose rows are filled from few chunks, so that short corpora show every case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "LOOKAHEAD", lookahead)
        return PackedStream(corpus, context, seed, *replicas)


@law
@given(corpora, contexts, seeds, lookaheads)
def test_every_token_of_every_document_appears_exactly_once_per_epoch(
    corpus: ListCorpus, context: int, seed: int, lookahead: int
) -> None:
    stream = stream_of(corpus, context, seed, lookahead=lookahead)
    seen: list[Counter[int]] = [Counter(), Counter()]
    row = next(stream)
    while epoch_of(stream) < 2:
        seen[epoch_of(stream)].update(row.tokens.tolist())
        row = next(stream)
    assert seen == [corpus.all_tokens(), corpus.all_tokens()]


@law
@given(corpora, contexts, seeds)
def test_a_row_is_whole_documents_of_at_most_the_context(corpus: ListCorpus, context: int, seed: int) -> None:
    for number, row in enumerate(first_epoch(PackedStream(corpus, context, seed))):
        assert row.index == number
        assert 0 < len(row.tokens) == row.documents.tokens <= context
        for start, stop in zip(row.documents.offsets[:-1], row.documents.offsets[1:], strict=True):
            document, first = divmod(int(row.tokens[start]), 10**6)
            length = int(corpus.lengths[document])
            assert row.tokens[start:stop].tolist() == corpus.tokens(document, first, first + stop - start).tolist()
            if length <= context:
                assert (first, stop - start) == (0, length)  # a document that fits is never cut
            else:
                assert first % context == 0 and stop - start == min(context, length - first)


@law
@given(corpora, contexts, seeds)
def test_labels_are_the_next_token_of_the_same_document_and_the_last_one_has_no_loss(
    corpus: ListCorpus, context: int, seed: int
) -> None:
    for row in first_epoch(PackedStream(corpus, context, seed)):
        assert row.tokens.dtype == row.labels.dtype == np.int64 and row.loss_mask.dtype == np.float32
        assert row.tokens.shape == row.labels.shape == row.loss_mask.shape
        last = set((row.documents.offsets[1:] - 1).tolist())
        for i in range(len(row.tokens)):
            assert row.loss_mask[i] == (i not in last)
            assert row.labels[i] == (EOD if i in last else row.tokens[i + 1])


@law
@given(corpora, contexts, seeds, st.integers(1, 5))
def test_the_rows_do_not_depend_on_the_number_of_replicas(
    corpus: ListCorpus, context: int, seed: int, replicas: int
) -> None:
    alone = list(islice(PackedStream(corpus, context, seed), 6 * replicas))
    streams = [PackedStream(corpus, context, seed, replica, replicas) for replica in range(replicas)]
    together = [next(stream) for _ in range(6) for stream in streams]
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    assert all(stream.state_dict() == streams[0].state_dict() for stream in streams)


@law
@given(corpora, contexts, seeds, lookaheads, st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_a_stream_goes_on_exactly_at_any_point_and_with_any_number_of_replicas(
    corpus: ListCorpus, context: int, seed: int, lookahead: int, rows: int, before: int, after: int
) -> None:
    saved = stream_of(corpus, context, seed, before - 1, before, lookahead=lookahead)
    for _ in range(rows):
        next(saved)
    state = json.loads(json.dumps(saved.state_dict()))
    alone = stream_of(corpus, context, seed, lookahead=lookahead)
    expected = list(islice(alone, rows * before, rows * before + 3 * after))
    for replica in range(after):
        resumed = stream_of(corpus, context, seed, replica, after, lookahead=lookahead)
        next(resumed)  # what it did before must not matter
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for row, want in zip(islice(resumed, 3), expected[replica::after], strict=True):
            assert same(row, want)
    assert resumed.state_dict() == alone.state_dict()


def test_the_standard_library_packs_well_and_keeps_inside_the_vocabulary() -> None:
    stream = PackedStream(open_corpus("stdlib"), 8192, seed=0)
    rows = list(islice(stream, 50))
    for row in rows:
        assert row.tokens.min() >= 0 and row.tokens.max() < VOCAB_SIZE
        assert row.labels.min() >= 0 and row.labels.max() < VOCAB_SIZE
    assert sum(len(row.tokens) for row in rows) > 0.97 * 50 * 8192


# --- bad input --------------------------------------------------------------------------------------------------------


def test_state_of_another_corpus_is_refused() -> None:
    state = PackedStream(ListCorpus([5, 6]), 8, 0).state_dict()
    with pytest.raises(ConfigError, match=r"data\.corpus: has other documents than the saved run had"):
        PackedStream(ListCorpus([5, 7]), 8, 0).load_state_dict(state)


# --- whole global batches ---------------------------------------------------------------------------------------------


def by_square(lengths: np.ndarray) -> np.ndarray:
    return lengths * lengths.astype(np.float64)


def dispatcher_for(
    replicas: int, context: int, balance: str = "time", keeps_document_numbers: bool = False
) -> Dispatcher:
    return Dispatcher(balance, replicas, context, by_square, 1.0, keeps_document_numbers=keeps_document_numbers)


@law
@given(corpora, contexts, seeds, st.integers(1, 3), st.integers(1, 3))
def test_a_batch_of_rows_in_turn_is_those_rows(
    corpus: ListCorpus, context: int, seed: int, replicas: int, each: int
) -> None:
    for replica in range(replicas):
        stream, same_stream = (PackedStream(corpus, context, seed, replica, replicas) for _ in range(2))
        for _ in range(3):
            rows, _ = stream.next_batch(replicas * each, dispatcher_for(replicas, context, "none"))
            assert all(same(a, b) for a, b in zip(rows, islice(same_stream, each), strict=True))
            assert stream.state_dict() == same_stream.state_dict()
            assert [row.dropout_stream_id for row in rows] == [row.index for row in rows]


@law
@given(corpora, contexts, seeds, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_no_token_leaves_its_global_batch(
    corpus: ListCorpus, context: int, seed: int, replicas: int, each: int, keeps_document_numbers: bool
) -> None:
    rows = replicas * each
    alone = PackedStream(corpus, context, seed)
    streams = [PackedStream(corpus, context, seed, replica, replicas) for replica in range(replicas)]
    for _ in range(4):
        before = Counter(token for row in islice(alone, rows) for token in row.tokens.tolist())
        batches = [
            stream.next_batch(rows, dispatcher_for(replicas, context, "time", keeps_document_numbers))
            for stream in streams
        ]
        dispatched = [row for of_replica, _ in batches for row in of_replica]
        assert Counter(token for row in dispatched for token in row.tokens.tolist()) == before
        assert all(of_replica for of_replica, _ in batches), "no replica is without a micro-batch"
        assert all(0 < len(row.tokens) == row.documents.tokens <= context for row in dispatched)
        assert len({batch.digest for _, batch in batches}) == 1
        assert all(stream.state_dict() == alone.state_dict() for stream in streams)
        if keeps_document_numbers:
            assert (
                len({row.dropout_stream_id for row in dispatched})
                == len({len(row.documents) for row in dispatched})
                == 1
            )
            lengths = np.sum([row.documents.lengths for row in dispatched], axis=0)
            assert np.array_equal(lengths, batches[0][1].chunks["length"])
        for row in dispatched:
            last = set((row.documents.offsets[1:][row.documents.lengths > 0] - 1).tolist())
            assert [i for i in range(len(row.tokens)) if not row.loss_mask[i]] == sorted(last)
            assert all(row.labels[i] == (EOD if i in last else row.tokens[i] + 1) for i in range(len(row.tokens))), (
                "labels follow their documents"
            )


@law
@given(corpora, contexts, st.integers(0, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_batches_go_on_exactly_and_with_any_number_of_replicas(
    corpus: ListCorpus, context: int, batches: int, before: int, after: int
) -> None:
    saved, alone = PackedStream(corpus, context, 0, before - 1, before), PackedStream(corpus, context, 0)
    for _ in range(batches):
        saved.next_batch(4, dispatcher_for(before, context))
        alone.next_batch(4, dispatcher_for(1, context))
    state = json.loads(json.dumps(saved.state_dict()))
    expected = Counter(t for row in alone.next_batch(4, dispatcher_for(1, context))[0] for t in row.tokens.tolist())
    counts: Counter[int] = Counter()
    for replica in range(after):
        resumed = PackedStream(corpus, context, 0, replica, after)
        resumed.load_state_dict(state)
        for row in resumed.next_batch(4, dispatcher_for(after, context))[0]:
            counts.update(row.tokens.tolist())
        assert resumed.state_dict() == alone.state_dict()
    assert counts == expected
