"""Ranks and launchers that are killed, stopped or stand still: what the run leaves, and what it says.

Each makes the fault with real processes, and goes on from what is left with the same bits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_cp.train.run_files import read_metrics
from tests.limits import wait_until
from tests.train.fresh_ranks import FreshRanks
from tests.train.runs import COMMAND, Run, write
from tests.train.test_training import curve, tiny, values

LONG: dict[str, Any] = {
    "train__train_iters": 100000,  # never over before a fault comes
    "train__lr_decay_iters": 100000,
    "context_parallel_suite__context_parallel_size": 2,
    "checkpoint__save_interval": 5,
}


def newest(folder: Path) -> int:
    """The step of the checkpoint that `latest` names."""
    return int((folder / "checkpoints" / "latest").read_text().removeprefix("iter_"))


def begun(start: Callable[..., Run], corpus: Path, folder: Path, **more: Any) -> tuple[Run, list[psutil.Process]]:
    """A run of two ranks after its sixth step, and its ranks."""
    folder.mkdir(parents=True)
    run = start(*COMMAND, write(tiny(corpus, folder, **{**LONG, **more}), folder))
    run.wait_for_step(folder, 6)
    return run, run.ranks()


def assert_goes_on(fresh_ranks: FreshRanks, corpus: Path, folder: Path) -> None:
    """What is left goes on to the curve of a run without the fault, with the same bits; at most one interval is lost."""
    done, saved = read_metrics(folder / "metrics.jsonl")[-1]["step"], newest(folder)
    assert saved >= done - 5
    long = {**LONG, "train__train_iters": saved + 2, "checkpoint__save_interval": 0}
    parts = curve(fresh_ranks, tiny(corpus, folder, **long), 2)
    whole = curve(fresh_ranks, tiny(corpus, folder / "whole", **long), 2)
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "documents"):
        assert values(parts, key) == values(whole, key), key


@pytest.mark.fault(
    fault="a rank is killed (kill -9)",
    happens="the others are ended; the same command goes on from the newest checkpoint, with the same bits",
    lost="the steps since that checkpoint",
    printed="rank 1 was killed by SIGKILL",
)
def test_killed_rank_is_named_and_run_goes_on_bit_equal(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    run, ranks = begun(start, corpus, tmp_path / "run")
    ranks[1].kill()
    code, _, errors = run.end()
    assert code == 1 and len(errors) == 1, errors
    assert errors[0].startswith(f"error: rank 1 (process {ranks[1].pid}) was killed by SIGKILL")
    assert "the same command goes on" in errors[0]
    assert not any(rank.is_running() for rank in ranks)
    assert_goes_on(fresh_ranks, corpus, tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.fault(
    fault="the launcher is killed (kill -9)",
    happens="its ranks finish their step, save a checkpoint and end",
    lost="nothing",
    printed="stopped by the death of the launcher",
)
def test_no_rank_outlives_killed_launcher(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    run, ranks = begun(start, corpus, tmp_path / "run")
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not any(rank.is_running() for rank in ranks), "end of the ranks")
    assert newest(tmp_path / "run") == read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert_goes_on(fresh_ranks, corpus, tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.fault(
    fault="the launcher and all ranks are killed (kill -9)",
    happens="the same command goes on from the newest checkpoint, with the same bits",
    lost="the steps since that checkpoint",
    printed="nothing",
)
def test_run_goes_on_after_all_processes_were_killed(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    run, _ = begun(start, corpus, tmp_path / "run")
    os.killpg(run.process.pid, signal.SIGKILL)
    run.end()
    assert_goes_on(fresh_ranks, corpus, tmp_path / "run")


@pytest.mark.fault(
    fault="SIGTERM (or SIGINT, SIGHUP) to the launcher; no port of the run listens beyond loopback",
    happens="all ranks finish their step and save a checkpoint; exit code 0",
    lost="nothing",
    printed="stopped by SIGTERM after step N",
)
def test_sigterm_ends_the_step_and_saves_and_ports_are_of_loopback(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    run, ranks = begun(start, corpus, tmp_path / "run")
    sockets = [c for rank in ranks for c in rank.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in sockets} <= {"127.0.0.1", "::1"}, sockets
    assert not psutil.Process(run.process.pid).net_connections("inet")
    run.process.terminate()
    code, out, errors = run.end()
    step = newest(tmp_path / "run")
    assert (code, errors) == (0, []), (out, errors)
    assert f"stopped by SIGTERM after step {step}" in out
    assert step == read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]


@pytest.mark.thorough
@pytest.mark.fault(
    fault="a rank stands still (SIGSTOP)",
    happens="the others end at the time-out, and the launcher kills it",
    lost="the steps since the newest checkpoint",
    printed="rank 0 lost rank 1: dead, or silent for 8 s",
)
def test_rank_that_stands_still_is_named_as_silent(corpus: Path, tmp_path: Path, start: Callable[..., Run]) -> None:
    run, ranks = begun(start, corpus, tmp_path / "run", context_parallel_suite__timeout_seconds=8.0)
    ranks[1].suspend()
    code, _, errors = run.end()
    assert code == 1 and len(errors) == 1, errors
    assert errors[0].startswith("error: rank 0 lost rank 1: dead, or silent for 8 s"), errors
    assert not any(rank.is_running() for rank in ranks)
    assert newest(tmp_path / "run") >= 5
