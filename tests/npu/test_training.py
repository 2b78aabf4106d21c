"""Megatron trains on device "npu", by the real torch_npu and ProcessGroupHCCL over the stand-in, as it does on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG
from tests.npu.commands import run_commands
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
STEPS = 4

#: The quickstart's model on short rows, in few steps: what differs from it is size.
SHORT = (
    *("--set", f"train.train_iters={STEPS}", "--set", "train.lr_decay_iters=20", "--set", "train.lr_warmup_iters=2"),
    *("--set", "data.seq_length=1021", "--set", "train.global_batch_size=2", "--set", "output.log_interval=0"),
    *("--set", "train.compare=[]", "--set", "context_parallel_suite.nodes=1"),
    *("--set", f"context_parallel_suite.timeout_seconds={HANG}"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 3 to 900 bytes."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    words = ["plan", "ring", "rank", "tile", "token", "layout", "of", "the", "a", "sends", "holds", "key", "value"]
    with path.open("w") as file:
        for number in range(200):
            length = 3 + number**3 % 897
            text = " ".join(words[(number * 7 + word) % len(words)] for word in range(length // 2))[:length]
            file.write(json.dumps({"text": text}) + "\n")
    return path


def train(ranks: int, folder: Path, *settings: str, forked: bool = False) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run whose ranks are started as torchrun starts them, or forked (commands.py)."""
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"HOST_CANN_JITTER_US": "200", "HOST_CANN_SEED": "3"}
    places = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    words = ["train", str(QUICKSTART), *SHORT]
    words += ["--set", f"output.folder={folder}", "--set", f"context_parallel_suite.context_parallel_size={ranks}"]
    for setting in settings:
        words += ["--set", setting]
    ended = run_commands(words, places) if forked else _start_python(words, places)
    assert [code for code, _ in ended] == [0] * ranks, "\n".join(text[-3000:] for _, text in ended)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _start_python(words: list[str], places: list[dict[str, str]]) -> list[tuple[int | None, str]]:
    """As run_commands, with a new Python for each rank."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.npu.command", *words],
            cwd=ROOT,
            env={**os.environ, **place},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    try:
        errors = [process.communicate(timeout=HANG)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(running, errors, strict=True)]


@pytest.fixture(scope="module")
def on_the_cpu(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run of one rank on the CPU."""
    return train(1, tmp_path_factory.mktemp("cpu"), f"data.corpus={corpus}", "train.device=cpu", forked=True)


def assert_same(actual: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Equal losses and gradient norms, to 1e-4 of their size."""
    assert [line["step"] for line in actual] == [line["step"] for line in wanted] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in actual] == pytest.approx([line[key] for line in wanted], rel=1e-4)
    assert [line["tokens"] for line in actual] == [line["tokens"] for line in wanted]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ("context_parallel_suite.algorithm=ring",)),
        pytest.param(
            3,
            ("context_parallel_suite.algorithm=direct", "context_parallel_suite.layout=balanced"),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["ring in directional groups, cp 2", "direct, cp 3"],
)
def test_losses_are_those_of_the_cpu(
    ranks: int, settings: tuple[str, ...], corpus: Path, tmp_path: Path, on_the_cpu: list[dict[str, Any]]
) -> None:
    assert_same(train(ranks, tmp_path, f"data.corpus={corpus}", "train.device=npu", *settings), on_the_cpu)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "runs",
    [((2, "npu"), (4, "cpu")), ((1, "cpu"), (3, "npu"), (4, "cpu"))],
    ids=lambda runs: ", ".join(f"{device} to {last}" for last, device in runs),
)
def test_a_run_goes_on_on_another_device(
    runs: tuple[tuple[int, str], ...], corpus: Path, tmp_path: Path, on_the_cpu: list[dict[str, Any]]
) -> None:
    lines: list[dict[str, Any]] = []
    for last, device in runs:
        settings = (f"train.device={device}", f"train.train_iters={last}")
        lines = train(1, tmp_path, f"data.corpus={corpus}", *settings)
    assert_same(lines, on_the_cpu)


@pytest.mark.thorough  # tests/npu/test_table.py has hierarchical plans, tests/train/test_splits.py such a training
@pytest.mark.parametrize("remap", ["qkv", "hidden"])
def test_hierarchical_on_two_supposed_nodes_with_replicas_balanced_by_time(
    remap: str, corpus: Path, tmp_path: Path, on_the_cpu: list[dict[str, Any]]
) -> None:
    """Documents are assigned to two replicas of two ranks each, and every batch is the one of one rank."""
    suite = ("algorithm=hierarchical", "context_parallel_size=2", "nodes=2", f"remap={remap}")
    settings = (f"data.corpus={corpus}", "train.device=npu", "data.balance=time")
    actual = train(4, tmp_path, *settings, *(f"context_parallel_suite.{each}" for each in suite))
    assert_same(actual, on_the_cpu)
