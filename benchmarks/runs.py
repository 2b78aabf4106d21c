"""One attention layer, forward and backward, by the engine, and the ideal to compare it with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_cp import Plan, context_parallel_attention
from mindspeed_cp.engine import prepare

HEADS, DIM = 8, 64

#: torch's flash attention on CPUs, the kernel of the cpu backend; tensors are [1, heads, rows, dim].
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Run(NamedTuple):
    """Both directions; the backward gets the result of the forward."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def packed_lengths(tokens: int) -> list[int]:
    """Return the lengths of a packed row, lognormal as in Megatron's parametric set (mean 1024, sigma 1.5, 128 to
    8192)."""
    rng = np.random.default_rng(3)
    row: list[int] = []
    while sum(row) < tokens:
        length = int(np.clip(rng.lognormal(np.log(1024) - 1.5**2 / 2, 1.5), 128, 8192))
        row.append(min(length, tokens - sum(row)))
    return row


def ideal(lengths: list[int], share: int) -> Run:
    """Return the flash kernel once per document, on 1/share of the heads, in bf16: without communication, merges and
    conversions."""
    rows = [
        [torch.randn(n, HEADS // share, DIM, dtype=torch.bfloat16).transpose(0, 1)[None] for _ in range(4)]
        for n in lengths
    ]

    def forward() -> list[Any]:
        return [CPU_FLASH(q, k, v, 0.0, True, scale=DIM**-0.5) for q, k, v, _ in rows]

    def backward(outs: list[Any]) -> None:
        for (q, k, v, dout), (out, lse) in zip(rows, outs, strict=True):
            CPU_FLASH_BACKWARD(dout, q, k, v, out, lse, 0.0, True, scale=DIM**-0.5)

    return Run(forward, backward)


def planned(plan: Plan, rank: int) -> Run:
    """Return the part of this rank in a plan, in bf16."""
    rows = int(plan.layout.token_counts[rank])
    q, k, v, dout = (torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, requires_grad=i < 3) for i in range(4))
    prepare(plan, rank, dtype=torch.bfloat16)
    return Run(
        lambda: context_parallel_attention(q, k, v, plan),
        lambda out: torch.autograd.grad(out, (q, k, v), dout),
    )


def timed(run: Run) -> tuple[float, float]:
    """Return the milliseconds from barrier to barrier, for the forward and for both directions."""
    dist.barrier()
    start = time.perf_counter()
    results = run.forward()
    dist.barrier()
    between = time.perf_counter()
    run.backward(results)
    dist.barrier()
    return (between - start) * 1e3, (time.perf_counter() - start) * 1e3
