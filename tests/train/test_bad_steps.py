"""Steps whose loss is not finite or a spike: the run stops or skips the step, by train.nonfinite_policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.errors import DivergenceError
from mindspeed_cp.train.checks import LEAST_HISTORY, SKIPS_IN_A_ROW, BadStepPolicy, spike_limit
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_identity import changed
from tests.train.test_training import curve, tiny, train_here, values

FLAT = (2.0,) * LEAST_HISTORY


def policy(**train: Any) -> BadStepPolicy:
    return BadStepPolicy(changed(train=train))


def test_a_spike_is_measured_against_the_median_and_its_deviation() -> None:
    noisy = [2.0 + 0.1 * (-1) ** step for step in range(LEAST_HISTORY)]  # the median is 2.0, the deviation 0.1
    assert spike_limit(noisy, 10) == pytest.approx(3.0)
    assert spike_limit(FLAT, 10) == pytest.approx(2.2), "a flat curve counts 1 % of its median"
    assert spike_limit(FLAT[1:], 10) == spike_limit(FLAT, 0) == math.inf


def test_policy_stops_or_skips_bad_step() -> None:
    assert policy(spike_mads=10).problem(20, None, 2.1, FLAT) is None
    assert policy().problem(20, None, 7.0, FLAT) is None, "by default no loss is a spike"
    spike = "the loss of 7 is a spike, above 2.2: the median of 16 steps and 10 MAD"
    skipping = policy(nonfinite_policy="skip", spike_mads=10)
    assert skipping.problem(20, None, 7.0, FLAT) == spike
    assert skipping.problem(20, "the loss is NaN", math.nan, FLAT) == "the loss is NaN"
    with pytest.raises(DivergenceError, match=r"^step 20: the loss of 7 is a spike"):
        policy(spike_mads=10).problem(20, None, 7.0, FLAT)
    with pytest.raises(DivergenceError, match=r"^step 20: the loss is NaN; lower train\.lr .*nonfinite_policy: skip"):
        policy().problem(20, "the loss is NaN", math.nan, FLAT)


def test_run_ends_after_ten_skipped_steps_in_a_row() -> None:
    skipping = policy(nonfinite_policy="skip")
    for _ in range(2):
        for step in range(SKIPS_IN_A_ROW):
            assert skipping.problem(step, "NaN", math.nan, ()) == "NaN"
        assert skipping.problem(99, None, 1.0, ()) is None  # one good step, and the count begins again
    for step in range(SKIPS_IN_A_ROW):
        skipping.problem(step, "NaN", math.nan, ())
    with pytest.raises(DivergenceError, match="after 10 skipped steps"):
        skipping.problem(11, "NaN", math.nan, ())


def train_with_a_fault(settings: str, fault: str) -> dict[str, Any] | str:
    """In a rank: train with a fault of rank 1 in step 4, or with a spike there."""
    import torch

    from mindspeed_cp.train import checks, loop

    build, run_step, steps = loop.build_training_model, loop.run_step, []

    def built(*arguments: Any) -> Any:
        training = build(*arguments)
        last = training.model.decoder.layers[-1].mlp

        def spoil(module: Any, inputs: Any, output: Any) -> Any:
            if len(steps) == 4 and fault == "forward" and arguments[0].rank == 1:
                return output[0] * math.nan, output[1]
            if len(steps) == 4 and fault == "backward" and arguments[0].rank == 1:
                output[0].register_hook(lambda gradient: gradient * math.nan)
            return output

        last.register_forward_hook(spoil)
        return training

    def counted(training: Any, *arguments: Any) -> Any:
        steps.append(None)
        spiked = len(steps) == 4 and fault == "spike"
        if spiked:
            with torch.no_grad():
                training.model.decoder.final_layernorm.weight.mul_(30)
        return run_step(training, *arguments)

    loop.build_training_model, loop.run_step, checks.LEAST_HISTORY = built, counted, 3
    try:
        return train_here(settings)
    except DivergenceError as error:
        return str(error)


def run(fresh_ranks: FreshRanks, fault: str, corpus: Path, folder: Path, **changes: Any) -> Any:
    common = {
        "train__train_iters": 6, "train__lr_warmup_iters": 0, "checkpoint__save_interval": 2,
        "context_parallel_suite__context_parallel_size": 2,
    }  # fmt: skip
    settings = tiny(corpus, folder, **common | changes)
    return fresh_ranks.run(2, train_with_a_fault, settings.model_dump_json(), fault)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_nonfinite_step_stops_all_ranks_and_names_rank(
    fault: str, fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    for line in run(fresh_ranks, fault, corpus, tmp_path):
        assert line.startswith(f"step 4: the {'loss' if fault == 'forward' else 'gradient'}"), line
        assert "rank" in line and "\n" not in line
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iter_0000002\n"


def test_a_skipped_step_leaves_the_weights(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    result, _ = run(fresh_ranks, "backward", corpus, tmp_path, train__nonfinite_policy="skip")
    lines = result["lines"]
    assert values(lines, "step") == [1, 2, 3, 4, 5, 6]
    assert "NaN" in lines[3]["problem"] and lines[3]["grad_norm"] is None and math.isfinite(lines[3]["loss"])
    assert all("problem" not in line and math.isfinite(line["grad_norm"]) for line in lines if line["step"] != 4)
    assert result["summary"]["skipped_steps"] == 1


def test_spike_is_skipped(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    changes = {"train__nonfinite_policy": "skip", "train__spike_mads": 10.0, "train__train_iters": 4}
    result, _ = run(fresh_ranks, "spike", corpus, tmp_path, **changes)
    assert "is a spike" in result["lines"][3]["problem"] and result["summary"]["skipped_steps"] == 1


def test_the_rates_of_the_optimizer_may_change_on_resume(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"train__lr_decay_style": "constant", "train__lr_warmup_iters": 0}
    curve(fresh_ranks, tiny(corpus, tmp_path, train__train_iters=2, **common), 1)
    lower = tiny(corpus, tmp_path, train__train_iters=3, **common, train__lr=1e-4, train__clip_grad=0.5)
    lines = curve(fresh_ranks, lower, 1)
    assert values(lines, "lr") == [3e-3, 3e-3, 1e-4]
