"""Documents of a step on several pools of whole replicas: which pool gets which, and when a step is on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.data import Dispatcher, PackedStream, PoolModel
from mindspeed_cp.data.pool import assign_to_pools
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Topology
from tests.data.corpora import ListCorpus, law
from tests.data.test_pool import ATTENTION, CONTEXT, LAYER, RANKS, rows
from tests.data.test_pool import dispatcher as dispatcher_of_one_pool

REPLICAS = 4


def dispatcher(pools: int = 2, **more: Any) -> Dispatcher:
    """4 replicas of 4 ranks, in so many pools."""
    topologies = Topology(1, RANKS, "a3"), Topology(1, RANKS * REPLICAS, "a3")
    subpool = Topology(1, RANKS * REPLICAS // pools, "a3")
    model = PoolModel(*topologies, ATTENTION, LAYER, layers=2, subpool=subpool if pools > 1 else None)
    return replace(dispatcher_of_one_pool(REPLICAS), pool=model, **more)


def members(lengths: Sequence[int], pools: int, **more: Any) -> list[list[list[int]]]:
    """Micro-batches of each pool; the work of a document is its square."""
    tokens = np.array(lengths, np.int64)
    assigned = assign_to_pools(tokens, tokens.astype(float) ** 2, pools, REPLICAS, context=100, **more)
    return [[numbers.tolist() for numbers in assigned.rows(pool)] for pool in range(pools)]


def test_pools_get_equal_work_not_equal_tokens() -> None:
    assert sorted(members([80, 40, 40, 40, 40], 2)) == [[[0]], [[1, 2, 3, 4]]]


def test_fewer_documents_than_pools_leave_pools_empty() -> None:
    assert members([50], 2) == [[[0]], []] and members([], 4) == [[], [], [], []]


def test_no_pool_is_empty_where_every_replica_has_a_row() -> None:
    """However long one document is: experts, and the schedule of stages, need work on every rank."""
    of_rows = np.array([0, 1, 2, 3])
    assert all(members([100, 1, 1, 1], 4, rows=of_rows)) and all(members([100, 1, 1, 1], 2, rows=of_rows))


def test_equal_counts_give_every_pool_as_many_micro_batches() -> None:
    """A pool of one replica has room for 100 tokens: 100 of one document, or 11 of 20."""
    lengths, of_rows = [100, *[20] * 12], np.array([0, *[1] * 5, *[2] * 5, *[3] * 2])
    per_row = assign_to_pools(
        np.array(lengths), np.array([1e6, *[1.0] * 12]), 4, REPLICAS, context=100, rows=of_rows, equal_counts=True
    )
    assert set(per_row.counts) == {1}
    three = assign_to_pools(
        np.array(lengths * 2),
        np.array([1e6, *[1.0] * 12] * 2),
        2,
        REPLICAS,
        context=100,
        rows=np.concatenate([of_rows, of_rows + 4]),
        equal_counts=True,
    )
    assert len(set(three.counts)) == 1
    with pytest.raises(ConfigError, match="equal_counts"):
        assign_to_pools(np.array([50]), np.array([1.0]), 2, REPLICAS, context=100, equal_counts=True)


@law
@given(
    st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=6), min_size=4, max_size=8).filter(
        lambda x: len(x) % 4 == 0
    ),
    st.sampled_from([1, 2, 4]),
)
def test_every_document_is_in_one_micro_batch_of_one_pool(lengths: list[list[int]], pools: int) -> None:
    tokens = np.array([length for row in lengths for length in row])
    of_rows = np.repeat(np.arange(len(lengths)), [len(row) for row in lengths])
    work = tokens.astype(float) ** 2
    assigned = assign_to_pools(tokens, work, pools, REPLICAS, context=48, rows=of_rows)
    of_pools = [assigned.rows(pool) for pool in range(pools)]
    micro_batches = [numbers for rows_of_pool in of_pools for numbers in rows_of_pool]
    assert sorted(np.concatenate(micro_batches).tolist()) == list(range(len(tokens)))
    assert max(int(tokens[numbers].sum()) for numbers in micro_batches) <= 48 * REPLICAS // pools
    loads = [sum(work[numbers].sum() for numbers in pool) for pool in of_pools]
    assert max(loads) - min(loads) <= work.max() and all(loads)
    assert assigned.seconds * REPLICAS / pools == pytest.approx(np.array(loads))


def test_replicas_of_a_pool_have_its_micro_batches() -> None:
    batch = dispatcher()(rows([4096], [4096], [64] * 60, [64] * 60))
    assert batch.pools == 2 and batch.pooled
    first, second = batch.micro_batches[0][0], batch.micro_batches[2][0]
    assert all(np.array_equal(batch.micro_batches[i][0], first) for i in (0, 1))
    assert all(np.array_equal(batch.micro_batches[i][0], second) for i in (2, 3))
    assert sorted([*first, *second]) == list(range(122)) and len({0, 1} & set(first.tolist())) == 1
    assert batch.imbalance == pytest.approx(1, abs=1e-3)
    digests = {replace(batch, pools=pools).digest for pools in (0, 1, 2)}
    assert len(digests) == 3


def test_one_pool_is_compared_where_a_document_exceeds_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is taken: two pools last as long as the document on half of the ranks."""
    estimated: list[tuple[int, int]] = []
    estimate = PoolModel._estimate

    def counted(self: PoolModel, documents: Any, groups: Any, topology: Topology) -> float:
        estimated.append((topology.ranks, sum(map(len, groups))))
        return estimate(self, documents, groups, topology)

    monkeypatch.setattr(PoolModel, "_estimate", counted)
    giant = dispatcher(context=65536)(rows([65536], [64] * 4, [64] * 4, [64] * 4))
    assert giant.pools == 1 and giant.imbalance == 1.0
    assert [ranks for ranks, _ in estimated[:2]] == [2 * RANKS, 4 * RANKS] and estimated[1] == (4 * RANKS, 13)
    assert estimated[2] == (RANKS, 1), "the slowest replica; the others do not matter"
    estimated.clear()
    even = dispatcher()(rows([4096], [4096], [64] * 60, [64] * 60))
    assert even.pools == 2 and 4 * RANKS not in [ranks for ranks, _ in estimated]


def test_replicas_win_where_they_are_even() -> None:
    batch = dispatcher()(rows(*[[1024] * 4] * 4))
    assert batch.pools == 0 and not batch.pooled and len(batch.seconds) == 4
    assert (batch.seconds > 0).all() and len(batch.micro_batches) == 4


def test_seconds_are_those_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are compared slowest first."""
    monkeypatch.setattr(PoolModel, "_estimate", lambda self, given, groups, topology: float(len(groups[0])))
    monkeypatch.setattr(PoolModel, "_simulate", lambda self, given, groups, topology: float(topology.ranks))
    batch = dispatcher(1)(rows([4096], [1024] * 4, [2048] * 2, [512] * 8))
    assert batch.pools == 0
    assert batch.seconds.tolist() == [len(groups[0]) for groups in batch.micro_batches]


def test_replicas_of_a_pool_read_the_same_rows() -> None:
    corpus = ListCorpus([4095, 4095, *[63] * 120])
    streams = [PackedStream(corpus, CONTEXT, 1, replica, REPLICAS) for replica in range(REPLICAS)]
    batches = [stream.next_batch(REPLICAS, dispatcher()) for stream in streams]
    assert {batch.dispatched.pools for batch in batches} == {2}
    digests = [batch.content_digest for batch in batches]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert [batch.rows[0].index for batch in batches] == [0, 0, 2, 2], "dropout differs between pools"
    assert len({str(stream.state_dict()) for stream in streams}) == 1
