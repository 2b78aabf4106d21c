"""Output folders and metrics that are damaged or cannot be written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.failures import classify_error
from mindspeed_cp.train.resume import checkpoints_to_resume
from mindspeed_cp.train.run_files import DiskError, RunFiles, read_metrics, truncate_metrics, write_text
from tests.train.test_damage import files_of_at_most, with_checkpoint


@pytest.mark.parametrize("line", [b"[1]", b'{"step": 2, "lo', b"\xff", b'{"loss": 1}', b'{"step": "2"}', b""])
def test_a_damaged_metrics_line_is_told_and_nothing_is_dropped(tmp_path: Path, line: bytes) -> None:
    settings = with_checkpoint(tmp_path)
    path = tmp_path / "metrics.jsonl"
    text = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(text)
    for read in (lambda: truncate_metrics(path, 3), lambda: checkpoints_to_resume(settings)):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 2 is damaged"):
            read()
    assert path.read_bytes() == text


@pytest.mark.parametrize("last", [b"", b'{"step": 2', b"\0\0\0", b"\xff", b"2"])
def test_a_last_line_that_a_crash_cut_is_left_out(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + last)
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_folder_that_no_system_takes_is_told(name: str) -> None:
    settings = Settings(output={"folder": f"/tmp/{name}"})  # type: ignore[arg-type]
    for use in (lambda: checkpoints_to_resume(settings), lambda: RunFiles(Path(settings.output.folder)).create()):
        with pytest.raises(ConfigError, match=r"output\.folder = .*/tmp/.*cannot be (created|read): ") as caught:
            use()
        assert str(caught.value).isprintable()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path / "run")
    files.create()
    assert [path.name for path in files.folder.rglob("*")] == ["checkpoints"], "the probe leaves nothing"

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write into every folder
    with pytest.raises(ConfigError, match="run: cannot be written to: Permission denied; give another folder"):
        files.create()


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFiles(Path("~/run")).metrics == tmp_path / "run" / "metrics.jsonl"
    assert RunFiles(Path("a/~")).folder == Path("a/~")
    with pytest.raises(ConfigError, match=r"output\.folder = ~nobody-of-this-name/run"):
        RunFiles(Path("~nobody-of-this-name/run"))


def test_a_file_that_cannot_be_written_names_its_folder(tmp_path: Path) -> None:
    with files_of_at_most(0), pytest.raises(DiskError) as caught:
        write_text(tmp_path / "latest", "new\n")
    assert list(tmp_path.iterdir()) == []
    kind, line, _ = classify_error(caught.value)
    assert kind == "files" and line.startswith(f"{tmp_path}: cannot be written: File too large; make room")
