"""data.balance: pool: the same curve whether a step is computed by replicas or by one pool of all their ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.errors import ConfigError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_splits import MODELS
from tests.train.test_training import assert_same_curve, curve, tiny, train_here, values

CP2: dict[str, Any] = dict(context_parallel_suite__context_parallel_size=2)
COMMON: dict[str, Any] = dict(train__train_iters=5, train__lr_decay_iters=20, train__global_batch_size=4)
POOL: dict[str, Any] = dict(data__balance="pool", context_parallel_suite__algorithm="hierarchical")
#: Whether steps are pooled, in turn.
ALWAYS, IN_TURN = [True], [True, False]
TOLERANCE = 1e-5


def choosing(settings: str, pooled: list[bool]) -> dict[str, Any]:
    """In a rank: train, with these choices between the pool and replicas, again and again."""
    from mindspeed_cp.data.dispatch import PoolModel

    choose, count = PoolModel.choose, 0

    def chosen(self: PoolModel, *given: Any) -> Any:
        nonlocal count
        count += 1
        return replace(choose(self, *given), pooled=pooled[(count - 1) % len(pooled)])

    PoolModel.choose = chosen  # type: ignore[method-assign]
    return train_here(settings)


def pool_curve(fresh_ranks: FreshRanks, settings: Any, ranks: int, pooled: list[bool]) -> list[dict[str, Any]]:
    outcome: dict[str, Any] = fresh_ranks.run(ranks, choosing, settings.model_dump_json(), pooled)[0]
    lines: list[dict[str, Any]] = outcome["lines"]
    expected = [pooled[index % len(pooled)] for index in range(len(lines))]
    assert outcome["summary"]["pooled_steps"] == sum(line["pooled"] for line in lines)
    assert ranks == 1 or values(lines, "pooled") == expected
    return lines


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """5 steps of 4 rows on one rank, as they come."""
    return curve(fresh_ranks, tiny(corpus, tmp_path_factory.mktemp("one"), **COMMON), 1)


def test_the_losses_are_those_of_one_rank(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    """With proofs of all plans, and attention compared with fp64 in every step."""
    checks: dict[str, Any] = {"context_parallel_suite__verify_plans": True, "train__check_attention_interval": 1}
    settings = tiny(corpus, tmp_path, **COMMON, **POOL, **checks, **CP2)
    assert_same_curve(pool_curve(fresh_ranks, settings, 4, IN_TURN), reference, TOLERANCE)


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
def test_experts_over_all_replicas(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """An expert-parallel group spans the replicas, whose micro-batches must be equally many in all kinds of steps."""
    model = {**MODELS["experts"], "model__moe_aux_loss_coeff": 0.0, "train__train_iters": 3}
    alone = curve(fresh_ranks, tiny(corpus, tmp_path / "one", **{**COMMON, **model}), 1)
    settings = tiny(
        corpus, tmp_path / "pool", **{**COMMON, **model}, **POOL, **CP2, train__expert_model_parallel_size=4
    )
    assert_same_curve(pool_curve(fresh_ranks, settings, 4, IN_TURN), alone, TOLERANCE)


@pytest.mark.thorough
def test_a_checkpoint_of_replicas_resumes_under_the_pool_and_back(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    for last, changes in ((2, CP2), (3, {**CP2, **POOL}), (4, POOL), (5, CP2)):
        settings = tiny(corpus, tmp_path, **{**COMMON, "train__train_iters": last}, **changes)
        lines = fresh_ranks.run(4, choosing, settings.model_dump_json(), ALWAYS)[0]["lines"]
    assert_same_curve(lines, reference, TOLERANCE)
    assert values(lines, "pooled") == [False, False, True, True, False]


def chooses_otherwise(settings: str, odd: int) -> str:
    """In a rank: one rank takes replicas where the others take the pool; return the error of every rank."""
    import torch.distributed as dist

    from mindspeed_cp.data.dispatch import PoolModel

    choose = PoolModel.choose
    PoolModel.choose = lambda *given: replace(choose(*given), pooled=dist.get_rank() != odd)  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as caught:
        train_here(settings)
    return str(caught.value)


def test_rank_that_chooses_other_pools_is_named_before_ranks_wait(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = tiny(corpus, tmp_path, **COMMON, **POOL, **CP2)
    for text in fresh_ranks.run(4, chooses_otherwise, settings.model_dump_json(), 2):
        assert text.startswith("step 1: rank 2 and the others of 4 assigned documents to replicas differently")
