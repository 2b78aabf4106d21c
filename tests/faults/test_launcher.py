"""No rank outlives a launcher that is killed, a signal stops all, and only the user who started the ranks can open their store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.local_agent import local_ranks
from mindspeed_cp.train.rank_logs import RankLogs
from mindspeed_cp.train.run_files import read_metrics
from tests.limits import wait_until
from tests.train.test_launch import COMMAND, ROOT, Run, write
from tests.train.test_training import tiny


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.fault(
    fault="the launcher is killed, also before its ranks have read their settings",
    happens="no rank outlives it, and the folder is free",
    lost="the steps since the newest checkpoint",
    printed="nothing: the launcher is gone",
)
def test_ranks_end_with_a_launcher_that_is_killed(corpus: Path, tmp_path: Path, start: Callable[..., Run]) -> None:
    """Before a rank has read its settings, so none takes a step; for a run that trains, see the next test."""
    folder = tmp_path / "run"
    size = {"context_parallel_suite__context_parallel_size": 2}
    run = start(*COMMAND, write(tiny(corpus, folder, train__train_iters=100000, **size), tmp_path))
    ranks = run.wait_for(lambda: len(run.ranks()) == 2 and run.ranks(), "two ranks")
    for rank in ranks:
        rank.suspend()
    run.process.kill()
    run.process.wait()
    for rank in ranks:
        rank.resume()
    wait_until(lambda: all(map(is_gone, ranks)), "end of the ranks")
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.fault(
    fault="a stranger looks for open ports of a run on one machine",
    happens="the launcher listens on none, gloo on loopback alone",
    lost="nothing",
    printed="nothing",
)
@pytest.mark.fault(
    fault="SIGINT to the launcher",
    happens="all ranks finish their step and save a checkpoint",
    lost="nothing",
    printed="stopped by SIGINT after step N",
)
def test_no_port_listens_for_the_ranks_to_meet_and_sigint_stops_them(
    corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    """Gloo's own listen on loopback; the launcher has none, and its folder is closed to others."""
    folder = tmp_path / "run"
    size = {"context_parallel_suite__context_parallel_size": 2}
    run = start(*COMMAND, write(tiny(corpus, folder, train__train_iters=100000, **size), tmp_path))
    metrics = folder / "metrics.jsonl"
    run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "step 2")
    family = [psutil.Process(run.process.pid), *run.ranks()]
    listening = {
        process.pid: [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        for process in family
    }
    assert listening.pop(run.process.pid) == []
    assert {ip for addresses in listening.values() for ip in addresses} <= {"127.0.0.1", "::1"}
    store = Path(family[1].environ()["MINDSPEED_CP_STORE"])
    assert store.exists() and store.parent.stat().st_mode & 0o777 == 0o700
    run.process.send_signal(signal.SIGINT)
    code, out, errors = run.end()
    assert (code, errors) == (0, []) and "stopped by SIGINT after step " in out
    assert all(map(is_gone, family[1:])) and not store.exists()
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] == "SIGINT"
    assert (folder / "checkpoints" / "latest").read_text() == f"iter_{len(read_metrics(metrics)):07d}\n"


@pytest.mark.fault(
    fault="another user opens the file through which ranks meet",
    happens="the system refuses",
    lost="nothing",
    printed="nothing",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it as another user")
def test_another_user_cannot_open_the_store(tmp_path: Path) -> None:
    knock = "import os, sys; os.setgid(65534); os.setuid(65534); print('changed'); open(sys.argv[1], 'ab')"
    program = "import os, time; open(os.environ['MINDSPEED_CP_STORE'], 'w').close(); time.sleep(1200)"
    with local_ranks([sys.executable, "-c", program], 1) as ranks:
        (process,) = ranks._processes
        environment = psutil.Process(process.pid).environ
        wait_until(lambda: Path(environment().get("MINDSPEED_CP_STORE", "/none")).exists(), "store")
        store = environment()["MINDSPEED_CP_STORE"]
        done = subprocess.run([sys.executable, "-c", knock, store], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == "changed\n" and "PermissionError" in done.stderr
    assert not Path(store).parent.exists()


@pytest.mark.fault(
    fault="a rank fails",
    happens="the others are ended, and learn which one from the launcher",
    lost="the steps since the newest checkpoint",
    printed="the error of the rank that failed first",
)
def test_the_others_end_with_a_rank_that_fails_and_learn_which() -> None:
    program = (
        "import os, sys, time, signal\n"
        "from mindspeed_cp.train.local_agent import ended_ranks\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7 if ended_ranks() == [1] else 8))\n"
        "open(os.environ['MINDSPEED_CP_STORE'] + os.environ['RANK'], 'w').close()\n"
        "while os.environ['RANK'] == '1' and not os.path.exists(os.environ['MINDSPEED_CP_STORE'] + '0'): time.sleep(0.01)\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1200)\n"
    )
    with local_ranks([sys.executable, "-c", program], 2) as ranks:
        failures = ranks.wait()
    assert [(rank, failure.exitcode) for rank, failure in failures.items()] == [(1, 3), (0, 7)]


@pytest.mark.fault(
    fault="a rank ignores SIGTERM after another failed",
    happens="it is killed after a grace period",
    lost="nothing more",
    printed="the error of the rank that failed first",
)
def test_a_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_cp.train.local_agent.GRACE_SECONDS", 0.1)
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(os.environ['MINDSPEED_CP_STORE'] + os.environ['RANK'], 'w').close()\n"
        "while os.environ['RANK'] == '1' and not os.path.exists(os.environ['MINDSPEED_CP_STORE'] + '0'): time.sleep(0.01)\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1200)\n"
    )
    with local_ranks([sys.executable, "-c", program], 2) as ranks:
        failures = ranks.wait()
    assert failures[1].exitcode == 3 and failures[0].signal_name() == signal.Signals.SIGKILL.name


def test_every_rank_has_a_log_and_the_screen_shows_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; r = os.environ['RANK']; print('out', r, flush=True); print('err', r, file=sys.stderr)"
    for _ in range(2):
        with local_ranks([sys.executable, "-c", program], 2, logs=RankLogs(tmp_path / "logs")) as ranks:
            assert ranks.wait() == {}
    assert capfd.readouterr() == ("out 0\n" * 2, "err 0\n" * 2)
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines() for rank in range(2)]
    assert [line for line in logs[0] if not line.startswith("--- start at 2")] == ["err 0"] * 2
    assert [line for line in logs[1] if not line.startswith("--- start at 2")] == ["out 1", "err 1"] * 2
    (tmp_path / "logs" / "rank1.log").unlink()
    (tmp_path / "logs" / "rank1.log").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ConfigError, match=r"rank1\.log: the log of rank 1 cannot be written: .*give another output"),
        local_ranks([sys.executable, "-c", program], 2, logs=RankLogs(tmp_path / "logs")),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.fault(
    fault="a rank stands still (SIGSTOP)",
    happens="the others dump their stacks and what they wait for into their logs, and end at the time-out",
    lost="the steps since the newest checkpoint",
    printed="rank 1 lost rank 0: dead, or silent for longer than the time-out",
)
@pytest.mark.thorough
def test_a_hang_is_dumped_into_the_log_before_the_time_out_ends_it(
    corpus: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    """Rank 0 stands still; rank 1, whose messages are not on the screen, tells in its log."""
    folder = tmp_path / "run"
    size = {"context_parallel_suite__context_parallel_size": 2, "context_parallel_suite__timeout_seconds": 60.0}
    run = start(*COMMAND, write(tiny(corpus, folder, train__train_iters=100000, **size), tmp_path))
    metrics, log = folder / "metrics.jsonl", folder / "logs" / "rank1.log"
    run.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "step 2")
    (first,) = [rank for rank in run.ranks() if rank.environ()["RANK"] == "0"]
    first.suspend()
    run.wait_for(lambda: "the stacks of all threads" in log.read_text(), "the dump")
    wait_until(lambda: "forward_backward" in log.read_text(), "stack in the log")
    assert "48 s, and ranks that wait 60 s for another end" in log.read_text()
    assert "parameters, context" in (folder / "logs" / "rank0.log").read_text()
    assert "parameters, context" not in log.read_text()
    code, _, errors = run.end()
    assert code == 1 and len(errors) == 1 and "rank 1 lost rank 0: dead, or silent for longer than" in errors[0], errors
