"""Crafted checkpoints, folders and messages: code of somebody else is never run."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.errors import PeerError
from mindspeed_cp.train import checkpoint_folder
from mindspeed_cp.train.checkpoint_digests import KEY_VARIABLE, UnsignedCheckpointError, signing_key
from mindspeed_cp.train.checkpoint_folder import check_sent_digests
from mindspeed_cp.train.held_folder import HeldFolder
from mindspeed_cp.train.resume import checkpoint_name
from mindspeed_cp.train.run_files import RunFiles
from tests.faults.test_checkpoints import same_curve, steps
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, train_here, values


class Crafted:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.fault(
    fault="somebody put a crafted pickle into a checkpoint",
    happens="it is not loaded: its digest differs, or its signature is not this user's",
    lost="nothing",
    printed="the file, or checkpoint.trust_unsigned",
)
@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_crafted_pickle_is_never_loaded(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, name: str) -> None:
    """In a checkpoint of this run, and in one that comes from elsewhere whole."""
    run, mark = tmp_path / "run", tmp_path / "code was run"
    curve(fresh_ranks, steps(corpus, run, 2), 1)
    crafted = run / "checkpoints" / "iter_0000002" / name
    crafted.write_bytes(pickle.dumps(Crafted(mark)))
    with pytest.raises(RankError, match=rf"is damaged \({name} was changed\).*no whole checkpoint is left"):
        curve(fresh_ranks, steps(corpus, run, 4), 1)
    (crafted.parent / "digests.json").unlink()
    with pytest.raises(RankError, match=r"loading it can run code; .*trust_unsigned"):
        curve(fresh_ranks, steps(corpus, run, 4), 1)
    assert not mark.exists()


def train_where_folders_are_exchanged(settings: str, folder: str, when: str) -> dict[str, Any]:
    """In a rank: train. Somebody who may write in the folder of the checkpoints puts a crafted one in the place of
    iter_0000002: after its files were compared with their digests, or while its shards are written."""
    from mindspeed_cp.train import checkpoint, checkpoint_loading

    owner = {"loaded": checkpoint_loading, "written": checkpoint}[when]
    name = {"loaded": "iter_0000002", "written": ".saving-iter_0000002"}[when]
    place, original = (
        Path(folder, "checkpoints", name),
        getattr(owner, {"loaded": "load", "written": "BegunSave"}[when]),
    )

    def exchange(*args: Any) -> Any:
        if place.exists():
            aside = place.with_name("aside")
            place.rename(aside)
            place.mkdir()
            for file in aside.iterdir():
                (place / file.name).write_bytes(pickle.dumps(Crafted(Path(folder, "code was run"))))
        return original(*args)

    setattr(owner, original.__name__, exchange)
    return train_here(settings)


@pytest.mark.fault(
    fault="somebody exchanges the folder of a checkpoint while it is loaded",
    happens="what was compared with its digests is loaded, from the folder that is held open",
    lost="nothing",
    printed="nothing",
)
def test_a_folder_that_is_exchanged_while_it_is_loaded_is_not_looked_at(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    before = curve(fresh_ranks, steps(corpus, tmp_path / "before", 4), 1)
    run = tmp_path / "run"
    curve(fresh_ranks, steps(corpus, run, 2), 1)
    settings = steps(corpus, run, 4)
    results = fresh_ranks.run(1, train_where_folders_are_exchanged, settings.model_dump_json(), str(run), "loaded")
    assert same_curve(results[0]["lines"], before)
    assert (run / "checkpoints" / "aside").is_dir()
    assert not (run / "code was run").exists()


@pytest.mark.fault(
    fault="somebody exchanges the folder of a checkpoint while it is written",
    happens="the run ends before `latest` names it; what was put there is never loaded",
    lost="the steps since the checkpoint before",
    printed="somebody put another folder in the place of the checkpoint",
)
def test_a_folder_that_is_exchanged_while_it_is_written_ends_the_run(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = steps(corpus, tmp_path, 4)
    with pytest.raises(RankError, match="somebody put another folder in the place of the checkpoint"):
        fresh_ranks.run(1, train_where_folders_are_exchanged, settings.model_dump_json(), str(tmp_path), "written")
    assert not (tmp_path / "checkpoints" / "latest").exists()
    with pytest.raises(RankError, match="no whole checkpoint is left"):
        curve(fresh_ranks, settings, 1)
    assert not (tmp_path / "code was run").exists()


@pytest.mark.fault(
    fault="others can write in a checkpoint, by its mode or its owner",
    happens="it is not loaded, unless checkpoint.trust_unsigned is set",
    lost="nothing",
    printed="the file or folder, its mode or owner, chmod and chown, and checkpoint.trust_unsigned",
)
def test_a_checkpoint_that_others_can_change_is_not_loaded(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    size = {"context_parallel_suite__context_parallel_size": 2}
    curve(fresh_ranks, steps(corpus, tmp_path, 2, **size), 2)
    checkpoint = tmp_path / "checkpoints" / "iter_0000002"
    for path, mode in ((checkpoint, 0o775), (checkpoint / "__1_0.distcp", 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(RankError, match=rf"{path.name}: others can change it \(its mode is {mode:04o}\).*chmod"):
            curve(fresh_ranks, steps(corpus, tmp_path, 4, **size), 2)
        path.chmod(before)
    checkpoint.chmod(0o777)
    lines = curve(fresh_ranks, steps(corpus, tmp_path, 4, checkpoint__trust_unsigned=True, **size), 2)
    assert values(lines, "step") == [1, 2, 3, 4]


def train_with_checkpoints_elsewhere(settings: str, folder: str) -> dict[str, Any]:
    """In a rank: train, where rank 1 sees another folder under the name of the output folder."""
    if os.environ["RANK"] == "1":
        RunFiles(Path(folder)).create()
        checkpoint_folder._SEEN_SECONDS = 0.1
        checkpoint_folder.RunFiles = lambda _: RunFiles(Path(folder))  # type: ignore
    return train_here(settings)


@pytest.mark.fault(
    fault="nodes see different folders under the name of output.folder",
    happens="it is bad input before the first step, not at the first checkpoint",
    lost="nothing",
    printed="the folder, and what to give",
)
def test_nodes_that_do_not_share_the_output_folder_are_told(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = steps(corpus, tmp_path / "run", 2, context_parallel_suite__context_parallel_size=2)
    with pytest.raises(
        RankError, match=r"rank 1 sees another folder of that name than the first rank; give an output\.folder"
    ):
        fresh_ranks.run(2, train_with_checkpoints_elsewhere, settings.model_dump_json(), str(tmp_path / "other"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def train_among_posers(settings: str, does: str, mark: str) -> dict[str, Any]:
    """In a rank: train, where somebody poses as rank 1, and sends a pickle instead of its part of a checkpoint, or as
    rank 0, and tells rank 1 to write elsewhere or less."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    from mindspeed_cp.train.rank_messages import MessageWriter

    prepare_global_plan = FileSystemWriter.prepare_global_plan

    def crafted_plans(self: FileSystemWriter, plans: list[Any]) -> list[Any]:
        first, second = prepare_global_plan(self, plans)
        if does == "less":
            return [first, replace(second, items=second.items[1:])]
        return [first, replace(second, storage_data=_StoragePrefix(mark))]

    if does != "pickle":
        FileSystemWriter.prepare_global_plan = crafted_plans  # type: ignore[method-assign]
    elif os.environ["RANK"] == "1":
        MessageWriter.dump = lambda self, _: self._file.write(pickle.dumps(Crafted(Path(mark))))  # type: ignore
    return train_here(settings)


@pytest.mark.fault(
    fault="somebody poses as a rank, and sends a crafted pickle, or tells another where to write",
    happens="ranks read no pickles from each other, and write their whole part of a checkpoint and no other; the run ends",
    lost="the steps since the newest checkpoint",
    printed="that a message is not one of ranks, or not of this rank's part",
)
@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("pickle", "a message of another rank is not one that ranks write"),
        ("elsewhere", "rank 1: was told to write what is not its part of a checkpoint"),
        ("less", "ranks wrote other parts of the checkpoint than was planned"),
    ],
)
def test_somebody_who_poses_as_a_rank_runs_and_writes_nothing(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, does: str, error: str
) -> None:
    settings = steps(corpus, tmp_path / "run", 2, context_parallel_suite__context_parallel_size=2)
    with pytest.raises(RankError, match=error):
        fresh_ranks.run(2, train_among_posers, settings.model_dump_json(), does, str(tmp_path / "mark"))
    assert not list(tmp_path.glob("mark*"))


def test_digests_that_another_rank_sends_are_those_that_are_signed(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve(fresh_ranks, steps(corpus, tmp_path, 2), 1)
    folder = tmp_path / "checkpoints" / "iter_0000002"
    held = HeldFolder(folder)
    digests = json.loads((folder / "digests.json").read_text())["files"]
    for needs_key in (True, False):
        check_sent_digests(held, folder.name, digests, needs_key=needs_key)
        for other in (digests | {"common.pt": "0" * 64}, {}):
            with pytest.raises(PeerError, match="iter_0000002: the first rank sent other digests"):
                check_sent_digests(held, folder.name, other, needs_key=needs_key)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key of another machine"))
    for _ in range(2):
        check_sent_digests(held, folder.name, digests, needs_key=False)  # the first rank's word counts
        signing_key()
    with pytest.raises(UnsignedCheckpointError):
        check_sent_digests(held, folder.name, digests, needs_key=True)
    with pytest.raises(PeerError, match=r"names '?\"?\.\./\.\./else'?\"?, which is no checkpoint"):
        checkpoint_name("../../else")
