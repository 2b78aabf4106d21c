"""How ranks and their launcher end: full disks, lost peers, signals, closed terminals, odd environments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train import launch, worker
from mindspeed_cp.train.failures import classify_error, is_lost_rank_error
from mindspeed_cp.train.local_agent import local_ranks
from mindspeed_cp.train.stop_request import Stopped, StopRequest
from tests.limits import HANG
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_failures import Failed, failure, seen_by_the_agent
from tests.train.test_training import tiny, train_here


class Left(BaseException):
    """Instead of the end of this process; carries the exit code."""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a rank tells what ended it; `exit_process` raises Left."""

    def exit_process(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(worker, "exit_process", exit_process)
    monkeypatch.setattr(launch, "exit_process", exit_process)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP as a terminal's shell leaves it, also where the tests run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def raising(error: BaseException) -> Any:
    def run_rank(settings: Settings, *, as_json: bool) -> None:
        raise error

    return run_rank


# what ended a rank


def test_every_error_of_the_disk_is_one_line() -> None:
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    full = OSError(28, "No space left on device")
    line = "No space left on device; free some space, and the same command goes on from the newest checkpoint"
    assert classify_error(full) == ("files", line, 1)
    assert classify_error(OSError("cannot seek")) == ("files", "cannot seek", 1)
    assert classify_error(PermissionError(13, "Permission denied", "a")) == ("files", "a: Permission denied", 1)
    wrapped = CheckpointException("save", {1: _wrap_exception(full)})
    expected = ("files", f"the checkpoint of rank 1 cannot be written or read: {line}", 1)
    assert classify_error(wrapped) == expected
    for cause in (full, wrapped):
        outer = RuntimeError("while saving")
        outer.__cause__ = cause
        assert classify_error(outer) == classify_error(cause)
    torn = CheckpointException("save", {0: _wrap_exception(RuntimeError("PytorchStreamWriter failed"))})
    kind, line, code = classify_error(torn)
    assert (kind, code) == ("files", 1) and line.endswith("RuntimeError: PytorchStreamWriter failed")
    assert classify_error(CheckpointException("load", {0: _wrap_exception(ConfigError("bad"))}))[2] == 2
    chained = RuntimeError("a bug")
    chained.__cause__ = KeyError("x")
    assert classify_error(chained)[0] == "bug"


def test_a_full_disk_ends_a_rank_with_its_line(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fills_the_disk(settings: Settings, *, as_json: bool) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    monkeypatch.setattr(worker, "run_rank", fills_the_disk)
    monkeypatch.setattr(sys, "argv", ["worker", Settings().model_dump_json()])
    with pytest.raises(Left) as left:
        worker.main()
    assert left.value.args == (1,)
    message = json.loads(record.read_text())["message"]
    assert message["message"].startswith("No space left on device") and message["extraInfo"]["kind"] == "files"
    assert capsys.readouterr().err == ""  # no trace


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv", True),
        ("Gloo connectFullMesh failed with no error", True),
        ("TCPStore(ip - 127.0.0.1): failed to connect", True),
        ("could not restore tensor from storage", False),
        ("No backend type gloo supports this dtype", False),
        ("timed out waiting for the GPU", False),
    ],
)
def test_only_errors_of_a_connection_mean_a_lost_peer(text: str, lost: bool) -> None:
    assert is_lost_rank_error(RuntimeError(text)) is lost


@pytest.mark.parametrize(("rank", "expected"), [("0", "error: bad lr\n"), ("3", "error: rank 3: bad lr\n")])
def test_under_torchrun_every_rank_tells_what_ended_it(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, expected: str
) -> None:
    monkeypatch.setattr(launch, "run_rank", raising(ConfigError("bad lr")))
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(Left) as left:
        launch.run_under_launcher(Settings(), as_json=False)
    assert left.value.args == (2,) and capsys.readouterr().err == expected
    assert json.loads(record.read_text())["message"]["extraInfo"]["py_callstack"] == "bad lr"  # torchrun's report


# the launcher


def test_a_run_that_was_asked_to_stop_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(failures: dict[int, Failed], asked: list[str]) -> tuple[int, str]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return launch._classify_failures(seen_by_the_agent(failures, folder, monkeypatch), asked)

    lost, killed = failure(1, "peer", "lost rank 1"), failure(-9)
    code, line = verdict({0: lost, 1: failure(-15)}, ["SIGINT"])
    assert code == 0 and line.startswith("stopped by SIGINT; the same command goes on")
    assert verdict({0: failure(-1)}, ["SIGHUP"])[0] == 0
    assert verdict({0: lost, 1: killed}, ["SIGTERM"])[0] == 1
    assert verdict({0: failure(2, "input", "bad"), 1: lost}, ["SIGTERM"]) == (2, "bad")
    stopped = failure(1, "stopped", "stopped by SIGTERM while")
    assert verdict({0: stopped, 1: lost}, []) == (0, "stopped by SIGTERM while")


@pytest.mark.parametrize("asked", [["SIGTERM"], []])
def test_a_stopped_run_is_never_started_again(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = []

    def ends(settings: Settings, *rest: object, as_json: bool) -> tuple[int, str, list[str]]:
        starts.append(settings.checkpoint.resume)
        return 1, "rank 0 was killed", asked

    monkeypatch.setattr(launch, "preflight", lambda settings, ranks, nodes: None)
    monkeypatch.setattr(launch, "_launch", ends)
    settings = Settings(train={"max_restarts": 2})  # type: ignore[arg-type]
    assert launch.start_local_ranks(settings, 1, as_json=False) == 1
    assert len(starts) == (1 if asked else 3)
    assert capsys.readouterr().err.endswith("error: rank 0 was killed\n")


@pytest.mark.parametrize("as_json", [True, False])
def test_standard_output_holds_nothing_but_json(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "preflight", lambda settings, ranks, nodes: None)
    monkeypatch.setattr(launch, "_launch", lambda *a, **o: (0, "stopped by SIGTERM", ["SIGTERM"]))
    assert launch.start_local_ranks(Settings(), 1, as_json=as_json) == 0
    captured = capsys.readouterr()
    assert (captured.err if as_json else captured.out) == "stopped by SIGTERM\n"
    assert (captured.out if as_json else captured.err) == ""


@pytest.mark.usefixtures("hangups")
def test_a_closed_terminal_asks_the_ranks_to_stop() -> None:
    with local_ranks(["sleep", str(HANG)], 2) as ranks, launch._relay_signals(ranks) as asked:
        os.kill(os.getpid(), signal.SIGHUP)
        failures = ranks.wait()
    assert asked == ["SIGHUP"] and -signal.SIGHUP in [failure.exitcode for failure in failures.values()]


@pytest.mark.usefixtures("hangups")
def test_a_hangup_is_remembered_unless_nohup_says_otherwise() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "SIGHUP"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


SHOWS = "from mindspeed_cp.train.progress_display import open_display as o; d = o('lines', 0, 9, 1); d.note('a'); d.note('b')"


@pytest.mark.parametrize(("program", "works"), [(SHOWS, True), ("print('a', flush=True)", False)])
def test_steps_go_on_when_the_terminal_is_gone(program: str, works: bool) -> None:
    master, terminal = os.openpty()
    os.close(master)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=terminal, stderr=subprocess.PIPE)
    finally:
        os.close(terminal)
    assert (done.returncode == 0) is works, done.stderr


# inside a rank


def waits_for_ever(settings: str) -> str:
    """The second global batch, of which step 2 is, never comes; SIGTERM does."""
    from mindspeed_cp.data import PackedStream
    from mindspeed_cp.train import micro_batch_loader as batches

    make, take = PackedStream.next_batch, batches.MicroBatchLoader.__next__
    made, taken = [], []

    def blocked(self: PackedStream, *given: Any) -> Any:
        made.append(1)
        if len(made) == 2:
            threading.Event().wait()
        return make(self, *given)

    def asked(self: batches.MicroBatchLoader) -> Any:
        taken.append(1)
        if len(taken) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self)

    PackedStream.next_batch = blocked  # type: ignore[method-assign]
    batches.MicroBatchLoader.__next__ = asked  # type: ignore[method-assign]
    batches.POLL_SECONDS, batches.STOP_SECONDS, batches.END_SECONDS = 0.05, 0.2, 0.2
    try:
        worker.run_rank(Settings.model_validate_json(settings), as_json=False)
    except Stopped as error:
        return str(error)
    raise AssertionError("the run ended")


def test_a_rank_that_waits_for_a_batch_can_be_stopped(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    [line] = fresh_ranks.run(1, waits_for_ever, tiny(corpus, tmp_path).model_dump_json())
    assert line.startswith("stopped by SIGTERM while rank 0 waited for data.corpus")


def asked_in_the_last_step(settings: str) -> Any:
    from mindspeed_cp.train import loop

    step = loop.run_step

    def asked(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    loop.run_step = asked
    return train_here(settings)["summary"]


def test_a_request_in_the_last_step_leaves_the_run_complete(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    for steps, stopped_by in ((1, None), (2, "SIGTERM")):
        settings = tiny(
            corpus, tmp_path / str(steps), train__train_iters=steps, train__lr_warmup_iters=0, train__min_lr=0.0
        )
        [summary] = fresh_ranks.run(1, asked_in_the_last_step, settings.model_dump_json())
        assert (summary["step"], summary["stopped_by"]) == (1, stopped_by)


def refusals(settings: str, environments: list[dict[str, str]]) -> list[str]:
    from mindspeed_cp.train.world import join_ranks

    lines = []
    for environment in environments:
        with pytest.raises(ConfigError) as caught, join_ranks(Settings.model_validate_json(settings), environment):
            pass
        lines.append(str(caught.value))
    return lines


def test_ranks_that_could_never_meet_or_fit_are_refused_at_once(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    cases = [
        ({**good, "RANK": "5", "WORLD_SIZE": "2"}, "RANK = 5 in the environment: must be less than WORLD_SIZE = 2"),
        ({**good, "MASTER_ADDR": ""}, "MASTER_ADDR is not in the environment"),
        ({**good, "MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({**good, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = 0"),
        (good, "data.seq_length = 900000000: does not fit"),  # torchrun's ranks check it too
    ]
    settings = tiny(corpus, tmp_path, data__seq_length=900_000_000)
    [lines] = fresh_ranks.run(1, refusals, settings.model_dump_json(), [environment for environment, _ in cases])
    for line, (_, expected) in zip(lines, cases, strict=True):
        assert line.startswith(expected)


def times_out(settings: str) -> list[float]:
    import torch
    from megatron.core import parallel_state

    from mindspeed_cp.megatron import megatron_on_cpu
    from mindspeed_cp.train.world import join_ranks

    with megatron_on_cpu(), join_ranks(Settings.model_validate_json(settings)):
        groups = [
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        ]
        cpu = torch.device("cpu")
        return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def test_groups_wait_as_long_as_the_setting_says(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    settings = tiny(corpus, tmp_path, context_parallel_suite__timeout_seconds=7.0)
    assert fresh_ranks.run(1, times_out, settings.model_dump_json()) == [[7.0] * 3]


def device_notes() -> list[str | None]:
    import torch

    from mindspeed_cp.train.world import unused_accelerator

    results = []
    for there in (False, True):
        torch.cuda.is_available = lambda there=there: there
        results.append(unused_accelerator(torch.device("cpu")))
    return results


def test_an_accelerator_that_is_not_used_is_told(fresh_ranks: FreshRanks) -> None:
    [[nothing, note]] = fresh_ranks.run(1, device_notes)
    assert nothing is None and note.endswith("train.device: cuda uses it")
