"""data.balance: pool: the same curve whether a step is computed by replicas or by one pool of all their ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import Topology
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.step_trace import compare_with_prediction
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_splits import MODELS
from tests.train.test_training import assert_same_curve, curve, tiny, train_here, values

CP2: dict[str, Any] = dict(context_parallel_suite__context_parallel_size=2)
COMMON: dict[str, Any] = dict(train__train_iters=5, train__lr_decay_iters=20, train__global_batch_size=4)
POOL: dict[str, Any] = dict(data__balance="pool", context_parallel_suite__algorithm="hierarchical")
TWO_POOLS: dict[str, Any] = {**POOL, "data__pool_ranks": 2}  # of 4 ranks
#: Pools of a step, in turn; 0: replicas.
ALWAYS, IN_TURN, SEVERAL, ALL_WAYS = [1], [1, 0], [2], [2, 1, 0]
TOLERANCE = 1e-5


def choosing(settings: str, pools: list[int]) -> dict[str, Any]:
    """In a rank: train, with these choices between pools and replicas, again and again."""
    from mindspeed_cp.data import dispatch
    from mindspeed_cp.data.pool import PoolModel

    dispatch.UNEVEN = 0  # one pool of all ranks is always compared with several
    choose, count = PoolModel.choose, 0

    def chosen(self: PoolModel, *given: Any) -> Any:
        nonlocal count
        count += 1
        return replace(choose(self, *given), pools=pools[(count - 1) % len(pools)])

    PoolModel.choose = chosen  # type: ignore[method-assign]
    return train_here(settings)


def pool_curve(fresh_ranks: FreshRanks, settings: Any, ranks: int, pools: list[int]) -> list[dict[str, Any]]:
    outcome: dict[str, Any] = fresh_ranks.run(ranks, choosing, settings.model_dump_json(), pools)[0]
    lines: list[dict[str, Any]] = outcome["lines"]
    expected = [pools[index % len(pools)] for index in range(len(lines))]
    taken = sum(line["pooled"] > 0 for line in lines)
    assert outcome["summary"]["pool"] == [taken, len(lines)]
    assert ranks == 1 or values(lines, "pooled") == expected
    return lines


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """5 steps of 4 rows on one rank, as they come."""
    return curve(fresh_ranks, tiny(corpus, tmp_path_factory.mktemp("one"), **COMMON), 1)


@pytest.mark.parametrize(
    ("pools", "more"),
    [
        pytest.param(ALL_WAYS, {"data__pool_ranks": 2}, id="2 pools, 1 and none in turn, 4 replicas of one rank"),
        pytest.param(IN_TURN, CP2, id="in turn, 2 replicas of 2 ranks"),
    ],
)  # fmt: skip
def test_the_losses_are_those_of_one_rank(
    fresh_ranks: FreshRanks,
    corpus: Path,
    tmp_path: Path,
    reference: list[dict[str, Any]],
    pools: list[int],
    more: dict[str, Any],
) -> None:
    """With proofs of all plans, and attention compared with fp64 in every step."""
    checks: dict[str, Any] = {"context_parallel_suite__verify_plans": True, "train__check_attention_interval": 1}
    settings = tiny(corpus, tmp_path, **COMMON, **POOL, **checks, **more)
    assert_same_curve(pool_curve(fresh_ranks, settings, 4, pools), reference, TOLERANCE)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {
                "train__tensor_model_parallel_size": 2,
                "train__sequence_parallel": True,
                "context_parallel_suite__remap": "hidden",
            },
            id="sequence parallel, hidden states move",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {**CP2, "context_parallel_suite__remap": "hidden", "context_parallel_suite__nodes": 2},
            id="hidden states move between nodes",
        ),
    ],
)
@pytest.mark.thorough
def test_other_parallelism_beside_the_pool(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, reference: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    settings = tiny(corpus, tmp_path, **COMMON, **POOL, **more)
    assert_same_curve(pool_curve(fresh_ranks, settings, 4, IN_TURN), reference, TOLERANCE)


@pytest.mark.thorough  # tests/train/test_balance.py has experts over replicas with other numbers of micro-batches
@pytest.mark.parametrize(
    ("pools", "changes"),
    [
        pytest.param(IN_TURN, {**POOL, **CP2}, id="one pool"),
        pytest.param(ALL_WAYS, TWO_POOLS, id="two pools"),
    ],
)
def test_experts_over_all_replicas(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, pools: list[int], changes: dict[str, Any]
) -> None:
    """An expert-parallel group spans the replicas, whose micro-batches must be equally many in all kinds of steps."""
    model = {**MODELS["experts"], "model__moe_aux_loss_coeff": 0.0, "train__train_iters": 3}
    alone = curve(fresh_ranks, tiny(corpus, tmp_path / "one", **{**COMMON, **model}), 1)
    settings = tiny(corpus, tmp_path / "pool", **{**COMMON, **model}, **changes, train__expert_model_parallel_size=4)
    assert_same_curve(pool_curve(fresh_ranks, settings, 4, pools), alone, TOLERANCE)


@pytest.mark.thorough
def test_a_checkpoint_of_replicas_resumes_under_the_pool_and_back(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    for last, changes, pools in ((2, CP2, ALWAYS), (3, {**CP2, **POOL}, ALWAYS), (4, TWO_POOLS, SEVERAL), (5, CP2, [])):
        settings = tiny(corpus, tmp_path, **{**COMMON, "train__train_iters": last}, **changes)
        lines = fresh_ranks.run(4, choosing, settings.model_dump_json(), pools)[0]["lines"]
    assert_same_curve(lines, reference, TOLERANCE)
    assert values(lines, "pooled") == [0, 0, 1, 2, 0]


def chooses_otherwise(settings: str, odd: int) -> str:
    """In a rank: one rank takes replicas where the others take the pool; return the error of every rank."""
    import torch.distributed as dist

    from mindspeed_cp.data.pool import PoolModel

    choose = PoolModel.choose
    PoolModel.choose = lambda *given: replace(choose(*given), pools=int(dist.get_rank() != odd))  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        train_here(settings)
    return str(caught.value)


def test_rank_that_chooses_other_pools_is_named_before_ranks_wait(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = tiny(corpus, tmp_path, **COMMON, **POOL, **CP2)
    for text in fresh_ranks.run(4, chooses_otherwise, settings.model_dump_json(), 2):
        assert text.startswith("step 1: rank 2 has assigned documents to replicas differently")


@pytest.mark.thorough
def test_traces_of_a_step_on_two_pools_have_the_messages_of_both(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    moves = {"context_parallel_suite__remap": "qkv"}  # rows of equally many tokens, whatever documents are on a rank
    settings = tiny(corpus, tmp_path, **COMMON, **TWO_POOLS, **moves, output__trace_steps=[3])
    fresh_ranks.run(4, choosing, settings.model_dump_json(), SEVERAL)
    (pair,) = compare_with_prediction(tmp_path).pairs
    assert pair.step.metadata["pool"] and pair.step.groups == 2 and pair.step.topology == Topology(1, 2)
    assert (pair.predicted.sent == pair.step.breakdown.sent).all() and pair.step.breakdown.sent.sum() > 0


@pytest.mark.thorough
def test_two_pools_of_eight_ranks_move_hidden_states(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    more = {
        "train__tensor_model_parallel_size": 2,
        "train__sequence_parallel": True,
        "context_parallel_suite__remap": "hidden",
        "data__pool_ranks": 2,
    }
    settings = tiny(corpus, tmp_path, **COMMON, **POOL, **more)
    assert_same_curve(pool_curve(fresh_ranks, settings, 8, ALL_WAYS), reference, TOLERANCE)
