"""The cuda backend on a GPU, every rank of a plan one after the other on it: `make test-cuda`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.isolated_rank import IsolatedRank, attend_virtually
from mindspeed_cp import ConfigError
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.doctor import run_checks
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator
from mindspeed_cp.ops.attention.backends import BACKENDS
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from tests.engine.cases import Case
from tests.engine.draw import problem
from tests.ops.test_npu_backend import HALF, reference
from tools import capabilities

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(1800),  # kernels are compiled when they are first launched
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or torch was built without CUDA"),
]

NAMES = ("out", "lse", "dq", "dk", "dv")
CELLS = [cell for cell in capabilities.all_cells() if cell.backend == "cuda"]
EXACT = [cell for cell in CELLS if capabilities.unsupported(cell) is None]
#: Largest difference to fp64 of out, lse, dq, dk and dv, over the largest value; those of 16 bits are the CPU suite's.
LIMITS = {torch.float32: (1e-5,) * 5, torch.bfloat16: HALF, torch.float16: HALF}

#: Every Triton kernel is compiled for its number of heads and its widths, and each takes seconds: so there are few.
SHAPES = {"kv_heads": {"as queries": 4, "grouped": 2}, "widths": {"equal": (16, 16), "unequal": (24, 16)}}


def drawn(cell: capabilities.Cell, sizes: tuple[int, ...], dtype: torch.dtype) -> Case:
    """The problem that stands for a cell; always the same."""
    rng = Random(f"cuda {cell}")
    width, width_v = SHAPES["widths"][cell.widths]
    few = dict(heads=4, kv_heads=SHAPES["kv_heads"][cell.kv_heads], head_dim=width, head_dim_v=width_v, scale=None)
    if cell.bias == "alibi":
        few["alibi"] = True
    return replace(problem(cell, rng.choice(sizes), rng), **few, first_head=0, dtype=dtype)


def run(case: Case) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv on the CPU."""
    key = case.dropout_key if case.dropout else None
    made = attend_virtually(case.plan(), *(x.cuda() for x in case.inputs()), BACKENDS["cuda"], key)
    return [x.cpu() for x in (made.out, made.lse, made.dq, made.dk, made.dv)]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_cell_agrees_with_fp64(algorithm: str, dtype: torch.dtype) -> None:
    wrong: list[tuple[object, ...]] = []
    for cell in (cell for cell in EXACT if cell.algorithm == algorithm and cell.dropout == "none"):
        case = drawn(cell, (1, 2, 3, 4, 8), dtype)
        try:
            results = run(case)
        except Exception as error:  # one that fails must not hide the others
            wrong.append((repr(error)[:300], case))
            continue
        for name, got, want, limit in zip(NAMES, results, reference(case), LIMITS[dtype], strict=True):
            blind = torch.isinf(want)
            gap = (got.double() - want).masked_fill(blind, 0)
            scale = max(1.0, float(want.masked_fill(blind, 0).abs().max())) if want.numel() else 1.0
            same = bool((torch.isinf(got) == blind).all())
            if not same or (gap.numel() and not float(gap.abs().max()) / scale <= limit):
                wrong.append((name, same, float(gap.abs().max()) / scale, case))
    assert not wrong


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_backward_drops_what_the_forward_dropped(algorithm: str) -> None:
    """No reference knows what is dropped; see tests/ops/test_cuda_backend.py. fp16, so within its rounding."""
    for cell in (cell for cell in EXACT if cell.algorithm == algorithm and cell.dropout == "some"):
        case = drawn(cell, (1, 2, 3), torch.float16)
        q, k, v, dout = (x.double() for x in case.inputs())
        out, _, dq, dk, dv = (x.double() for x in run(case))
        size = max(1.0, float(dout.norm() * out.norm()))
        assert abs(float((dout * out).sum() - (v * dv).sum())) <= 1e-2 * size, case
        assert abs(float((q * dq).sum() - (k * dk).sum())) <= 1e-2 * size, case


@pytest.mark.parametrize("alibi", [False, True])
def test_long_documents(alibi: bool) -> None:
    """Past the blocks of the kernels, which small cases never leave."""
    case = Case((2311, 130, 7, 1800), 3, 4, 2, 128, 128, alibi=alibi, dtype=torch.bfloat16)
    for got, want, limit in zip(run(case), reference(case), HALF, strict=True):
        assert float((got.double() - want).abs().max()) <= limit * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("kernel", ["auto", "tiles"])
def test_the_deterministic_switch(kernel: str) -> None:
    """Equal bits, twice, over many keys for each query, where sums in any order would differ."""
    case = Case((4000,), 2, 4, 1, 64, 64, dtype=torch.bfloat16)
    inputs = [x.cuda() for x in case.inputs()]
    torch.use_deterministic_algorithms(kernel == "auto")
    try:
        backend = CudaAttention(kernel)
        assert backend.deterministic
        first, again = (attend_virtually(case.plan(), *inputs, backend) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name in NAMES:
        assert torch.equal(getattr(first, name), getattr(again, name)), name


def test_what_is_refused_is_refused() -> None:
    for cell in (cell for cell in CELLS if capabilities.unsupported(cell) is not None):
        with pytest.raises(ConfigError):
            run(drawn(cell, (2,), torch.bfloat16))


@pytest.mark.parametrize(
    "how",
    [{}, {"window": (90, 0)}, {"alibi": True}, {"dtype": torch.float32}],
    ids=["plain", "window", "alibi", "fp32"],
)
def test_layers_do_not_wait_for_the_host(how: dict[str, Any]) -> None:
    """After the first layer has placed a plan's calls, attention makes no synchronisation that torch can see."""
    lengths = tuple(np.random.default_rng(3).integers(1, 300, 40).tolist())
    case = replace(Case(lengths, 4, 4, 2, 64, 64, dtype=torch.bfloat16), **how)
    backend, plan = BACKENDS["cuda"], case.plan()
    rank = IsolatedRank(plan, 1, backend, *(x.cuda() for x in case.inputs()), None)
    forward, backward = (list(rank.slot_calls(direction)) for direction in ("forward", "backward"))
    try:
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            rank.start()
            for calls, k, v, *_ in forward:
                backend.forward(calls, plan.attention, rank.state, k, v)
            back = rank.backward_state()
            for calls, k, v, *_ in backward:
                backend.backward(calls, plan.attention, back, k, v, GradientAccumulator(k), GradientAccumulator(v))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_doctor() -> None:
    report = run_checks("cuda")
    assert report["ok"], [row for row in report["checks"] if not row["ok"]]
    assert {row["dtype"] for row in report["checks"]} == {"fp32", "fp16", "bf16"}
