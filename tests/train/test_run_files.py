"""Files of a run: metrics, pictures, TensorBoard, and the lock."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.loss_curve import LossCurve, thinned
from mindspeed_cp.train.run_files import RunFiles, read_metrics, truncate_metrics, write_text
from mindspeed_cp.train.tensorboard_writer import TensorBoardWriter, check_tensorboard
from tests.train.test_identity import changed


def test_metrics_behind_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_metrics(path, 5)
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')  # a crash cut the last line
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_lines_of_a_curve_are_thinned_to_a_bounded_number() -> None:
    for steps in (0, 1, 7, 8, 9, 1000, 1023):
        lines = ({"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 0.5, "tokens": 7} for step in range(1, steps + 1))
        steps_shown = [line["step"] for line in thinned(lines, points=4)]
        assert steps_shown[:1] == [1][:steps] and steps_shown[-1:] == [steps][:steps]
        assert len(steps_shown) <= 8
        assert len(set(np.diff(steps_shown[:-1]))) <= 1


def test_a_picture_that_cannot_be_drawn_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunFiles(tmp_path)
    files.loss_png.mkdir()
    files.metrics.write_text('{"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 0.5}\n')
    curve = LossCurve(files)
    curve.draw()
    problem = curve.finish()
    assert problem is not None and "IsADirectoryError" in problem
    monkeypatch.setattr(sys, "executable", "true")  # as if it were drawn, which test_training.py sees
    curve.draw()
    assert curve.finish() is None, "the next picture is no problem"


def test_tensorboard_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tensorboard(changed())
    with pytest.raises(ConfigError, match=r"^output.tensorboard = true: .*; pip install 'mindspeed-cp\[tensorboard\]'"):
        check_tensorboard(changed(output={"tensorboard": True}))


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_the_figures_of_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 4), (2, 3)):  # the second start goes back to step 2
        writer = TensorBoardWriter(tmp_path, first)
        for step in range(first + 1, last + 1):
            writer.step({"step": step, "loss": first + step / 10, "plans": 2, "algorithms": {"ring": 1}})
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "plans"]
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


def test_a_folder_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.create()
    with files.locked(), pytest.raises(ConfigError, match="another run is using it"), files.locked():
        pass
    with files.locked():
        pass
