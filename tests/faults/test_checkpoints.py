"""A lost `latest`, flipped bits and faults while a checkpoint is written: the run goes on from the newest whole one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.train.checkpoint_digests import KEY_VARIABLE
from mindspeed_cp.train.run_files import iter_metrics
from tests.limits import HANG
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

STEPS: dict[str, Any] = {"train__lr_decay_iters": 6, "checkpoint__save_interval": 2, "checkpoint__keep": 3}


def steps(corpus: Path, folder: Path, last: int, **more: Any) -> Any:
    return tiny(corpus, folder, **STEPS, train__train_iters=last, **more)


@pytest.fixture(scope="module")
def whole(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Six steps of two ranks without a fault."""
    settings = steps(corpus, tmp_path_factory.mktemp("whole"), 6, context_parallel_suite__context_parallel_size=2)
    return curve(fresh_ranks, settings, 2)


def same_curve(lines: list[dict[str, Any]], whole: list[dict[str, Any]]) -> bool:
    return all(values(lines, key) == values(whole, key) for key in ("step", "loss", "grad_norm", "lr", "tokens"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)


@pytest.mark.fault(
    fault="`latest` is lost, and the newest checkpoint is damaged",
    happens="the run goes on from the newest whole checkpoint, with the same bits",
    lost="the steps since that checkpoint",
    printed="what is missing, what is damaged, and where it goes on",
)
def test_a_run_without_latest_whose_newest_checkpoint_is_damaged_goes_on_bit_equal(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    size = {"context_parallel_suite__context_parallel_size": 2}
    curve(fresh_ranks, steps(corpus, tmp_path, 4, **size), 2)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "latest").unlink()
    flip(checkpoints / "iter_0000004" / "__1_0.distcp")
    assert same_curve(curve(fresh_ranks, steps(corpus, tmp_path, 6, **size), 2), whole)
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["iter_0000002", "iter_0000004", "iter_0000006", "latest"]


def train_with_own_key(settings: str, folder: str) -> dict[str, Any]:
    """In a rank: train, as on a machine of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ[KEY_VARIABLE] = f"{folder}/key of rank {os.environ['RANK']}"
    return train_here(settings)


@pytest.mark.thorough
@pytest.mark.fault(
    fault="the key of checkpoints is on the first rank's machine alone",
    happens="the first rank chooses the checkpoint for all",
    lost="nothing",
    printed="nothing",
)
def test_the_key_of_the_first_ranks_machine_counts(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    key = tmp_path / "key of rank 1"
    for last in (2, 4, 6):
        settings = steps(corpus, tmp_path / "run", last, context_parallel_suite__context_parallel_size=2)
        results = fresh_ranks.run(2, train_with_own_key, settings.model_dump_json(), str(tmp_path))
        assert key.exists() == (last == 6)
        if last == 4:  # of runs that this machine has begun
            key.touch(0o600)
            key.write_bytes(bytes(32))
    assert same_curve(results[0]["lines"], whole)


@pytest.mark.fault(
    fault="the folder has checkpoints of another run",
    happens="they stay, and a start over them is refused",
    lost="nothing",
    printed="the checkpoint, and how to go on from it or start elsewhere",
)
def test_a_new_run_never_removes_the_checkpoints_of_another(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    curve(fresh_ranks, steps(corpus, tmp_path, 4), 1)
    (tmp_path / "checkpoints" / "latest").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RankError, match=r"resume = false: .* has the checkpoint iter_0000004"):
        curve(fresh_ranks, steps(corpus, tmp_path, 6, checkpoint__resume=False), 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "checkpoints" / "iter_0000004").is_dir()


def train_with_slow_writes(settings: str, folder: str, fault: str) -> dict[str, Any]:
    """In a rank: train, saving in the background. The shards of step 2 are written after step 3; those of step 4 are
    not, for `fault`: rank 1 is killed after step 5, or its disk is full."""
    from mindspeed_cp.train.checkpoint_saver import CheckpointSaver
    from mindspeed_cp.train.checkpoint_writer import InProcessSave

    rank, metrics, checkpoints = os.environ["RANK"], Path(folder, "metrics.jsonl"), Path(folder, "checkpoints")
    write, finish_if_written = InProcessSave.write, CheckpointSaver.finish_if_written

    def steps_done() -> int:
        return max((line["step"] for line in iter_metrics(metrics)), default=0)

    def slow_write(self: InProcessSave) -> None:
        if os.readlink(self._held.path).endswith(".saving-iter_0000002"):
            deadline = time.monotonic() + HANG
            while steps_done() < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            if (checkpoints / "latest").exists() or len(list(checkpoints.iterdir())) != 1:
                self._outcome = AssertionError("it has a name before it is written, or two are written at once")
                return
        elif rank == "1" and fault == "killed":
            threading.Event().wait()
        elif rank == "1":
            self._outcome = OSError(28, "No space left on device")
            return
        write(self)

    def killed(self: CheckpointSaver) -> None:
        if rank == "1" and fault == "killed" and self._begun is not None and self._begun.progress.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)  # after step 5
        finish_if_written(self)

    InProcessSave.write, CheckpointSaver.finish_if_written = slow_write, killed  # type: ignore[method-assign]
    return train_here(settings)


@pytest.mark.fault(
    fault="a rank is killed, or its disk is full, while a checkpoint is written in the background",
    happens="the run ends, and goes on from the checkpoint before",
    lost="the steps since that checkpoint",
    printed="rank 1 was killed by SIGKILL; cannot be written: No space left on device",
)
@pytest.mark.parametrize(
    ("fault", "error"),
    [("killed", "rank 1: .*SIGKILL"), pytest.param("full", "No space left", marks=pytest.mark.thorough)],
)
def test_a_fault_during_a_background_save_costs_nothing_else(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, whole: list[dict[str, Any]], fault: str, error: str
) -> None:
    """The checkpoint before was written in the background too, after a step that changed the weights."""
    size = {"context_parallel_suite__context_parallel_size": 2, "checkpoint__async_save": True}
    settings = steps(corpus, tmp_path, 6, **size)
    with pytest.raises(RankError, match=error):
        fresh_ranks.run(2, train_with_slow_writes, settings.model_dump_json(), str(tmp_path), fault)
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".saving-iter_0000004", "iter_0000002", "latest"]
    assert same_curve(curve(fresh_ranks, settings, 2), whole)
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["iter_0000002", "iter_0000004", "iter_0000006", "latest"]
