"""What a user of NPUs can get wrong, and ranks that are lost, as a rank under torchrun tells it: one line, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mindspeed_cp.doctor.machine import requirements
from mindspeed_cp.errors import OperatorError
from mindspeed_cp.ops.attention.operator import attention
from mindspeed_cp.train.failures import FAILED, classify_error
from tests.host_cann import cann_rules_attention, task_queue
from tests.limits import HANG
from tests.npu.commands import command
from tests.ports import free_port
from tests.programs import run_programs

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = {
    "train.device": "npu", "train.train_iters": 5, "train.lr_warmup_iters": 0, "train.global_batch_size": 1,
    "train.compare": "[]", "data.seq_length": 509, "output.log_interval": 0,
    "context_parallel_suite.nodes": 1, "context_parallel_suite.timeout_seconds": HANG,
}  # fmt: skip


def run_ranks(
    program: Callable[[list[str]], None], folder: Path, ranks: int, started: int, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Train by a program in the first processes of a launch of `ranks`."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "the plan of a ring " * (3 + n % 9)}) + "\n" for n in range(50)))
    settings = SHORT | {"output.folder": folder / "run", "data.corpus": corpus}
    settings |= {"context_parallel_suite.context_parallel_size": ranks}
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    words = ["train", str(ROOT / "configs" / "quickstart.yaml")]
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return run_programs(program, words, [{**place, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(started)])


def lines(errors: str) -> list[str]:
    assert "Traceback" not in errors, errors[-3000:]
    return [line for line in errors.splitlines() if line.startswith("error: ")]


def with_an_older_cann(words: list[str]) -> None:
    from mindspeed_cp.train import world

    world.cann_version = lambda: "8.3.RC1"
    command(words)


def test_an_older_cann_is_refused_before_anything_runs(tmp_path: Path) -> None:
    [done] = run_ranks(with_an_older_cann, tmp_path, 1, 1)
    wanted = "train.device = npu: CANN is 8.3.RC1, needed is 8.5 or later; install CANN 8.5 or later"
    assert done.returncode == 2 and len(lines(done.stderr)) == 1 and wanted in done.stderr


def test_more_ranks_than_devices(tmp_path: Path) -> None:
    [done] = run_ranks(command, tmp_path, 2, 1, HOST_CANN_DEVICES="1")
    assert done.returncode == 2 and len(lines(done.stderr)) == 1, done.stderr
    assert "2 ranks on this machine, which has 1 NPUs; start at most 1 ranks on it" in done.stderr


def with_a_rank_that_falls_asleep(words: list[str]) -> None:
    """The second rank sleeps before the forward of its third row. The first rank goes on, with 3 seconds for its peer's
    answers, and the second rank ends after it."""
    from mindspeed_cp.engine import agreement
    from mindspeed_cp.train import step

    forward, forwards, first_rank = step._forward, [], Path(os.environ["FIRST_RANK"])
    if os.environ["RANK"] == "0":
        first_rank.write_text(str(os.getpid()))

    def forward_or_sleep(*arguments: object) -> object:
        forwards.append(1)
        if len(forwards) == 3:
            if os.environ["RANK"] == "1":
                while Path("/proc", first_rank.read_text()).exists():
                    time.sleep(0.05)
                os._exit(0)
            os.environ["HOST_HCCL_TIMEOUT"] = "3"
            agreement.WAIT_SECONDS = 3  # nor does the comparison of plans wait longer
        return forward(*arguments)

    step._forward = forward_or_sleep
    command(words)


@pytest.mark.thorough  # by default tests/npu/test_hccl.py and tests/engine/test_inputs.py have silent ranks
def test_a_rank_that_does_not_answer_in_time_is_named_by_its_peer(tmp_path: Path) -> None:
    """The line is out before torch_npu's watchdog ends the process, or the watchdog's own message names the peer."""
    done, _ = run_ranks(with_a_rank_that_falls_asleep, tmp_path, 2, 2, FIRST_RANK=str(tmp_path / "first"))
    assert done.returncode in (FAILED, -6), done.stderr[-3000:]
    printed = lines(done.stderr)
    if printed:
        assert len(printed) == 1 and "rank 1" in printed[0] and "context_parallel_suite.timeout_seconds" in printed[0]
    else:
        assert done.returncode == -6 and re.search(r"waited 3 s .* rank 1 .*in vain", done.stderr), done.stderr[-3000:]


@pytest.mark.ends_queue(2)
def test_an_operator_that_refuses_a_call_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an older CANN refuses wide heads, which the settings do not know."""
    monkeypatch.setattr(cann_rules_attention, "MOST_DIM", 512)
    x = torch.ones(10, 2, 576, device="npu", dtype=torch.bfloat16)
    with pytest.raises(OperatorError) as caught:
        attention(x, x, x, [0, 10], [0, 10], backend="npu")
    kind, line, code = classify_error(caught.value)
    assert (kind, code) == ("device", FAILED) and "\n" not in line
    assert "refused a call (bfloat16, 10 x 2 x 576, 10 x 2 x 576, 10 x 2 x 576, TND, sparse mode 3): " in line
    reason = r"head size 576; valid: 1 to 512 \(rule widest; .*\)"
    if task_queue.mode() == 2:  # the queue's thread was refused
        reason = r"\(torch-npu's queue raised it later, perhaps at another call; its log on standard error says why\)"
    assert re.search(f"{reason}; `mindspeed-cp doctor --device npu`", line)


def test_the_doctor_looks_at_the_version_of_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements() == [{"what": "CANN", "ok": True, "error": None}]
    monkeypatch.setattr(sys.modules[requirements.__module__], "cann_version", lambda: "8.0.RC3")
    [row] = requirements()
    assert not row["ok"] and row["error"].startswith("CANN is 8.0.RC3, needed is 8.5 or later; install")
