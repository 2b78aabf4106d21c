"""Checkpoints that are damaged, cut short or cannot be written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.checkpoint import MANIFEST, checkpoints_to_resume, read_manifest
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

COMMON: dict[str, Any] = {
    "train__lr_decay_iters": 8, "context_parallel_suite__context_parallel_size": 2, "checkpoint__save_interval": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """6 steps without a fault."""
    return curve(fresh_ranks, tiny(corpus, tmp_path_factory.mktemp("whole"), **COMMON, train__train_iters=6), 2)


@pytest.fixture(scope="module")
def saved(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    curve(fresh_ranks, tiny(corpus, folder, **COMMON, train__train_iters=4), 2)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of that run, which a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(path: Path, place: float = 0.6) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def of_shard(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.safetensors"))


#: What is done to the newest checkpoint of two; and what is said of it.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit of a shard": (lambda c: flip(of_shard(c)), "safetensors was changed"),
    "flipped bit of a header": (lambda c: flip(of_shard(c), 0.0), "safetensors was changed"),
    "shard cut short": (lambda c: os.truncate(of_shard(c), 100), "safetensors was changed"),
    "shard is gone": (lambda c: of_shard(c).unlink(), "safetensors: No such file"),
    "manifest is gone": (lambda c: (c / MANIFEST).unlink(), "manifest.json: No such file"),
    "manifest is empty": (lambda c: (c / MANIFEST).write_text(""), "manifest.json is damaged"),
    "manifest is a list": (lambda c: (c / MANIFEST).write_text("[1]"), "manifest.json is damaged"),
    "manifest nested deeply": (lambda c: (c / MANIFEST).write_text("[" * 100_000), "manifest.json is damaged"),
    "folder is empty": (lambda c: (shutil.rmtree(c), c.mkdir()), "manifest.json: No such file"),
}


@pytest.mark.fault(
    fault="a bit of a checkpoint flips, in a shard or in its manifest; a file is cut short or gone",
    happens="the checkpoint before it is taken, with the same bits",
    lost="one interval of checkpoints",
    printed="the file, and where the run goes on",
)
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            name, marks=() if name in ("flipped bit of a shard", "manifest is empty") else pytest.mark.thorough
        )
        for name in DAMAGE
    ],
)
def test_checkpoint_before_damaged_one_is_taken(
    damage: str, fresh_ranks: FreshRanks, corpus: Path, run: Path, whole: list[dict[str, Any]]
) -> None:
    act, says = DAMAGE[damage]
    act(run / "checkpoints" / "iter_0000004")
    settings = tiny(corpus, run, **COMMON, train__train_iters=6)
    lines, notes = fresh_ranks.run(2, train_and_note, settings.model_dump_json())[0]
    assert any(says in note and note.endswith("going on from iter_0000002") for note in notes), notes
    assert values(lines) == values(whole) and values(lines, "grad_norm") == values(whole, "grad_norm")


def train_and_note(settings: str) -> tuple[list[dict[str, Any]], list[str]]:
    """In a rank: train; the metrics, and what the user is told."""
    from mindspeed_cp.train.output import RunWriter

    notes: list[str] = []
    RunWriter.note = lambda self, text: notes.append(text)  # type: ignore[method-assign]
    return train_here(settings)["lines"], notes


def test_flipped_bit_anywhere_in_manifest_is_noticed(corpus: Path, run: Path) -> None:
    """Also one that leaves it valid JSON, such as a digit of the position in the data."""
    settings = tiny(corpus, run, **COMMON, train__train_iters=6)
    manifest = run / "checkpoints" / "iter_0000004" / MANIFEST
    good = manifest.read_bytes()
    for place in range(0, len(good), 97):
        content = bytearray(good)
        content[place] ^= 1
        if json.loads(good) == _parsed(bytes(content)):
            continue  # white space
        manifest.write_bytes(content)
        records, notes = checkpoints_to_resume(settings)
        assert list(records) == ["iter_0000002"] and "iter_0000004: is damaged" in notes[0], place


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.fault(
    fault="`latest` is lost or damaged",
    happens="the newest whole checkpoint is taken: nothing here reads that file",
    lost="nothing",
    printed="nothing",
)
def test_newest_whole_checkpoint_is_taken_without_latest(corpus: Path, run: Path) -> None:
    latest = run / "checkpoints" / "latest"
    assert latest.read_text() == "iter_0000004\n"
    for content in (b"", b"\xff\xfe", b"../x", None):
        latest.unlink() if content is None else latest.write_bytes(content)
        records, notes = checkpoints_to_resume(tiny(corpus, run, **COMMON, train__train_iters=6))
        assert list(records) == ["iter_0000004", "iter_0000002"] and notes == []


def test_run_without_whole_checkpoint_is_one_line(corpus: Path, run: Path) -> None:
    for checkpoint in (run / "checkpoints").glob("iter_*"):
        (checkpoint / MANIFEST).unlink()
    with pytest.raises(ConfigError, match=r"no whole checkpoint is left in .*: restore one, or give another") as caught:
        checkpoints_to_resume(tiny(corpus, run, **COMMON, train__train_iters=6))
    assert "\n" not in str(caught.value)


@pytest.mark.fault(
    fault="the folder has checkpoints of another run",
    happens="they stay, and the start is refused",
    lost="nothing",
    printed="the settings that differ, and how to go on or start elsewhere",
)
def test_checkpoints_of_another_run_are_refused(corpus: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"iter_0000004 belongs to other settings: train\.seed was 1234 and is 1"):
        checkpoints_to_resume(tiny(corpus, run, **COMMON, train__train_iters=6, train__seed=1))


def test_checkpoint_holds_no_pickle(run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_0000004"
    names = {path.name for path in checkpoint.iterdir()}
    assert {name for name in names if not name.endswith(".safetensors")} == {MANIFEST}
    assert set(read_manifest(checkpoint)["files"]) == names - {MANIFEST}


def writes_into_full_disk(settings: str, rank: int, call: int) -> str:
    """In a rank: the disk of one rank is full while it writes its second checkpoint."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    write, calls = HuggingFaceStorageWriter.write_data, []

    def full(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call and int(os.environ["RANK"]) == rank:
            with open("/dev/full", "w") as file:
                file.write("x")
        return write(self, *arguments)

    HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign]
    with pytest.raises(OSError) as caught:
        train_here(settings)
    return str(caught.value)


@pytest.mark.fault(
    fault="a disk is full while a checkpoint is written",
    happens="the run ends, and goes on from the checkpoint before",
    lost="the steps since that checkpoint",
    printed="cannot be written: No space left on device; make room",
)
def test_full_disk_costs_one_interval(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    settings = tiny(corpus, tmp_path, **COMMON, train__train_iters=6)
    for text in fresh_ranks.run(2, writes_into_full_disk, settings.model_dump_json(), 1, 2):
        assert "cannot be written: No space left on device; make room" in text and "\n" not in text
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iter_0000002\n"
    lines = curve(fresh_ranks, settings, 2)
    assert values(lines) == values(whole)
    assert not list((tmp_path / "checkpoints").glob(".saving*"))


@pytest.mark.fault(
    fault="a run is started in a folder that another one uses",
    happens="it is refused; the system lets the folder go when the other one dies",
    lost="nothing",
    printed="another run is using it",
)
def test_two_runs_never_share_a_folder(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    from mindspeed_cp.train.run_files import RunFiles

    files = RunFiles(tmp_path)
    files.create()
    settings = tiny(corpus, tmp_path)
    with files.locked(), pytest.raises(RankError, match="another run is using it"):
        fresh_ranks.run(1, train_here, settings.model_dump_json())
