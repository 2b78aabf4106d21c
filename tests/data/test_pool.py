"""The choice between replicas and pools of their ranks: which pool gets which documents, and when a step is on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.data import Dispatcher, DocumentCost, PackedStream, PoolModel
from mindspeed_cp.data.packing import DOC_CHUNK
from mindspeed_cp.data.pool import assign_to_pools
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology
from tests.data.corpora import ListCorpus, law

CONTEXT, RANKS, REPLICAS = 4096, 4, 2
ATTENTION = AttentionConfig(heads=32, kv_heads=8, head_dim=128)
LAYER = LayerCost.for_attention(ATTENTION)


def pool_model(replicas: int = REPLICAS, attention: AttentionConfig = ATTENTION, **options: Any) -> PoolModel:
    topologies = Topology(1, RANKS, "a3"), Topology(1, RANKS * replicas, "a3")
    return PoolModel(*topologies, attention, LAYER, layers=2, options=options)


def dispatcher(replicas: int = REPLICAS, context: int = CONTEXT, **more: Any) -> Dispatcher:
    cost = DocumentCost(load_cluster("a3"), ((ATTENTION, LAYER),) * 2, RANKS, whole_documents=True)
    model = pool_model(replicas)
    return Dispatcher("pool", replicas, context, cost, cost.per_micro_batch, pool=model, **more)


def rows(*lengths: Sequence[int]) -> list[np.ndarray]:
    """Rows of documents of these lengths."""
    result = []
    for number, row in enumerate(lengths):
        chunks = np.zeros(len(row), DOC_CHUNK)
        chunks["document"], chunks["length"] = number * 1000 + np.arange(len(row)), row
        result.append(chunks)
    return result


def test_a_giant_document_beside_short_ones_is_shared_by_the_pool() -> None:
    batch = dispatcher()(rows([4096], [64] * 32))
    assert batch.pooled and batch.imbalance == 1.0
    assert [len(group) for group in batch.micro_batches] == [1, 1]
    assert sorted(batch.micro_batches[0][0].tolist()) == list(range(33))
    static = replace(dispatcher(), balance="time")(rows([4096], [64] * 32))
    assert not static.pooled and static.digest != batch.digest


def test_the_faster_one_by_the_model_is_taken() -> None:
    """Of even replicas too; `seconds` are those of what is taken."""
    model = pool_model()
    for lengths in ([1024] * 8, [4096] * 2, [4096, *[64] * 32], [700, 30, 2000, 1300, 4000]):
        tokens = np.array(lengths)
        half = np.cumsum(tokens) > tokens.sum() / 2
        groups = [[np.flatnonzero(~half)], [np.flatnonzero(half)]]
        pooled = [np.arange(len(tokens))]

        def documents(numbers: np.ndarray, tokens: np.ndarray = tokens) -> Documents:
            return Documents(tokens[numbers])

        static = max(model._simulate(documents, group, model.replica) for group in groups)
        together = model._simulate(documents, pooled, model.pool)
        choice = model.choose(tokens, groups, pooled)
        if max(static, together) > 1.2 * min(static, together):
            assert choice.pools == (together < static), lengths
        assert choice.seconds.shape == (2,) and (choice.seconds > 0).all()
        if choice.pools:
            assert choice.seconds[0] == choice.seconds[1]


def test_near_times_and_windows_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []
    simulate = PoolModel._simulate

    def counted(self: PoolModel, *given: Any) -> float:
        simulated.append(given[2].ranks)
        return simulate(self, *given)

    monkeypatch.setattr(PoolModel, "_simulate", counted)
    lengths, pooled = np.array([4096] * 2), [np.arange(2)]
    groups = [[np.array([0])], [np.array([1])]]
    pool_model().choose(lengths, groups, pooled)
    assert simulated[:2] == [RANKS * 2, RANKS], "the pool, then replicas until one is slower"
    simulated.clear()
    pool_model(attention=replace(ATTENTION, window=(256, 0))).choose(np.array([4096, 64]), groups, pooled)
    assert simulated == [RANKS * 2, RANKS], "the placement model knows no window"
    simulated.clear()
    pool_model().choose(np.array([4096, 64]), groups, pooled)
    assert not simulated, "the estimates are far from each other"


def test_replicas_stay_where_both_are_equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rounding, which may differ between machines."""
    seconds = {RANKS: 1.0, RANKS * REPLICAS: 1.0 - 2.0**-50}
    for name in ("_estimate", "_simulate"):
        monkeypatch.setattr(PoolModel, name, lambda self, lengths, groups, topology: seconds[topology.ranks])
    groups = [[np.array([0])], [np.array([1])]]
    assert not pool_model().choose(np.array([8, 8]), groups, [np.arange(2)]).pools
    seconds[RANKS * REPLICAS] = 0.99
    assert pool_model().choose(np.array([8, 8]), groups, [np.arange(2)]).pools == 1


def test_one_replica_has_no_pool() -> None:
    assert not dispatcher(1)(rows([4096])).pooled


def test_batches_that_neither_pool_nor_replicas_can_plan_raise() -> None:
    lengths = np.array([4096, 64])
    with pytest.raises(ConfigError, match="max_seqlen_per_dp_cp_rank"):
        groups = [[np.array([0])], [np.array([1])]]
        pool_model(max_seqlen_per_dp_cp_rank=16).choose(lengths, groups, [np.arange(2)])


def test_of_ways_that_cannot_be_planned_the_other_is_taken() -> None:
    """A document longer than all ranks of a replica may hold is within what the pool holds."""
    lengths, model = np.array([4096, 64]), pool_model(max_seqlen_per_dp_cp_rank=600)
    choice = model.choose(lengths, [[np.array([0])], [np.array([1])]], [np.arange(2)])
    assert choice.pools == 1 and np.isfinite(choice.seconds).all()
    groups = [[np.array([1]), np.array([2])], [np.array([3])]]  # together they are more than the pool may hold
    choice = model.choose(np.array([0, 2300, 2300, 2300]), groups, [np.arange(1, 4)])
    assert choice.pools == 0 and np.isfinite(choice.seconds).all()


# several pools

FOUR = 4  # replicas


def dispatcher_of_pools(pools: int = 2, **more: Any) -> Dispatcher:
    """4 replicas of 4 ranks, in so many pools."""
    topologies = Topology(1, RANKS, "a3"), Topology(1, RANKS * FOUR, "a3")
    subpool = Topology(1, RANKS * FOUR // pools, "a3")
    model = PoolModel(*topologies, ATTENTION, LAYER, layers=2, subpool=subpool if pools > 1 else None)
    return replace(dispatcher(FOUR), pool=model, **more)


def members(lengths: Sequence[int], pools: int, **more: Any) -> list[list[list[int]]]:
    """Micro-batches of each pool; the work of a document is its square."""
    tokens = np.array(lengths, np.int64)
    assigned = assign_to_pools(tokens, tokens.astype(float) ** 2, pools, FOUR, context=100, **more)
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
        np.array(lengths), np.array([1e6, *[1.0] * 12]), 4, FOUR, context=100, rows=of_rows, equal_counts=True
    )
    assert set(per_row.counts) == {1}
    three = assign_to_pools(
        np.array(lengths * 2),
        np.array([1e6, *[1.0] * 12] * 2),
        2,
        FOUR,
        context=100,
        rows=np.concatenate([of_rows, of_rows + 4]),
        equal_counts=True,
    )
    assert len(set(three.counts)) == 1
    with pytest.raises(ConfigError, match="equal_counts"):
        assign_to_pools(np.array([50]), np.array([1.0]), 2, FOUR, context=100, equal_counts=True)


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
    assigned = assign_to_pools(tokens, work, pools, FOUR, context=48, rows=of_rows)
    of_pools = [assigned.rows(pool) for pool in range(pools)]
    micro_batches = [numbers for rows_of_pool in of_pools for numbers in rows_of_pool]
    assert sorted(np.concatenate(micro_batches).tolist()) == list(range(len(tokens)))
    assert max(int(tokens[numbers].sum()) for numbers in micro_batches) <= 48 * FOUR // pools
    if pools == 1:
        assert len(micro_batches) <= len(lengths) // FOUR
    loads = [sum(work[numbers].sum() for numbers in pool) for pool in of_pools]
    assert max(loads) - min(loads) <= work.max() and all(loads)
    assert assigned.seconds * FOUR / pools == pytest.approx(np.array(loads))


def test_replicas_of_a_pool_have_its_micro_batches() -> None:
    batch = dispatcher_of_pools()(rows([4096], [4096], [64] * 60, [64] * 60))
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
    giant = dispatcher_of_pools(context=65536)(rows([65536], [64] * 4, [64] * 4, [64] * 4))
    assert giant.pools == 1 and giant.imbalance == 1.0
    assert [ranks for ranks, _ in estimated[:2]] == [2 * RANKS, 4 * RANKS] and estimated[1] == (4 * RANKS, 13)
    assert estimated[2] == (RANKS, 1), "the slowest replica; the others do not matter"
    estimated.clear()
    even = dispatcher_of_pools()(rows([4096], [4096], [64] * 60, [64] * 60))
    assert even.pools == 2 and 4 * RANKS not in [ranks for ranks, _ in estimated]


def test_replicas_win_where_they_are_even() -> None:
    batch = dispatcher_of_pools()(rows(*[[1024] * 4] * 4))
    assert batch.pools == 0 and not batch.pooled and len(batch.seconds) == 4
    assert (batch.seconds > 0).all() and len(batch.micro_batches) == 4


def test_seconds_are_those_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are compared slowest first."""
    monkeypatch.setattr(PoolModel, "_estimate", lambda self, given, groups, topology: float(len(groups[0])))
    monkeypatch.setattr(PoolModel, "_simulate", lambda self, given, groups, topology: float(topology.ranks))
    batch = dispatcher_of_pools(1)(rows([4096], [1024] * 4, [2048] * 2, [512] * 8))
    assert batch.pools == 0
    assert batch.seconds.tolist() == [len(groups[0]) for groups in batch.micro_batches]


@pytest.mark.parametrize(
    ("lengths", "pools", "indices"), [([4095, *[63] * 184], 1, [0] * 4), ([4095, 4095, *[63] * 120], 2, [0, 0, 2, 2])]
)
def test_replicas_of_a_pool_read_the_same_rows(lengths: list[int], pools: int, indices: list[int]) -> None:
    corpus = ListCorpus(lengths)
    streams = [PackedStream(corpus, CONTEXT, 1, replica, FOUR) for replica in range(FOUR)]
    batches = [stream.next_batch(FOUR, dispatcher_of_pools(pools)) for stream in streams]
    assert {batch.dispatched.pools for batch in batches} == {pools}
    assert [batch.rows[0].index for batch in batches] == indices, "dropout differs between pools"
    for index in {*indices}:
        of_pool = [batch for batch, own in zip(batches, indices, strict=True) if own == index]
        assert len({batch.content_digest for batch in of_pool}) == 1
        assert all(np.array_equal(batch.rows[0].tokens, of_pool[0].rows[0].tokens) for batch in of_pool)
    assert len({batch.content_digest for batch in batches}) == pools
    assert len({str(stream.state_dict()) for stream in streams}) == 1
