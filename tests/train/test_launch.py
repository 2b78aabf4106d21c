"""The command `train`: what it checks, and ranks that torchrun starts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.train import launch
from mindspeed_cp.train.run_files import read_metrics
from tests.processes import RankError
from tests.train.fresh_ranks import FreshRanks
from tests.train.runs import Run, write
from tests.train.test_training import tiny


def test_torchrun_starts_ranks(corpus: Path, tmp_path: Path, start: Callable[..., Run]) -> None:
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
    from mindspeed_cp.train.micro_batch_loader import MicroBatch, MicroBatchLoader

    made, name_lost_ranks = MicroBatchLoader._make, launch.name_lost_ranks

    def when_the_other_survivor_knows(world: Any, error: BaseException) -> PeerError:
        """The time to wait for other survivors ends when the other one has noticed, on however busy a machine."""
        survivor, looks = 2 - world.rank, 0

        def monotonic() -> float:
            nonlocal looks
            if looks or world.store.check([f"{launch._KEY}/{survivor}"]):
                looks += 1
            return 0.0 if looks < 3 else 1e9  # after one more look at all keys

        launch.time = SimpleNamespace(sleep=time.sleep, monotonic=monotonic)  # type: ignore[assignment]
        return name_lost_ranks(world, error)

    launch.name_lost_ranks = when_the_other_survivor_knows

    def fatal(self: MicroBatchLoader, row: Any) -> MicroBatch:
        if row.index == 4 and self._world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(self, row)

    MicroBatchLoader._make = fatal  # type: ignore[method-assign]
    try:
        launch.run_rank(Settings.model_validate_json(settings), as_json=False)
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nproc", "3", "--set", "context_parallel_suite.context_parallel_size=2"], "3 ranks do not fit"),
        (["--nproc", "4"], "train.global_batch_size = 2: must be a multiple of the 4 replicas"),
    ],
)
def test_input_is_checked_before_ranks_are_started(
    words: list[str],
    expected: str,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mindspeed_cp.cli import main as cli

    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "_run_local_ranks", started)
    path = write(tiny(corpus, tmp_path / "run"), tmp_path)
    assert cli.run(["train", str(path), *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    assert expected in captured.err


def refusals(settings: list[str]) -> list[str]:
    lines = []
    for one_settings in settings:
        with pytest.raises(ConfigError) as caught:
            launch.run_rank(Settings.model_validate_json(one_settings), as_json=True)
        lines.append(str(caught.value))
    return lines


def test_rank_refuses_corpus_and_folder_in_one_line(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    cases = [
        (tiny(Path("/no/such/corpus"), tmp_path / "run"), "/no/such/corpus"),
        (tiny(corpus, Path("/proc/run")), "output.folder = /proc/run: cannot be created"),
    ]
    [lines] = fresh_ranks.run(1, refusals, [settings.model_dump_json() for settings, _ in cases])
    for line, (_, expected) in zip(lines, cases, strict=True):
        assert expected in line and "\n" not in line
