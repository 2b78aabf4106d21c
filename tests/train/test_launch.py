"""The command `train` as people run it: real processes, killed, stopped, misled, and what it says then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import PeerError
from mindspeed_cp.train.run_files import read_metrics
from tests.limits import HANG, wait_until
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_training import curve, tiny, train_here, values

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "mindspeed_cp.cli.main", "train"]


def write(settings: Settings, folder: Path) -> Path:
    path = folder / "settings.yaml"
    path.write_text(settings.model_dump_json())  # JSON is YAML
    return path


class Run:
    """`mindspeed-cp train` in the background."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition holds, and return its value; fail if the run ends before."""

        def check() -> None:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before {what}: {self.process.communicate()}")

        return wait_until(condition, what, check)

    def ranks(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "mindspeed_cp.train.worker" in p.cmdline()]

    def end(self) -> tuple[int, str, list[str]]:
        """Return exit code, output, and lines of standard error."""
        out, err = self.process.communicate(timeout=HANG)
        return self.process.returncode, out, err.splitlines()

    def close(self) -> None:
        if self.process.poll() is None:
            family = [self.process.pid, *(p.pid for p in self.ranks())]
            for pid in family:
                os.kill(pid, signal.SIGKILL)
            self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Start a run that is certain to end with the test."""
    runs: list[Run] = []

    def begin(*command: object) -> Run:
        runs.append(Run(*command))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.mark.thorough  # resumes, kills and signals have tests of their own
def test_kill_then_stop_then_finish_gives_the_curve_of_an_uninterrupted_run(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    long: dict[str, Any] = {
        "train__train_iters": 100000,  # never over before a signal comes
        "train__lr_decay_iters": 100000,
        "context_parallel_suite__context_parallel_size": 2,
        "checkpoint__save_interval": 5,
    }
    folder = tmp_path / "interrupted"
    path = write(tiny(corpus, folder, **long), tmp_path)

    def steps() -> int:
        return len(read_metrics(folder / "metrics.jsonl"))

    run = start(*COMMAND, path)  # 1: one of the ranks is killed
    run.wait_for(lambda: steps() >= 6, "step 6")
    victim = run.ranks()[1].pid
    os.kill(victim, signal.SIGKILL)
    code, _, errors = run.end()  # at once: the ranks' own time-out is HANG
    assert code == 1
    assert len(errors) == 1, errors
    assert errors[0].startswith(f"error: rank 1 (process {victim}) was killed by SIGKILL")
    assert "the same command goes on" in errors[0]
    before = int((folder / "checkpoints" / "latest").read_text().removeprefix("iter_"))
    assert before >= 5

    metrics = folder / "metrics.jsonl"
    lines_of_the_first_start = metrics.stat().st_ino  # replaced by the second one, which removes those after `before`
    run = start(*COMMAND, path)  # 2: the same command goes on, and is asked to stop
    run.wait_for(
        lambda: metrics.stat().st_ino != lines_of_the_first_start and steps() >= before + 2, f"step {before + 2}"
    )
    run.process.terminate()
    code, out, errors = run.end()
    assert (code, errors) == (0, []), (out, errors)
    stopped = int((folder / "checkpoints" / "latest").read_text().removeprefix("iter_"))
    assert before < stopped and stopped == steps()
    assert f"stopped by SIGTERM after step {stopped}" in out and "imbalance" in out
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] == "SIGTERM"

    long["train__train_iters"] = stopped + 5
    long["checkpoint__save_interval"] = 0
    parts = curve(fresh_ranks, tiny(corpus, folder, **long), 2)  # 3: to the end
    whole = curve(fresh_ranks, tiny(corpus, tmp_path / "whole", **long), 2)
    assert len(whole) == stopped + 5
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "documents"):
        assert values(parts, key) == values(whole, key), key


def test_a_rank_that_refuses_ends_the_run_with_its_one_line(
    corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    settings = tiny(corpus, tmp_path / "run", model__init_method_std=1e38)
    code, out, errors = start(*COMMAND, write(settings, tmp_path), "--json").end()
    assert (code, out) == (1, "")
    assert len(errors) == 1 and errors[0].startswith("error: step 1: the loss is NaN on rank 0 of 1"), errors
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


@pytest.mark.thorough  # tests/launch_scripts/test_training.py starts the ranks by torchrun too
def test_torchrun_starts_the_ranks_too(corpus: Path, tmp_path: Path, start: Callable[..., Run]) -> None:
    settings = tiny(
        corpus, tmp_path / "run", train__train_iters=3, train__lr_warmup_iters=0,
        context_parallel_suite__context_parallel_size=2,
    )  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    code, out, errors = start(
        *torchrun, "-m", "mindspeed_cp.cli.main", "train", write(settings, tmp_path), "--json"
    ).end()
    assert code == 0, errors
    summary = json.loads(out)
    assert summary["step"] == 3 and summary["stopped_by"] is None
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def dies_in_step_3(settings: str) -> str:
    """In a rank: rank 1 kills itself while the others wait for it."""
    from mindspeed_cp.train import lost_ranks
    from mindspeed_cp.train.micro_batch_loader import MicroBatch, MicroBatchLoader
    from mindspeed_cp.train.worker import run_rank

    made, name_lost_ranks = MicroBatchLoader._make, lost_ranks.name_lost_ranks

    def when_the_other_survivor_knows(world: Any, error: BaseException) -> PeerError:
        """The time to wait for other survivors ends when the other one has noticed, on however busy a machine."""
        survivor, looks = 2 - world.rank, 0

        def monotonic() -> float:
            nonlocal looks
            if looks or world.store.check([f"{lost_ranks._KEY}/{survivor}"]):
                looks += 1
            return 0.0 if looks < 3 else 1e9  # after one more look at all keys

        lost_ranks.time = SimpleNamespace(sleep=time.sleep, monotonic=monotonic)  # type: ignore[assignment]
        return name_lost_ranks(world, error)

    lost_ranks.name_lost_ranks = when_the_other_survivor_knows

    def fatal(self: MicroBatchLoader, row: Any) -> MicroBatch:
        if row.index == 4 and self._world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(self, row)

    MicroBatchLoader._make = fatal  # type: ignore[method-assign]
    try:
        run_rank(Settings.model_validate_json(settings), as_json=False)
    except PeerError as error:
        raise RuntimeError(f"as it should: {error}") from None
    raise AssertionError("the death of rank 1 was not noticed")


def test_survivors_name_the_dead_rank(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = tiny(corpus, tmp_path, context_parallel_suite__context_parallel_size=3)
    with pytest.raises(RankError) as caught:
        fresh_ranks.run(3, dies_in_step_3, settings.model_dump_json())
    text = str(caught.value)
    assert "rank 1: the process was killed by SIGKILL" in text
    for rank in (0, 2):
        assert f"as it should: rank {rank} lost rank 1: dead, or silent" in text, text


def test_two_runs_never_share_a_folder(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    from mindspeed_cp.train.run_files import RunFiles

    files = RunFiles(tmp_path)
    files.create()
    settings = tiny(corpus, tmp_path)
    with files.locked(), pytest.raises(RankError, match="another run is using it"):
        fresh_ranks.run(1, train_here, settings.model_dump_json())


def test_input_is_checked_before_ranks_are_started(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fresh_ranks: FreshRanks,
) -> None:
    from mindspeed_cp.cli import main as cli
    from mindspeed_cp.train import launch

    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "_launch", started)
    folder = tmp_path / "run"
    curve(fresh_ranks, tiny(corpus, folder, train__train_iters=1, train__lr_warmup_iters=0, train__min_lr=0.0), 1)
    good = tiny(corpus, folder, train__train_iters=1, train__lr_warmup_iters=0, train__min_lr=0.0)
    path = write(good, tmp_path)
    for arguments, expected in (
        (["--nproc", "3", "--set", "context_parallel_suite.context_parallel_size=2"], "3 ranks do not fit"),
        (["--nproc", "4"], "train.global_batch_size = 2: must be a multiple of the 4 replicas"),
        (["--set", "data.corpus=/no/such/corpus"], "/no/such/corpus"),
        (["--set", f"data.corpus={tmp_path}/none.txt"], "none.txt"),
        (["--set", "data.seq_length=900000000"], "data.seq_length = 900000000: does not fit"),
        (["--no-resume"], "checkpoint.resume = false"),
        (
            ["--set", "train.lr=0.5", "--set", "model.num_layers=3"],
            "model.num_layers was 2 and is 3; resume with the old settings",
        ),
        (["--set", "output.folder=/proc/run"], "output.folder = /proc/run: cannot be created"),
    ):
        assert cli.run(["train", str(path), *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
        assert expected in captured.err
    (folder / "checkpoints" / "iter_0000001" / "run.json").unlink()
    assert cli.run(["train", str(path)]) == 2
    assert "iter_0000001: is damaged (run.json: No such file" in capsys.readouterr().err
