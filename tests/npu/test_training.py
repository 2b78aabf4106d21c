"""Megatron trains on device "npu", by the real torch_npu and ProcessGroupHCCL over the stand-in, as it does on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG
from tests.npu.commands import command
from tests.ports import free_port
from tests.programs import run_programs

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


def train(ranks: int, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run whose ranks have the variables that torchrun gives."""
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"HOST_CANN_JITTER_US": "200", "HOST_CANN_SEED": "3"}
    words = ["train", str(QUICKSTART), *SHORT]
    words += ["--set", f"output.folder={folder}", "--set", f"context_parallel_suite.context_parallel_size={ranks}"]
    for setting in settings:
        words += ["--set", setting]
    ended = run_programs(command, words, [{**place, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)])
    assert [done.returncode for done in ended] == [0] * ranks, "\n".join(done.stderr[-3000:] for done in ended)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def on_the_cpu(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run of one rank on the CPU."""
    return train(1, tmp_path_factory.mktemp("cpu"), f"data.corpus={corpus}", "train.device=cpu")


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
def test_a_run_goes_on_on_another_device(corpus: Path, tmp_path: Path, on_the_cpu: list[dict[str, Any]]) -> None:
    lines: list[dict[str, Any]] = []
    for last, device in ((1, "cpu"), (3, "npu"), (4, "cpu")):
        lines = train(1, tmp_path, f"data.corpus={corpus}", f"train.device={device}", f"train.train_iters={last}")
    assert_same(lines, on_the_cpu)


@pytest.mark.thorough  # tests/npu/test_table.py has hierarchical plans, tests/train/test_splits.py such a training
def test_hierarchical_on_two_supposed_nodes_with_replicas_balanced_by_time(
    corpus: Path, tmp_path: Path, on_the_cpu: list[dict[str, Any]]
) -> None:
    """Documents are assigned to two replicas of two ranks each, and every batch is the one of one rank."""
    suite = ("algorithm=hierarchical", "context_parallel_size=2", "nodes=2", "remap=hidden")
    settings = (f"data.corpus={corpus}", "train.device=npu", "data.balance=time")
    actual = train(4, tmp_path, *settings, *(f"context_parallel_suite.{each}" for each in suite))
    assert_same(actual, on_the_cpu)
