"""Training with pipeline stages: the curve of one rank, for both schedules and after a change of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, values

CP, TP = "context_parallel_suite__context_parallel_size", "train__tensor_model_parallel_size"
PP, VPP = "train__pipeline_model_parallel_size", "train__virtual_pipeline_model_parallel_size"
STEPS = 4


def pipelined(corpus: Path, folder: Path, steps: int = STEPS, **changes: Any) -> Settings:
    """Four layers, and micro-batches enough to fill two stages."""
    common = {"train__train_iters": steps, "train__lr_decay_iters": 20, "train__global_batch_size": 4}
    return tiny(corpus, folder, **{"model__num_layers": 4, **common, **changes})


@pytest.fixture(scope="module")
def one_rank(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of one rank."""
    return curve(fresh_ranks, pipelined(corpus, tmp_path_factory.mktemp("one")), 1)


def assert_equal(lines: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    for key in ("step", "tokens", "documents", "lr"):
        assert values(lines, key) == values(reference, key), key
    for key in ("loss", "grad_norm"):
        assert values(lines, key) == pytest.approx(values(reference, key), rel=1e-5), key


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(4, {PP: 2, CP: 2, "model__untie_embeddings_and_output_weights": False}, id="pp2-cp2"),
        pytest.param(2, {PP: 2, VPP: 2}, id="pp2-vpp2"),
        pytest.param(4, {PP: 2, VPP: 2, CP: 2}, id="pp2-vpp2-cp2", marks=pytest.mark.thorough),
        pytest.param(4, {PP: 4}, id="pp4", marks=pytest.mark.thorough),
        pytest.param(8, {PP: 4, CP: 2}, id="pp4-cp2", marks=pytest.mark.thorough),
        pytest.param(8, {PP: 2, CP: 2, TP: 2}, id="pp2-cp2-tp2", marks=pytest.mark.thorough),
        pytest.param(
            8, {PP: 2, VPP: 2, CP: 2, TP: 2, "train__sequence_parallel": True}, id="pp2-vpp2-cp2-tp2-sp",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            4, {PP: 2, "train__use_distributed_optimizer": True}, id="pp2-dp2", marks=pytest.mark.thorough
        ),
        pytest.param(
            2, {PP: 2, "train__check_attention_interval": 1, "context_parallel_suite__verify_plans": True},
            id="pp2-checks", marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_losses_are_those_of_one_stage(
    fresh_ranks: FreshRanks,
    corpus: Path,
    tmp_path: Path,
    one_rank: list[dict[str, Any]],
    ranks: int,
    changes: dict[str, Any],
) -> None:
    assert_equal(curve(fresh_ranks, pipelined(corpus, tmp_path, **changes), ranks), one_rank)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model__untie_embeddings_and_output_weights": True}, id="untied"),
        pytest.param({"context_parallel_suite__algorithm": "hierarchical", CP: 2}, id="hierarchical"),
        pytest.param({"model__num_moe_experts": 4, "train__expert_model_parallel_size": 2, CP: 2}, id="experts"),
        pytest.param({"model__recompute_granularity": "full"}, id="recompute"),
    ],
)
def test_what_differs_by_model_and_layout_does_not_depend_on_stages(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ranks = changes.get(CP, 1)
    reference = curve(fresh_ranks, pipelined(corpus, tmp_path / "one", **changes), ranks)
    lines = curve(fresh_ranks, pipelined(corpus, tmp_path / "two", **changes, **{PP: 2}), 2 * ranks)
    assert_equal(lines, reference)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train__use_distributed_optimizer": True}, id="distributed optimizer"),
        pytest.param({}, id="plain"),
    ],
)
@pytest.mark.thorough  # tests/train/test_training.py goes on with other ranks by default
def test_a_run_may_go_on_with_other_stages(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, one_rank: list[dict[str, Any]], changes: dict[str, Any]
) -> None:
    """From two virtual stages of two ranks to one stage, and back; weights and Adam's state go along."""
    curve(fresh_ranks, pipelined(corpus, tmp_path / "apart", 2, **changes, **{PP: 2, VPP: 2}), 2)
    assert_equal(curve(fresh_ranks, pipelined(corpus, tmp_path / "apart", **changes), 1), one_rank)
    curve(fresh_ranks, pipelined(corpus, tmp_path / "whole", 2, **changes), 1)
    assert_equal(curve(fresh_ranks, pipelined(corpus, tmp_path / "whole", **changes, **{PP: 2}), 2), one_rank)
