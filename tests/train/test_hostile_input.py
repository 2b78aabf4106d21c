"""Bookkeeping that is damaged or in the way: links, limits, odd numbers, pictures that fail."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device import open_files
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.report.run.charts import draw_training_curves
from mindspeed_cp.train import local_agent, rendezvous
from mindspeed_cp.train.checkpoint_digests import read_digests
from mindspeed_cp.train.failures import classify_error
from mindspeed_cp.train.metrics_writer import MetricsWriter
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.resume import read_run_json
from mindspeed_cp.train.run_files import RunFiles, write_text
from mindspeed_cp.train.stop_request import StopRequest

LINE = {"step": 1, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0}


@pytest.mark.parametrize("title", ["$\\frac$", "$x^$", "a$b", "\ud800", "", "x" * 5000])
def test_a_title_from_outside_is_drawn_letter_by_letter(tmp_path: Path, title: str) -> None:
    skipped = {**LINE, "step": 2, "grad_norm": None}
    draw_training_curves([LINE, skipped], tmp_path / "loss.png", title)
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_picture_that_fails_is_one_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    files = RunFiles(tmp_path)
    files.create()
    settings = Settings(output={"folder": str(tmp_path), "progress": "lines"})  # type: ignore[arg-type]
    writer = MetricsWriter(files, settings, Progress(), 1, torch.device("cpu"))
    files.metrics.write_text('{"step": 1}\n')  # nothing that can be drawn
    writer.draw()
    writer.close()
    said = [line for line in capsys.readouterr().out.splitlines() if "loss.png" in line]
    assert len(said) == 1 and said[0].startswith(f"{files.loss_png} is not up to date: ")


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.create()
    (tmp_path / "precious").write_text("x")
    (files.folder / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"\.lock: cannot be locked: "), files.locked():
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_a_file_is_replaced_and_not_the_target_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    for name in ("a", ".a.new"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and not (tmp_path / "a").is_symlink()
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('"seconds": NaN', "it is not JSON"),
        ('"seconds": 1e999', "seconds is Infinity"),
        ('"seconds": -1', "seconds is -1"),
        ('"tokens": 1' + "0" * 30, "tokens is 1000"),
        ('"ranks": 0', "ranks is 0"),
        ('"data": ' + "[" * 100_000 + "]" * 100_000, "it is not JSON"),
    ],
)
def test_a_run_json_with_odd_numbers_is_damaged(tmp_path: Path, change: str, says: str) -> None:
    good = {"step": 3, "tokens": 9, "seconds": 1.0, "data": None, "ranks": 1, "identity": {}}
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(good)[:-1] + f", {change}}}")
    with pytest.raises(ConfigError) as caught:
        read_run_json(folder)
    assert says in str(caught.value)


def test_a_signature_of_odd_letters_is_damage(tmp_path: Path) -> None:
    (tmp_path / "digests.json").write_text('{"files": {}, "signature": "\\ud800\\u00e9"}')
    with pytest.raises(ConfigError, match=r"digests\.json is damaged"):
        read_digests(tmp_path, trust_unsigned=False)


def test_the_signal_that_came_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    monkeypatch.setenv(local_agent.STORE_VARIABLE, str(tmp_path / "store"))
    (tmp_path / "asked.json").write_text('"SIGINT"')
    with StopRequest() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request.reason == "SIGINT"


def test_too_low_a_limit_of_open_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: changed.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 100))
    with pytest.raises(ConfigError, match=r"ulimit -n = 100: 2 ranks need up to 152 open files each"):
        open_files.check_open_files(2)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 2000))
    open_files.check_open_files(2)
    open_files.raise_limit()
    assert changed == [(2000, 2000)] and open_files.largest_run(152) == 2


def test_limits_of_the_system_name_their_remedy() -> None:
    for error, part in (
        (OSError(24, "Too many open files"), "ulimit -n"),
        (RuntimeError("epoll_create: Too many open files\nstack"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(27, "File too large"), "ulimit -f"),
    ):
        kind, line, code = classify_error(error)
        assert (kind, code) == ("files", 1) and part in line and "\n" not in line


def test_ranks_that_cannot_meet_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from torch.distributed import DistNetworkError

    def refused(*arguments: Any, **named: Any) -> Any:
        raise DistNetworkError("connection refused")

    monkeypatch.setattr(rendezvous.dist, "TCPStore", refused)
    with pytest.raises(PeerError, match="rank 1 did not find rank 0 by MASTER_ADDR = a and MASTER_PORT = 29500"):
        rendezvous.open_store({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, 1, 2, 1, timedelta(seconds=1))
