"""How ranks end: signals, closed terminals, odd environments, ranks that cannot meet."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train import launch
from mindspeed_cp.train.failures import StopRequest, stop_signals_to
from tests.ports import free_port
from tests.train.fresh_ranks import FreshRanks
from tests.train.runs import COMMAND, Run, write
from tests.train.test_training import tiny, train_here


class Left(BaseException):
    """Instead of the end of this process; carries the exit code."""


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP as a terminal's shell leaves it, also where the tests run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("rank", "expected"), [("0", "error: bad lr\n"), ("3", "error: rank 3: bad lr\n")])
def test_rank_under_torchrun_prints_its_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, expected: str
) -> None:
    def leave(code: int) -> NoReturn:
        raise Left(code)

    def refuses(settings: Settings, *, as_json: bool) -> None:
        raise ConfigError("bad lr")

    monkeypatch.setattr(launch, "_exit", leave)
    monkeypatch.setattr(launch, "run_rank", refuses)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(Left) as left:
        launch.run_under_launcher(Settings(), as_json=False)
    assert left.value.args == (2,) and capsys.readouterr().err == expected


@pytest.mark.parametrize("as_json", [True, False])
def test_standard_output_holds_nothing_but_json(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = launch.Failure("terminated", "was killed by SIGTERM", 0)
    monkeypatch.setattr(launch, "_run_local_ranks", lambda *given, **named: ([stopped], "SIGTERM"))
    assert launch.start_local_ranks(Settings(), 1, as_json=as_json) == 0
    captured = capsys.readouterr()
    said = "stopped by SIGTERM; the same command goes on from the newest checkpoint, if there is one\n"
    assert (captured.err if as_json else captured.out) == said
    assert (captured.out if as_json else captured.err) == ""


@pytest.mark.usefixtures("hangups")
def test_a_hangup_is_remembered_unless_nohup_says_otherwise() -> None:
    stop = StopRequest()
    with stop_signals_to(stop):
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "SIGHUP"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop_signals_to(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_death_of_the_launcher_asks_ranks_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    assert stop.reason is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.reason == "the death of the launcher"


# inside a rank


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
        ({**good, "RANK": "5", "WORLD_SIZE": "2"}, "RANK = 5, WORLD_SIZE = 2, "),
        ({**good, "MASTER_ADDR": ""}, "MASTER_ADDR = '', MASTER_PORT = '1' in the"),
        ({**good, "MASTER_PORT": "http"}, "MASTER_ADDR = '127.0.0.1', MASTER_PORT = 'http'"),
        ({**good, "LOCAL_WORLD_SIZE": "0"}, "RANK = 0, WORLD_SIZE = 1, LOCAL_RANK = None, LOCAL_WORLD_SIZE = 0 in the"),
    ]
    settings = tiny(corpus, tmp_path)
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


def cannot_meet(settings: str, environment: dict[str, str], joining: float) -> str:
    from mindspeed_cp.train import world

    world.JOIN_SECONDS = joining
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ.update(environment)
    with (
        pytest.raises((ConfigError, RuntimeError)) as caught,
        world.join_ranks(Settings.model_validate_json(settings), environment),
    ):
        pass
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_that_cannot_meet_say_where_in_one_line(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """A port that is in use, a rank that does not come, a rank 0 that is not there, a name that nobody knows."""
    import socket

    settings = tiny(
        corpus, tmp_path, context_parallel_suite__context_parallel_size=2, context_parallel_suite__timeout_seconds=1.0
    ).model_dump_json()
    two = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        cases = [
            (
                {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])},
                "ConfigError: at 127.0.0.1:",
            ),
            (
                {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
                "PeerError: rank 0 did not meet the other 1 ranks at ",
            ),
            (
                {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
                "PeerError: rank 1 did not meet the other 1 ranks at ",
            ),
            (
                {"RANK": "1", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"},
                "ConfigError: MASTER_ADDR = no.such.host.invalid: cannot be found",
            ),
        ]
        for environment, expected in cases:
            [line] = fresh_ranks.run(1, cannot_meet, settings, {**two, **environment}, 1.0)
            assert line.startswith(expected) and "\n" not in line, line


def test_rank_that_refuses_ends_the_run_with_its_one_line(
    corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    settings = tiny(corpus, tmp_path / "run", model__init_method_std=1e38)
    code, out, errors = start(*COMMAND, write(settings, tmp_path), "--json").end()
    assert (code, out) == (1, "")
    assert len(errors) == 1 and errors[0].startswith("error: step 1: the loss is NaN on rank 0 of 1"), errors
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()
