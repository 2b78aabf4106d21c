"""`mindspeed-cp train` on GPUs, over NCCL: losses are those of the CPU. `make test-cuda`, and with GPUS=2 both tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS = 4
#: A model of few heads and a corpus that is on every machine.
SETTINGS = {
    "model.num_layers": 2, "model.hidden_size": 128, "model.num_attention_heads": 4, "data.seq_length": 1024,
    "train.train_iters": STEPS, "train.lr_warmup_iters": 0, "train.global_batch_size": 4,
    "context_parallel_suite.nodes": 1, "train.compare": "[]", "checkpoint.save_interval": 0,
    "output.log_interval": 0,
}  # fmt: skip

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(1800)]


def losses(folder: Path, ranks: int, **settings: str) -> list[float]:
    """Losses of a run with the quick start's settings and these."""
    changes = {**SETTINGS, "output.folder": str(folder), **{key.replace("__", "."): x for key, x in settings.items()}}
    command = [sys.executable, "-m", "mindspeed_cp", "train", "--nproc", str(ranks)]
    command += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("bf16", ["false", "true"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(1, {"context_parallel_suite__context_parallel_size": "1"}, id="one GPU"),
        pytest.param(2, {"context_parallel_suite__context_parallel_size": "2"}, id="cp 2"),
    ],
)
def test_losses_are_those_of_the_cpu(tmp_path: Path, ranks: int, settings: dict[str, str], bf16: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} CUDA devices are visible, and {ranks} are needed")
    on_cpu = {"train__device": "cpu", "context_parallel_suite__context_parallel_size": "1"}
    expected = losses(tmp_path / "cpu", 1, train__bf16=bf16, **on_cpu)
    got = losses(tmp_path / "cuda", ranks, train__device="cuda", train__bf16=bf16, **settings)
    assert len(got) == STEPS
    assert got == pytest.approx(expected, rel=2e-2 if bf16 == "true" else 1e-3)
