"""The choice between replicas and one pool of their ranks, and which documents are in which of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.data.balance import DocumentCost
from mindspeed_cp.data.dispatch import Dispatcher, PoolChoice, PoolModel
from mindspeed_cp.data.stream import DOC_CHUNK, PackedStream
from mindspeed_cp.errors import ConfigError
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
        static = max(model._simulate(tokens, group, model.replica) for group in groups)
        together = model._simulate(tokens, pooled, model.pool)
        choice = model.choose(tokens, groups, pooled)
        if max(static, together) > 1.2 * min(static, together):
            assert choice.pooled == (together < static), lengths
        assert choice.seconds.shape == (2,) and (choice.seconds > 0).all()
        if choice.pooled:
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
    assert not pool_model().choose(np.array([8, 8]), groups, [np.arange(2)]).pooled
    seconds[RANKS * REPLICAS] = 0.99
    assert pool_model().choose(np.array([8, 8]), groups, [np.arange(2)]).pooled


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
    assert choice.pooled and np.isfinite(choice.seconds).all()
    groups = [[np.array([1]), np.array([2])], [np.array([3])]]  # together they are more than the pool may hold
    choice = model.choose(np.array([0, 2300, 2300, 2300]), groups, [np.arange(1, 4)])
    assert not choice.pooled and np.isfinite(choice.seconds).all()


@law
@given(
    st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=6), min_size=4, max_size=8).filter(
        lambda x: len(x) % 4 == 0
    )
)
def test_every_document_is_in_one_micro_batch_of_the_pool(lengths: list[list[int]]) -> None:
    """Which has room for the tokens of all four replicas."""

    def take_pool(self: PoolModel, lengths: np.ndarray, replicas: Any, pooled: Any) -> PoolChoice:
        return PoolChoice(True, np.ones(4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoolModel, "choose", take_pool)
        batch = Dispatcher("pool", 4, 48, lambda tokens: tokens.astype(float) ** 2, pool=pool_model(4))(rows(*lengths))
    [*micro_batches] = batch.micro_batches[0]
    tokens = batch.chunks["length"]
    assert sorted(np.concatenate(micro_batches).tolist()) == list(range(len(tokens)))
    assert max(int(tokens[numbers].sum()) for numbers in micro_batches) <= 48 * 4
    assert len(micro_batches) <= len(lengths) // 4


def test_replicas_win_where_they_are_even() -> None:
    batch = dispatcher(4)(rows(*[[1024] * 4] * 4))
    assert not batch.pooled and len(batch.seconds) == 4
    assert (batch.seconds > 0).all() and len(batch.micro_batches) == 4


def test_seconds_are_those_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are compared slowest first."""
    monkeypatch.setattr(PoolModel, "_estimate", lambda self, lengths, groups, topology: float(len(groups[0])))
    monkeypatch.setattr(PoolModel, "_simulate", lambda self, lengths, groups, topology: float(topology.ranks))
    batch = dispatcher(4)(rows([4096], [1024] * 4, [2048] * 2, [512] * 8))
    assert not batch.pooled
    assert batch.seconds.tolist() == [len(groups[0]) for groups in batch.micro_batches]


def test_replicas_of_the_pool_read_the_same_rows() -> None:
    corpus = ListCorpus([4095, *[63] * 184])
    streams = [PackedStream(corpus, CONTEXT, 1, replica, 4) for replica in range(4)]
    batches = [stream.next_batch(4, dispatcher(4)) for stream in streams]
    assert all(batch.pooled for _, batch in batches)
    assert {made[0].index for made, _ in batches} == {0}, "by which weights are dropped"
    assert all(np.array_equal(made[0].tokens, batches[0][0][0].tokens) for made, _ in batches)
    assert len({str(stream.state_dict()) for stream in streams}) == 1
