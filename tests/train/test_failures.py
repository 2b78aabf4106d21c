"""How a run that fails ends: the kind, one line and the exit code, and which rank's error is the cause."""

from __future__ import annotations

import resource
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device import open_files
from mindspeed_cp.errors import ConfigError, DivergenceError, PeerError, PlanError
from mindspeed_cp.train import launch
from mindspeed_cp.train.failures import classify_error, is_lost_rank_error
from mindspeed_cp.train.launch import Failure, name_lost_ranks, verdict
from mindspeed_cp.train.world import World


def test_errors_become_kind_line_and_exit_code() -> None:
    assert classify_error(ConfigError("a")) == ("input", "a", 2)
    assert classify_error(PlanError("b")) == ("input", "b", 2)
    assert classify_error(DivergenceError("d")) == ("divergence", "d", 1)
    assert classify_error(PeerError("c")) == ("peer", "c", 1)
    assert classify_error(PermissionError(13, "Permission denied", "a.txt")) == ("files", "a.txt: Permission denied", 1)
    assert classify_error(KeyError("d")) == ("bug", "KeyError: 'd'", 1)


def test_error_of_the_disk_is_one_line() -> None:
    full = OSError(28, "No space left on device")
    line = "No space left on device; free some space, and the same command goes on from the newest checkpoint"
    outer = RuntimeError("while saving")
    outer.__cause__ = full
    for error in (full, outer):
        assert classify_error(error) == ("files", line, 1)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (OSError(24, "Too many open files"), "ulimit -n"),
        (RuntimeError("epoll_create: Too many open files\nstack"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(27, "File too large"), "ulimit -f"),
    ],
)
def test_limit_of_the_system_names_its_remedy(error: Exception, part: str) -> None:
    kind, line, code = classify_error(error)
    assert (kind, code) == ("files", 1) and part in line and "\n" not in line


def test_too_low_limit_of_open_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 100))
    with pytest.raises(ConfigError, match=r"ulimit -n = 100: 2 ranks need up to 152 open files each"):
        open_files.check_open_files(2)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv", True),
        ("Gloo connectFullMesh failed with no error", True),
        ("TCPStore(ip - 127.0.0.1): failed to connect", True),
        ("could not restore tensor from storage", False),
        ("timed out waiting for the GPU", False),
    ],
)
def test_only_error_of_a_connection_means_lost_peer(text: str, lost: bool) -> None:
    assert is_lost_rank_error(RuntimeError(text)) is lost


def test_lost_ranks_are_those_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "NAMING_SECONDS", 0.05)
    store = dist.HashStore()
    settings = Settings(context_parallel_suite={"timeout_seconds": 9.0})  # type: ignore[arg-type]
    world = World(settings, 1, 4, torch.device("cpu"), 1, 0, 1, 0, 1, store)
    lost = str(name_lost_ranks(world, RuntimeError("closed")))
    silent = "dead, or silent for 9 s (context_parallel_suite.timeout_seconds)"
    assert lost.startswith(f"rank 1 lost ranks 0, 2, 3: {silent}; the same command goes on") and "(closed)" in lost
    for rank in (2, 3):
        store.set(f"mindspeed_cp/lost_a_peer/{rank}", "here")
    assert str(name_lost_ranks(world, RuntimeError("closed"))).startswith(f"rank 1 lost rank 0: {silent}")


KILLED = Failure("killed", "(process 100) was killed by SIGKILL", 1)
LOST = Failure("peer", "rank 0 lost rank 1", 0)


@pytest.mark.parametrize(
    ("failures", "stop_signal", "code", "expected"),
    [
        (
            [LOST, KILLED],
            None,
            1,
            "rank 1 (process 100) was killed by SIGKILL, and the other ranks were stopped; the same",
        ),
        ([LOST], None, 1, "rank 0 lost rank 1"),
        ([LOST, Failure("input", "bad lr", 1)], None, 2, "bad lr"),
        ([LOST, Failure("bug", "KeyError", 1)], None, 1, "rank 1 failed: KeyError"),
        ([LOST, Failure("device", "refused", 0)], None, 1, "rank 0 failed: refused"),
        ([LOST, Failure("aborted", "(process 100) aborted", 1)], None, 1, "rank 1 (process 100) aborted"),
        ([Failure("terminated", "(process 100) was killed by SIGTERM", 0)], None, 1, "rank 0 (process 100) was killed"),
        (
            [Failure("terminated", "was killed by SIGTERM", 0), LOST],
            "SIGTERM",
            0,
            "stopped by SIGTERM; the same command",
        ),
        ([KILLED], "SIGTERM", 1, "rank 1 (process 100) was killed by SIGKILL"),
    ],
)
def test_verdict_names_the_likeliest_cause(
    failures: list[Failure], stop_signal: str | None, code: int, expected: str
) -> None:
    outcome, line = verdict(failures, stop_signal)
    assert outcome == code and line.startswith(expected)


def _ends_by_itself(code: int) -> None:
    sys.exit(code)


def test_only_the_first_rank_and_those_with_a_note_have_failed(tmp_path: Path) -> None:
    """Not a rank that the launcher had to kill."""
    fork = get_context("fork")
    processes = [fork.Process(target=_ends_by_itself, args=(code,)) for code in (3, 1, 1)]
    for process in processes:
        process.start()
        process.join()
    (tmp_path / "rank2").write_text('["divergence", "step 3: NaN"]')
    first, noted = launch._failures(0, processes, tmp_path)
    assert first.line.endswith("ended with exit code 3") and noted == Failure("divergence", "step 3: NaN", 2)
