"""A rank whose weights or attention go wrong is named before another step is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

CHECKS: dict[str, Any] = {
    "train__check_weight_hash_across_dp_replicas_interval": 2,
    "train__check_attention_interval": 1,
    "checkpoint__save_interval": 4,
    "checkpoint__keep": 3,
}


def train_disturbed(settings: str, rank: str, step: int, what: str) -> dict[str, Any]:
    """In a rank: train, and after a step disturb one number of one rank."""
    import os

    from mindspeed_cp.train import loop

    run_step = loop.run_step

    def disturbed(training: Any, batches: Any, number: int, *more: Any) -> Any:
        result = run_step(training, batches, number, *more)
        if number == step and os.environ["RANK"] == rank:
            disturb(training, what)
        return result

    loop.run_step = disturbed
    return train_here(settings)


def disturb(training: Any, what: str) -> None:
    """Flip one bit of a weight or of its state, far too small for a loss to tell it."""
    named = dict(training.models[0].named_parameters())
    expert = next((name for name in named if "experts" in name), "")
    weight = named[expert if what == "expert" else "decoder.layers.1.mlp.linear_fc1.weight"]
    state = {"weight": weight.data, "expert": weight.data}.get(what)
    if state is None:
        optimizer = training.optimizer.optimizer
        state = optimizer.state[getattr(weight, "main_param", weight)]["exp_avg_sq"]
    state.view(-1)[7:8].view(torch.int32).bitwise_xor_(2**12)


@pytest.mark.fault(
    fault="a weight of one rank changes by one bit",
    happens="the replicas' digests differ at the next comparison; the run ends",
    lost="steps since the newest checkpoint",
    printed="step, weight, rank, and the checkpoint to go on from",
)
def test_a_rank_with_another_weight_is_named(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = tiny(corpus, tmp_path, **CHECKS, context_parallel_suite__context_parallel_size=3, train__train_iters=8)
    with pytest.raises(RankError) as caught:
        fresh_ranks.run(3, train_disturbed, settings.model_dump_json(), "1", 5, "weight")
    text = "the weight decoder.layers.1.mlp.linear_fc1.weight differ: rank 1 differs from ranks 0, 2; all agreed at step 4;"
    assert str(caught.value).count(f"CorruptionError: step 6: replicas of {text}") == 3, "every rank says it"
    assert "the same command goes on from iter_0000004" in str(caught.value)
    assert len(curve(fresh_ranks, settings, 3)) == 8, "the run goes on"


@pytest.mark.parametrize(
    ("what", "ranks", "changes", "text"),
    [
        pytest.param(
            "state", 2, {"context_parallel_suite__context_parallel_size": 2, "train__bf16": True},
            r"Adam's exp_avg_sq of decoder.layers.1.mlp.linear_fc1.weight differ: ranks 0, 1 differ from each other, any",
            id="state of bf16, two ranks",
        ),
        pytest.param(
            "weight", 4, {"train__tensor_model_parallel_size": 2, "context_parallel_suite__context_parallel_size": 2},
            r"linear_fc1.weight differ: ranks 1, 3 differ from each other",
            id="tensor-parallel", marks=pytest.mark.thorough,
        ),
        pytest.param(
            "weight", 3,
            {"train__use_distributed_optimizer": True, "context_parallel_suite__context_parallel_size": 3},
            r"linear_fc1.weight differ: rank 1 differs from ranks 0, 2",
            id="distributed optimizer", marks=pytest.mark.thorough,
        ),
        pytest.param(
            "expert", 4,
            {
                "model__num_moe_experts": 4, "model__moe_router_topk": 2,
                "train__expert_model_parallel_size": 2, "context_parallel_suite__context_parallel_size": 2,
            },
            r"experts\S*weight\S* differ: ranks 1, 3 differ from each other",
            id="experts", marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
@pytest.mark.fault(
    fault="state of the optimizer, a shard or an expert of one rank changes by one bit",
    happens="the digests of the ranks with the same part differ at the next comparison; the run ends",
    lost="steps since the newest checkpoint",
    printed="step, tensor and ranks; with two replicas, that either may be wrong",
)
def test_only_ranks_with_the_same_part_are_compared(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, what: str, ranks: int, changes: dict[str, Any], text: str
) -> None:
    settings = tiny(corpus, tmp_path, **CHECKS, **changes, train__train_iters=4)
    with pytest.raises(RankError, match=text):
        fresh_ranks.run(ranks, train_disturbed, settings.model_dump_json(), "1", 2, what)


def train_with_a_wrong_kernel(settings: str, rank: str, step: int) -> dict[str, Any]:
    """In a rank: from a step on, the first tiles of one rank's second layer come out too large."""
    import os

    from mindspeed_cp.megatron import PlannedAttention
    from mindspeed_cp.ops.attention.cpu.backend import CpuAttention
    from mindspeed_cp.train import loop

    run_step, forward, attend = loop.run_step, CpuAttention.forward, PlannedAttention.forward
    now: dict[str, int] = {"step": 0, "layer": 0}

    def counted(training: Any, batches: Any, number: int, *more: Any) -> Any:
        now["step"] = number
        return run_step(training, batches, number, *more)

    def of_layer(self: Any, *arguments: Any, **named: Any) -> Any:
        now["layer"] = self.layer_number
        return attend(self, *arguments, **named)

    def wrong(self: Any, calls: Any, attention: Any, state: Any, k: Any, v: Any) -> None:
        bad = os.environ["RANK"] == rank and now["layer"] == 2 and now["step"] >= step
        forward(self, calls, attention, state, k, v * 1.25 if bad else v)

    loop.run_step, CpuAttention.forward, PlannedAttention.forward = counted, wrong, of_layer  # type: ignore[method-assign]
    return train_here(settings)


@pytest.mark.fault(
    fault="attention computes wrong on one rank",
    happens="the canary, drawn anew at every interval, differs from the fp64 reference; the run ends before the step is kept",
    lost="steps since the newest checkpoint",
    printed="step, layer, head, rank and queries, and the tile of keys if one explains it",
)
def test_a_rank_whose_attention_is_wrong_is_named(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = tiny(
        corpus, tmp_path, **CHECKS, train__train_iters=60, train__bf16=True, model__recompute_granularity="full",
        context_parallel_suite__context_parallel_size=3,
    )  # fmt: skip
    with pytest.raises(RankError) as caught:
        fresh_ranks.run(3, train_with_a_wrong_kernel, settings.model_dump_json(), "2", 3)
    text = str(caught.value)
    assert text.count("attention of layer 2, head ") == 3 and text.count("computed on rank 2") == 3, (
        "every rank says it"
    )
    assert "the step was not kept" in text


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(2, {"context_parallel_suite__context_parallel_size": 2}, id="cp2"),
        pytest.param(
            4,
            {
                "train__tensor_model_parallel_size": 2, "train__sequence_parallel": True, "model__attention_dropout": 0.1,
                "train__bf16": True, "model__recompute_granularity": "selective",
            },
            id="tp2-dp2, dropout, bf16, recomputation", marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_a_healthy_run_is_not_changed_by_being_checked(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    curves = []
    for name, checks in (("checked", CHECKS), ("not", {})):
        settings = tiny(corpus, tmp_path / name, **checks, **changes, train__train_iters=8)
        curves.append(curve(fresh_ranks, settings, ranks))
    assert len(curves[0]) == 8
    assert values(curves[0]) == values(curves[1])
