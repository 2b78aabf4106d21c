"""A rank whose attention goes wrong is named before the step is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

CHECKS: dict[str, Any] = {
    "train__check_attention_interval": 1,
    "checkpoint__save_interval": 4,
    "checkpoint__keep": 3,
}


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
    happens="a sample of attention, drawn anew at every interval, differs from the fp64 reference; the run ends before the step is kept",
    lost="steps since the newest checkpoint",
    printed="step, layer, head, rank and queries",
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


@pytest.mark.thorough
def test_a_healthy_run_is_not_changed_by_being_checked(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "train__tensor_model_parallel_size": 2, "train__sequence_parallel": True, "model__attention_dropout": 0.1,
        "train__bf16": True, "model__recompute_granularity": "selective",
    }  # fmt: skip
    curves = []
    for name, checks in (("checked", CHECKS), ("not", {})):
        settings = tiny(corpus, tmp_path / name, **checks, **changes, train__train_iters=8)
        curves.append(curve(fresh_ranks, settings, 4))
    assert len(curves[0]) == 8
    assert values(curves[0]) == values(curves[1])
