"""How a run that fails ends: the kind, one line and the exit code, and which rank's error is the cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mindspeed_cp.errors import ConfigError, DivergenceError, PeerError, PlanError
from mindspeed_cp.train.exit_note import EXIT_NOTE, write_exit_note
from mindspeed_cp.train.failures import classify_error, is_lost_rank_error
from mindspeed_cp.train.launch import _classify_failures
from mindspeed_cp.train.local_agent import RankFailure, read_failure
from mindspeed_cp.train.lost_ranks import name_lost_ranks
from mindspeed_cp.train.world import World


def test_errors_become_a_kind_a_line_and_an_exit_code() -> None:
    assert classify_error(ConfigError("a")) == ("input", "a", 2)
    assert classify_error(PlanError("b")) == ("input", "b", 2)
    assert classify_error(DivergenceError("d")) == ("divergence", "d", 1)
    assert classify_error(PeerError("c")) == ("peer", "c", 1)
    assert classify_error(PermissionError(13, "Permission denied", "a.txt")) == ("files", "a.txt: Permission denied", 1)
    assert classify_error(KeyError("d")) == ("bug", "KeyError: 'd'", 1)
    assert is_lost_rank_error(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"))
    assert not is_lost_rank_error(RuntimeError("shape mismatch"))


def test_of_several_ranks_without_a_word_some_may_wait_for_the_dead_one() -> None:
    """Stages of a pipeline notice a death only when their neighbours end."""
    store = dist.HashStore()
    world = World(1, 4, torch.device("cpu"), 1, 0, 1, 0, 4, 1, store, stages=4, stage=1)
    lost = str(name_lost_ranks(world, RuntimeError("closed"), wait=0.05))
    assert lost == (
        "rank 1 lost ranks 0, 2, 3: dead, silent for longer than the time-out, or waiting for a rank that is (closed)"
    )
    for rank in (2, 3):
        store.set(f"mindspeed_cp/lost_a_peer/{rank}", "here")
    lost = str(name_lost_ranks(world, RuntimeError("closed"), wait=0.05))
    assert lost == "rank 1 lost rank 0: dead, or silent for longer than the time-out (closed)"


@dataclass(frozen=True)
class Failed:
    """How a rank ended: what it had put on record, if anything, and the second in which it did so or was found dead."""

    code: int
    kind: str | None
    text: str
    seconds: int


def failure(code: int, kind: str | None = None, text: str = "", seconds: int = 0) -> Failed:
    return Failed(code, kind, text, seconds)


def recorded(failed: Failed, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the record of a rank at the second in which it ended."""
    with monkeypatch.context() as patched:
        patched.setattr("time.time", lambda: float(failed.seconds))
        patched.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if failed.kind:
            write_exit_note(failed.kind, failed.text)


def seen_by_the_agent(
    failures: dict[int, Failed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, RankFailure]:
    """As the launcher reads it, from real records of the ranks."""
    results = {}
    for rank, failed in failures.items():
        path = folder / f"record{rank}"
        recorded(failed, path, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr("time.time", lambda failed=failed: float(failed.seconds))
            results[rank] = read_failure(rank, 100, failed.code, path)
    return results


def seen_by_torchrun(
    failures: dict[int, Failed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, ProcessFailure]:
    """As the agent of torchrun reads it, from the same records."""
    results = {}
    for rank, failed in failures.items():
        path = folder / f"record{rank}"
        recorded(failed, path, monkeypatch)
        results[rank] = ProcessFailure(rank, 100, failed.code, str(path))
    return results


@pytest.mark.parametrize(
    ("failures", "asked", "code", "expected"),
    [
        ({0: failure(1, "peer", "lost rank 1"), 1: failure(-9)}, [], 1, "rank 1 (process 100) was killed by SIGKILL"),
        ({0: failure(-6), 1: failure(-9)}, [], 1, "rank 1 (process 100) was killed by SIGKILL"),
        (
            {0: failure(-6, seconds=1), 1: failure(-6)},
            [],
            1,
            "rank 1 (process 100) aborted (SIGABRT): on NPUs torch_npu does that when an operation of HCCL fails or a peer does not answer within context_parallel_suite.timeout_seconds or HCCL_EXEC_TIMEOUT, on GPUs torch for NCCL and context_parallel_suite.timeout_seconds",
        ),
        (
            {0: failure(1, "peer", "lost rank 1", 3), 1: failure(-9)},
            [],
            1,
            "rank 1 (process 100) was killed by SIGKILL",
        ),
        ({0: failure(1, "peer", "lost rank 1", 3), 1: failure(-9, seconds=30)}, [], 1, "lost rank 1"),
        ({0: failure(2, "input", "bad lr"), 1: failure(1, "peer", "lost rank 0")}, [], 2, "bad lr"),
        ({0: failure(1, "peer", "lost rank 1"), 1: failure(1, "bug", "KeyError")}, [], 1, "rank 1 failed: KeyError"),
        ({0: failure(-15), 1: failure(1, "peer", "lost rank 0")}, [], 1, "lost rank 0"),
        ({0: failure(-15), 1: failure(-15)}, [], 1, "rank 0 (process 100) was killed by SIGTERM"),
        ({0: failure(-15), 1: failure(-15)}, ["SIGTERM"], 0, "stopped by SIGTERM; the same command goes on"),
        ({0: failure(-9, seconds=30), 2: failure(-9)}, [], 1, "rank 2 (process 100) was killed by SIGKILL"),
        ({2: failure(-11), 3: failure(-15)}, [], 1, "rank 2 (process 100) was killed by SIGSEGV"),
        ({1: failure(3)}, [], 1, "rank 1 failed: (process 100) ended with exit code 3"),
        (
            {0: failure(-6, EXIT_NOTE, "last words")},
            [],
            1,
            "rank 0 (process 100) aborted (SIGABRT): on NPUs torch_npu",
        ),
        ({0: failure(-9, EXIT_NOTE, "last words"), 1: failure(1, "peer", "lost")}, [], 1, "was killed by SIGKILL"),
        (  # the agent killed a rank that hung, half a minute after the others had given it up
            {1: failure(1, "peer", "lost rank 0", 600), 0: failure(-9, EXIT_NOTE, "last words")},
            [],
            1,
            "lost rank 0",
        ),
        (  # it died first, and then the others lost it
            {1: failure(-9, EXIT_NOTE, "last words"), 0: failure(1, "peer", "lost rank 1", 600)},
            [],
            1,
            "rank 1 (process 100) was killed by SIGKILL",
        ),
        (  # and when all have last words, the first that was found dead
            {2: failure(-9, EXIT_NOTE, "last words"), 0: failure(-9, EXIT_NOTE, "last words")},
            [],
            1,
            "rank 2 (process 100) was killed by SIGKILL",
        ),
        ({0: failure(1, "device", "refused"), 1: failure(1, "peer", "lost")}, [], 1, "rank 0 failed: refused"),
    ],
)
def test_the_verdict_names_the_cause(
    failures: dict[int, Failed],
    asked: list[str],
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure, line = _classify_failures(seen_by_the_agent(failures, tmp_path, monkeypatch), asked)
    assert failure == code and expected in line and "\n" not in line


def test_torchrun_takes_no_last_words_for_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written at the start, long before what really ended the run."""
    failures = {0: failure(-6, EXIT_NOTE, "last words", 100), 1: failure(1, "device", "refused", 900)}
    error = ChildFailedError("train", seen_by_torchrun(failures, tmp_path, monkeypatch))
    rank, cause = error.get_first_failure()
    assert rank == 1 and cause.message["message"] == "refused"  # type: ignore[index]
    assert "refused" in str(error).split("Root Cause")[1] and "last words" in str(error).split("Root Cause")[0]
