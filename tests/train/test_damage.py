"""Files that a full disk, a crash or a user damages are reported in one line, and no state is lost."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.checkpoint_digests import DIGESTS, KEY_VARIABLE, file_digest, signing_key, write_digests
from mindspeed_cp.train.failures import classify_error
from mindspeed_cp.train.held_folder import HeldFolder
from mindspeed_cp.train.resume import checkpoints_to_resume
from mindspeed_cp.train.run_files import RunFiles
from mindspeed_cp.train.run_identity import identity
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import tiny

DAMAGES = (
    *("short shard", "empty shard", "no shard", "short metadata", "empty metadata", "no metadata"),
    *("short common", "no common", "no format", "bad format", "flipped shard", "flipped metadata"),
)


def damage(folder: Path, how: str) -> None:
    """Cut a file of a checkpoint short, empty it, flip a bit, write nonsense into it, or remove it."""
    what, part = how.split()
    names = {"shard": "__0_0.distcp", "metadata": ".metadata", "common": "common.pt", "format": "metadata.json"}
    path = folder / names[part]
    if what == "no":
        path.unlink()
    elif what == "bad":
        path.write_text("[1")
    elif what == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    else:
        os.truncate(path, path.stat().st_size // 2 if what == "short" else 0)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write larger files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def rename_fails(name: str) -> Iterator[None]:
    """The system does not give a folder this name."""
    replace = os.replace

    def failing(source: Any, target: Any) -> None:
        if Path(target).name == name:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing)
        yield


def random_numbers() -> list[float]:
    """Draw a number from each generator."""
    import torch

    return [float(torch.rand(())), float(np.random.random()), random.random()]


def save_and_load(text: str) -> dict[str, Any]:
    """In a rank: save and load checkpoints with a model, and return all results that the tests check."""
    from mindspeed_cp.megatron import megatron_compat, megatron_on_cpu
    from mindspeed_cp.train.checkpoint import save
    from mindspeed_cp.train.checkpoint_loading import load, resume
    from mindspeed_cp.train.model import build_training_model
    from mindspeed_cp.train.progress import Progress
    from mindspeed_cp.train.world import join_ranks

    settings = Settings.model_validate_json(text)
    files = RunFiles(Path(settings.output.folder))
    files.create()
    results: dict[str, Any] = {}
    with megatron_on_cpu(), megatron_compat(), join_ranks(settings) as world:
        training = build_training_model(settings, world)
        training.zero_gradients()
        training.optimizer.step()  # its state is made by the first step

        def names_after(step: int, keep: int) -> list[str]:
            limited = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"keep": keep})})
            save(files, training, Progress(step=step, run_id="this"), limited, world)
            return sorted(path.name for path in files.checkpoints.iterdir())

        for step in (60, 80):
            names_after(step, keep=2)
        newest, kept = files.checkpoint(80), files.folder / "kept"
        drawn = random_numbers()
        assert load(files.checkpoint(60), HeldFolder(files.checkpoint(60)), settings, training, world).step == 60
        results["random numbers"] = drawn, random_numbers()
        shutil.copytree(newest, kept)
        for how in DAMAGES:
            damage(newest, how)
            progress, folder, notes = resume(settings, training, world)
            assert folder is not None
            results[how] = progress.step, folder.name, notes
            shutil.rmtree(newest)
            shutil.copytree(kept, newest)
        assert resume(settings, training, world)[0].step == 80
        files.latest.write_text("iter_0000060\n")
        for size in (0, 2_000, 50_000):  # the first file, common.pt, is larger than 2 kB and smaller than 50 kB
            with files_of_at_most(size), pytest.raises(OSError) as failed:
                save(files, training, Progress(step=65, run_id="this"), settings, world)
            results[f"at most {size}"] = classify_error(failed.value)
            results[f"names {size}"] = sorted(path.name for path in files.checkpoints.glob("iter*"))
        with rename_fails("iter_0000064"), pytest.raises(OSError):
            save(files, training, Progress(step=64), settings, world)
        results["latest before the folder"] = files.latest.read_text()
        save(files, training, Progress(step=61, run_id="another"), settings, world)
        results["abandoned"] = names_after(65, keep=1)
        results["latest"] = files.latest.read_text()
        results["same step again"] = names_after(65, keep=1)
    return results


@pytest.fixture(scope="module")
def results(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = tiny(corpus, tmp_path_factory.mktemp("damage"), model__num_layers=1)
    return fresh_ranks.run(1, save_and_load, settings.model_dump_json())[0]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(results: dict[str, Any], how: str) -> None:
    step, name, notes = results[how]
    assert (step, name) == (60, "iter_0000060")
    (line,) = notes
    assert "iter_0000080: is damaged (" in line and line.endswith("; going on from iter_0000060") and "\n" not in line
    file = {"shard": "__0_0.distcp", "metadata": ".metadata", "common": "common.pt", "format": "metadata.json"}
    told = {"no": ": No such file", "flipped": " was changed"}.get(how.split()[0], " was changed")
    assert file[how.split()[1]] + told in line


@pytest.mark.parametrize("size", [0, 2_000, 50_000])
def test_a_full_disk_is_told_in_one_line_and_harms_no_checkpoint(results: dict[str, Any], size: int) -> None:
    kind, line, code = results[f"at most {size}"]
    assert kind == "files" and code == 1 and "\n" not in line
    assert "checkpoints: cannot be written: " in line and "make room" in line
    assert results[f"names {size}"] == ["iter_0000060", "iter_0000080"]


def test_a_checkpoint_is_not_named_before_its_folder_is_in_place(results: dict[str, Any]) -> None:
    assert results["latest before the folder"] == "iter_0000060\n"


def test_random_generators_go_on_from_the_checkpoint(results: dict[str, Any]) -> None:
    drawn, again = results["random numbers"]
    assert drawn == again


def test_the_checkpoint_just_saved_is_never_pruned(results: dict[str, Any]) -> None:
    assert results["abandoned"] == ["iter_0000061", "iter_0000065", "latest"], "80 is of a future that was abandoned"
    assert results["latest"] == "iter_0000065\n"
    assert results["same step again"] == ["iter_0000061", "iter_0000065", "latest"], "61 is of another run"


# bookkeeping files


def with_checkpoint(folder: Path, **run: Any) -> Settings:
    """Settings, and a folder with the bookkeeping of two checkpoints; `run` changes that of the newer one."""
    settings = Settings(output={"folder": str(folder)})  # type: ignore[arg-type]
    files = RunFiles(folder)
    files.create()
    good = {"step": 3, "tokens": 9, "seconds": 1.0, "data": None, "ranks": 1, "identity": identity(settings)}
    good["settings"] = settings.model_dump(mode="json")
    for step, values in ((2, good | {"step": 2}), (3, good | run)):
        files.checkpoint(step).mkdir()
        path = files.checkpoint(step) / "run.json"
        path.write_text(json.dumps(values))
        write_digests(HeldFolder(path.parent), path.parent.name, {"run.json": file_digest(path.open("rb"))})
    files.latest.write_text("iter_0000003\n")
    return settings


def names(settings: Settings) -> tuple[list[str], list[str]]:
    folders, notes = checkpoints_to_resume(settings)
    return [folder.name for folder in folders], notes


def test_a_whole_folder_is_resumed(tmp_path: Path) -> None:
    assert names(with_checkpoint(tmp_path)) == (["iter_0000003", "iter_0000002"], [])


@pytest.mark.parametrize("name", [None, b"\xff\xfe\n", b"", b"..\n", b"iter_3\n"])
def test_without_latest_the_newest_checkpoint_is_taken(tmp_path: Path, name: bytes | None) -> None:
    settings = with_checkpoint(tmp_path)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink() if name is None else latest.write_bytes(name)
    existing, (note,) = names(settings)
    assert existing == ["iter_0000003", "iter_0000002"]
    assert re.search(r"latest: is (missing|damaged), so the newest whole checkpoint is taken", note)


def test_what_is_newer_than_latest_is_of_an_abandoned_run(tmp_path: Path) -> None:
    settings = with_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("iter_0000002\n")
    assert names(settings) == (["iter_0000002"], [])


@pytest.mark.parametrize("with_latest", [True, False])
def test_a_new_run_is_refused_where_there_are_checkpoints(tmp_path: Path, with_latest: bool) -> None:
    settings = with_checkpoint(tmp_path)
    if not with_latest:
        (tmp_path / "checkpoints" / "latest").unlink()
    settings = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"resume": False})})
    with pytest.raises(
        ConfigError, match=r"resume = false: .* has the checkpoint iter_0000003, which a new run would mix"
    ):
        checkpoints_to_resume(settings)


@pytest.mark.parametrize("run", [{"identity": [1]}, {"step": "3"}, {"ranks": True}, {"data": 1}, {"step": 2}])
def test_a_damaged_run_json_is_told_and_the_one_before_is_taken(tmp_path: Path, run: dict[str, Any]) -> None:
    existing, (note,) = names(with_checkpoint(tmp_path, **run))
    assert existing == ["iter_0000002"] and "iter_0000003: is damaged (run.json is " in note
    assert next(iter(run)) in note


def test_a_folder_without_a_whole_checkpoint_is_never_begun_anew(tmp_path: Path) -> None:
    settings = with_checkpoint(tmp_path)
    for step in (2, 3):
        (tmp_path / "checkpoints" / f"iter_000000{step}" / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"iter_0000003: is damaged \(run\.json: .*no whole checkpoint is left in"):
        checkpoints_to_resume(settings)


# signatures


def test_a_checkpoint_of_somebody_else_needs_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = with_checkpoint(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "other.key"))
    with pytest.raises(ConfigError, match=r"not of this user's key\), and loading it can run code; .*trust_unsigned"):
        checkpoints_to_resume(settings)
    trusting = settings.checkpoint.model_copy(update={"trust_unsigned": True})
    settings = settings.model_copy(update={"checkpoint": trusting})
    assert names(settings)[0] == ["iter_0000003", "iter_0000002"]
    (tmp_path / "checkpoints" / "iter_0000003" / DIGESTS).unlink()
    assert names(settings)[0] == ["iter_0000003", "iter_0000002"], "one of an older version"


def test_a_checkpoint_under_another_name_is_not_signed(tmp_path: Path) -> None:
    settings = with_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "iter_0000003").rename(tmp_path / "checkpoints" / "iter_0000004")
    (tmp_path / "checkpoints" / "latest").write_text("iter_0000004\n")
    assert names(settings)[1] == [f"{tmp_path}/checkpoints/iter_0000004: is damaged (run.json is of step 3)"]


def test_a_file_that_no_digest_vouches_for_is_damage(tmp_path: Path) -> None:
    settings = with_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "iter_0000003" / "common.pt").write_text("crafted")
    assert "common.pt is not one of its files" in names(settings)[1][0]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys" / "checkpoint.key"
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    key = signing_key()
    assert len(key) == 32 and signing_key() == key and path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.key"]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read or change it; make it yours alone"):
        signing_key()
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"not a valid key \(5 bytes; at least 32\)"):
        signing_key()
    monkeypatch.setenv(KEY_VARIABLE, "/proc/none/key")
    with pytest.raises(ConfigError, match=r"cannot be read or made: .*MINDSPEED_CP_KEY_FILE"):
        signing_key()
