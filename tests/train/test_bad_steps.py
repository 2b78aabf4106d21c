"""Steps whose loss is not finite or a spike: which rank and layer are named, and what each policy leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.errors import DivergenceError
from mindspeed_cp.train.bad_steps import (
    HISTORY,
    LEAST_HISTORY,
    ROLLBACKS_TO_A_CHECKPOINT,
    SKIPS_IN_A_ROW,
    BadStepPolicy,
    spike_limit,
    with_loss,
)
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
    history: tuple[float, ...] = ()
    for loss in range(HISTORY + 5):
        history = with_loss(history, float(loss))
    assert history == tuple(map(float, range(5, HISTORY + 5)))


def test_each_policy_decides_as_it_says() -> None:
    assert policy().judge(20, None, 2.1, FLAT) == ("keep", None)
    action, problem = policy().judge(20, None, 7.0, FLAT)
    assert action == "keep" and problem == "the loss of 7 is a spike, above 2.2: the median of 16 steps and 10 MAD"
    assert policy(spike_policy="skip").judge(20, None, 7.0, FLAT)[0] == "skip"
    assert policy(spike_policy="rollback").judge(20, None, 7.0, FLAT)[0] == "rollback"
    assert policy(nonfinite_policy="skip").judge(20, "the loss is NaN", math.nan, FLAT) == ("skip", "the loss is NaN")
    with pytest.raises(DivergenceError, match=r"^step 20: the loss of 7 is a spike"):
        policy(spike_policy="stop").judge(20, None, 7.0, FLAT)
    with pytest.raises(DivergenceError, match=r"^step 20: the loss is NaN; lower train\.lr .*nonfinite_policy"):
        policy(spike_policy="skip").judge(20, "the loss is NaN", math.nan, FLAT)


def test_what_does_not_end_by_itself_ends_the_run() -> None:
    skipping = policy(nonfinite_policy="skip")
    for _ in range(2):
        for step in range(SKIPS_IN_A_ROW):
            assert skipping.judge(step, "NaN", math.nan, ())[0] == "skip"
        assert skipping.judge(99, None, 1.0, ())[0] == "keep"  # one good step, and the count begins again
    for step in range(SKIPS_IN_A_ROW):
        skipping.judge(step, "NaN", math.nan, ())
    with pytest.raises(DivergenceError, match="after 10 skipped steps"):
        skipping.judge(11, "NaN", math.nan, ())
    back = policy(nonfinite_policy="rollback")
    for to in (5, *[10] * ROLLBACKS_TO_A_CHECKPOINT):
        back.rolled_back(12, to, "NaN")
    with pytest.raises(DivergenceError, match="after 3 rollbacks to step 10"):
        back.rolled_back(12, 10, "NaN")


def train_with_a_fault(settings: str, fault: str) -> dict[str, Any] | str:
    """In a rank: train with a fault of rank 1 in step 4, or with a spike there."""
    import torch

    from mindspeed_cp.train import bad_steps, loop

    build, run_step, steps = loop.build_training_model, loop.run_step, []

    def built(*arguments: Any) -> Any:
        training = build(*arguments)
        last = training.models[-1].decoder.layers[-1].mlp

        def spoil(module: Any, inputs: Any, output: Any) -> Any:
            if len(steps) == 4 and fault == "forward" and arguments[1].rank == 1:
                return output[0] * math.nan, output[1]
            if len(steps) == 4 and fault == "backward" and arguments[1].rank == 1:
                output[0].register_hook(lambda gradient: gradient * math.nan)
            return output

        last.register_forward_hook(spoil)
        return training

    def counted(training: Any, *arguments: Any) -> Any:
        steps.append(None)
        spiked = len(steps) == 4 and fault == "spike"
        if spiked:
            with torch.no_grad():
                training.models[0].decoder.final_layernorm.weight.mul_(30)
        result = run_step(training, *arguments)
        return result

    loop.build_training_model, loop.run_step, bad_steps.LEAST_HISTORY = built, counted, 3
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


STAGES = {"train__pipeline_model_parallel_size": 2, "context_parallel_suite__context_parallel_size": 1}


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("changes", [{}, pytest.param(STAGES, id="stages", marks=pytest.mark.thorough)])
def test_rank_and_layer_of_the_first_bad_value_are_named(
    changes: dict[str, Any], fault: str, fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    """Of two stages, both see the gradients that are not finite, and the one behind is the first."""
    for line in run(fresh_ranks, fault, corpus, tmp_path, **changes):
        assert line.startswith(f"step 4: the {'loss' if fault == 'forward' else 'gradient'}"), line
        layer = "output of decoder.layers.1" if fault == "forward" else "gradient at the output of decoder.layers.1."
        assert f"(first seen: the {layer}" in line and " on rank 1)" in line and "\n" not in line
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iter_0000002\n"


def test_a_checkpoint_that_is_being_written_is_completed_before_all_ranks_end(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    changes = {"checkpoint__async_save": True, "checkpoint__save_interval": 3}
    for line in run(fresh_ranks, "forward", corpus, tmp_path, **changes):
        assert line.startswith("step 4: the loss")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iter_0000003\n"
    assert not list((tmp_path / "checkpoints").glob(".saving-*"))


def test_a_skipped_step_leaves_the_weights(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    result, _ = run(fresh_ranks, "backward", corpus, tmp_path, train__nonfinite_policy="skip")
    lines = result["lines"]
    assert values(lines, "step") == [1, 2, 3, 4, 5, 6]
    assert "NaN" in lines[3]["problem"] and lines[3]["grad_norm"] is None and math.isfinite(lines[3]["loss"])
    assert all("problem" not in line and math.isfinite(line["grad_norm"]) for line in lines if line["step"] != 4)
    assert (result["summary"]["skipped_steps"], result["summary"]["rollbacks"]) == (1, 0)


def test_a_rollback_leaves_the_batches_out(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    plain = curve(
        fresh_ranks,
        tiny(corpus, tmp_path / "plain", train__train_iters=8, train__lr_warmup_iters=0, train__lr_decay_iters=6,
             context_parallel_suite__context_parallel_size=2), 2,
    )  # fmt: skip
    changes = {"train__nonfinite_policy": "rollback", "checkpoint__resume": False}  # --no-resume
    result, _ = run(fresh_ranks, "forward", corpus, tmp_path / "back", **changes)
    lines = result["lines"]
    assert values(lines, "step") == [1, 2, 3, 4, 5, 6] and result["summary"]["rollbacks"] == 1
    assert values(lines, "documents") == values([*plain[:2], *plain[4:]], "documents"), "batches 3 and 4 are left out"
    assert values(lines, "lr") == values(plain[:6], "lr"), "the schedule went back too"
    [text] = lines[2]["rolled_back"]
    assert text.startswith("step 4: the loss is NaN") and "the batches of steps 3 to 4 are left out" in text
    assert values(lines[:2]) == values(plain[:2]) and lines[2]["loss"] != plain[2]["loss"]
    saved = json.loads((tmp_path / "back" / "checkpoints" / "iter_0000006" / "run.json").read_text())
    assert (saved["rollbacks"], saved["restarts"], len(saved["losses"])) == (1, 0, 6)


def test_latest_does_not_follow_a_spike(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """The run stops after its step 4, a spike: the next start goes on from step 2."""
    changes = {"train__train_iters": 4, "train__lr_decay_iters": 6}
    short = tiny(
        corpus, tmp_path, **changes, train__lr_warmup_iters=0, checkpoint__save_interval=2, checkpoint__keep=1,
        context_parallel_suite__context_parallel_size=2,
    )  # fmt: skip
    (result, _) = fresh_ranks.run(2, train_with_a_fault, short.model_dump_json(), "spike")
    assert "is a spike" in result["lines"][3]["problem"] and result["lines"][3]["loss"] > 2 * result["lines"][2]["loss"]
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "latest").read_text() == "iter_0000002\n"
    assert [path.name for path in sorted(checkpoints.glob("iter_*"))] == ["iter_0000002", "iter_0000004"]
    lines = curve(fresh_ranks, short, 2)
    assert values(lines, "step") == [1, 2, 3, 4] and "problem" not in lines[3]
    assert (checkpoints / "latest").read_text() == "iter_0000004\n"
    assert json.loads((checkpoints / "iter_0000004" / "run.json").read_text())["restarts"] == 1


def test_the_rates_of_the_optimizer_may_change_on_resume(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"train__lr_decay_style": "constant", "train__lr_warmup_iters": 0}
    curve(fresh_ranks, tiny(corpus, tmp_path, train__train_iters=2, **common), 1)
    lower = tiny(corpus, tmp_path, train__train_iters=3, **common, train__lr=1e-4, train__clip_grad=0.5)
    lines = curve(fresh_ranks, lower, 1)
    assert values(lines, "lr") == [3e-3, 3e-3, 1e-4]
    assert lines[2]["changed_settings"] == ["train.lr was 0.003 and is 0.0001", "train.clip_grad was 1.0 and is 0.5"]
