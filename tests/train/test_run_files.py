"""Files of a run: metrics and TensorBoard."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.output import RunWriter, check_tensorboard
from mindspeed_cp.train.run_files import RunFiles, read_metrics, truncate_metrics, write_text
from mindspeed_cp.train.step import StepResult
from tests.train.test_identity import changed


def test_metrics_behind_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_metrics(path, 5)
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')  # a crash cut the last line
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_tensorboard_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tensorboard(changed())
    with pytest.raises(ConfigError, match=r"^output.tensorboard = true: .*; pip install 'mindspeed-cp\[tensorboard\]'"):
        check_tensorboard(changed(output={"tensorboard": True}))


def writer(tmp_path: Path, step: int = 0, **output: Any) -> RunWriter:
    files = RunFiles(tmp_path)
    files.create()
    settings = Settings(output={"folder": str(tmp_path), "log_interval": 2, **output})  # type: ignore[arg-type]
    world = SimpleNamespace(settings=settings, device=torch.device("cpu"))
    return RunWriter(files, SimpleNamespace(world=world), step)  # type: ignore[arg-type]


def result(loss: float, **more: Any) -> StepResult:
    names = (
        "tokens", "documents", "imbalance", "replica_imbalance", "pooled", "planning_seconds", "waiting_seconds",
    )  # fmt: skip
    figures = dict.fromkeys(names, 1)
    return StepResult(loss, figures, False, {}, lr=0.1, **more)


def test_steps_are_lines_of_json_and_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = writer(tmp_path)
    for step in (1, 2, 3):
        first.step(step, result(math.nan if step == 3 else step / 2, problem="bad" if step == 3 else None), 0.5)
    first.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in lines] == [0.5, 1.0, None] and lines[2]["problem"] == "bad"
    assert lines[0]["tokens_per_s"] == 2.0 and lines[0]["grad_norm"] is None
    said = capsys.readouterr().out
    assert "step 1/100  loss 0.5000" in said and "step 2/100" in said and "eta 0:00:" in said
    assert "step 3: bad; its update was left out" in said and "step 3/100" not in said
    writer(tmp_path, 1).close()  # goes back to step 1
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_steps_go_on_when_the_terminal_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*words: object, **more: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.print", gone)
    writer(tmp_path).step(1, result(1.0), 0.5)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_figures_of_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 4), (2, 3)):  # the second start goes back to step 2
        made = writer(tmp_path, first, tensorboard=True)
        for step in range(first + 1, last + 1):
            made.step(step, result(first + step / 10), 0.5)
        made.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("loss")] == [(1, 0.1), (2, 0.2), (3, 2.3)]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    write_text(path, "old\n")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new\n")
    assert path.read_text() == "old\n"
