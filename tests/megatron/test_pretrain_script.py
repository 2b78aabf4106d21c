"""examples/pretrain_gpt.py through Megatron's own training loop: the same losses on any number of ranks.

Skipped where there is no megatron.training: it is in the wheels of megatron-core from 0.17 on; for older ones MEGATRON_LM
names a source tree of the same version.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.patches.imports import parse_version
from mindspeed_cp.megatron.patches.versions import IS_0_12
from tests.limits import HANG

with megatron_imports():
    import megatron.core
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 48 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.2
    --attention-dropout 0.2 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 0.01
    --lr-decay-style constant --vocab-size 4999 --tokenizer-type NullTokenizer --mock-data --split 90,5,5
    --eval-iters 1 --eval-interval 1000 --log-interval 1 --num-workers 0 --reset-position-ids --reset-attention-mask
    --eod-mask-loss --no-create-attention-mask-in-dataloader --calculate-per-token-loss --no-rope-fusion
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --distributed-backend gloo --use-cpu-initialization --moe-token-dispatcher-type alltoall
    --distributed-timeout-minutes 5
""")
SPEC = ["--spec", "mindspeed_cp.megatron.pretrain", "spec"]
NO_SPEC_WITH_EXPERTS = parse_version(megatron.core.__version__) < (0, 16)
EXPERTS = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type aux_loss
""")
EXPERTS += ["--moe-aux-loss-coeff", "0.1" if "router" in MoESubmodules.__dataclass_fields__ else "0.0"]

pytestmark = pytest.mark.usefixtures("megatron_parser")


def output(folder: Path, ranks: int, *flags: str) -> str:
    """What a run prints."""
    suite = folder / "suite.yaml"
    suite.write_text("context_parallel_suite:\n  algorithm: ring\n", "utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron wants it, device or not
    }
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    spec = [] if NO_SPEC_WITH_EXPERTS and "--num-experts" in flags else SPEC
    command = [
        sys.executable,
        *launcher,
        str(SCRIPT),
        "--device",
        "cpu",
        *FLAGS,
        *spec,
        "--cp-plan",
        str(suite),
        *flags,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def evaluated(text: str) -> list[tuple[float, float]]:
    """Losses of validation and test that a run prints, with their exponentials."""
    evaluations = re.findall(r"lm loss value: ([\d.E+-]+) \| lm loss PPL: ([\d.E+-]+)", text)
    assert len(evaluations) == 2, text[-2000:]
    return [(float(loss), float(other)) for loss, other in evaluations]


@lru_cache
def losses(folder: Path, ranks: int, *flags: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, then the losses of validation and test."""
    text = output(folder, ranks, *flags)
    steps = re.findall(r"lm loss: ([\d.E+-]+).*grad norm: ([\d.]+)", text)
    assert len(steps) == 3, text[-2000:]
    return [(float(loss), float(norm)) for loss, norm in steps] + evaluated(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretrain")


def assert_equal(run: list[tuple[float, float]], other: list[tuple[float, float]]) -> None:
    """Six digits of the losses are printed, three of the norms."""
    for (loss, norm), (other_loss, other_norm) in zip(run, other, strict=True):
        assert loss == pytest.approx(other_loss, rel=5e-6)
        assert norm == pytest.approx(other_norm, rel=2e-3)


def test_context_and_tensor_parallel_ranks_train_as_one(folder: Path) -> None:
    single = losses(folder, 1)
    assert len({loss for loss, _ in single[:3]}) == 3
    flags = ["--context-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    assert_equal(losses(folder, 4, *flags), single)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        "--num-layers 1 --account-for-loss-in-pipeline-split",
    ],
    ids=["1F1B", "interleaved", "a stage without layers"],
)
def test_pipeline_stages_train_the_same_with_and_without_context_parallelism(folder: Path, more: str) -> None:
    flags = ["--pipeline-model-parallel-size", "2", *more.split()]
    assert_equal(losses(folder, 4, *flags, "--context-parallel-size", "2"), losses(folder, 2, *flags))


@pytest.mark.thorough
def test_a_run_that_only_evaluates_prints_the_losses_of_one_rank(folder: Path) -> None:
    single = evaluated(output(folder, 1, "--skip-train"))
    assert_equal(evaluated(output(folder, 2, "--skip-train", "--context-parallel-size", "2")), single)


@pytest.mark.thorough
def test_experts_over_the_context_ranks_train_as_one(folder: Path) -> None:
    flags = ["--context-parallel-size", "2", "--expert-model-parallel-size", "2"]
    assert_equal(losses(folder, 4, *EXPERTS, *flags), losses(folder, 1, *EXPERTS))


HAS_BUILDER = not IS_0_12 and parse_version(megatron.core.__version__) < (0, 17)


@pytest.mark.thorough
@pytest.mark.skipif(
    not HAS_BUILDER, reason="0.19 builds layers of later tokens itself; those of 0.12 take no packed rows"
)
def test_multi_token_prediction_trains_as_one(folder: Path) -> None:
    flags = ["--mtp-num-layers", "2"]
    single = losses(folder, 1, *flags)
    assert single != losses(folder, 1)
    assert_equal(losses(folder, 2, *flags, "--context-parallel-size", "2"), single)
    flags += ["--pipeline-model-parallel-size", "2"]
    assert_equal(losses(folder, 4, *flags, "--context-parallel-size", "2"), losses(folder, 2, *flags))


UNDONE = """
import os, sys
import torch
sys.path += [os.environ["MEGATRON_LM"]] if "MEGATRON_LM" in os.environ else []
from megatron_on_cpu import megatron_training_on_cpu

import mindspeed_cp.megatron
from torch.utils.data._utils import pin_memory

def seen():
    names = ("current_device", "device_count", "get_device_capability", "memory_allocated", "mem_get_info", "Stream")
    return [getattr(torch.cuda, name) for name in names] + [pin_memory.pin_memory]

before = seen()
try:
    with megatron_training_on_cpu():
        assert not [a for a, b in zip(seen(), before) if a is b] and torch.empty(1, device="cuda").device.type == "cpu"
        raise KeyError
except KeyError:
    pass
assert all(a is b for a, b in zip(seen(), before)), "not undone"
"""


def test_the_cpu_mode_of_the_training_loop_is_undone_on_exit_errors_included(tmp_path: Path) -> None:
    path = os.pathsep.join((str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNDONE], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=HANG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
