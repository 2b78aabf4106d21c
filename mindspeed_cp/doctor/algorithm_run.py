"""An algorithm on all ranks: exact on a small batch, and its time on a large one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_cp.doctor.operator import DTYPES, MAX_DIFFERENCE
from mindspeed_cp.doctor.reference import ReferenceKey, reference_inputs, reference_results, relative_difference
from mindspeed_cp.engine import context_parallel_attention, prepare
from mindspeed_cp.plan import Plan

REPEATS = 3
MAX_REFERENCE_RANKS = 64  # the small batch grows with the ranks up to these


def small_lengths(ranks: int) -> list[int]:
    """Return the documents of the batch that is compared in full: cut ones, and one that is shorter than the ranks."""
    share = min(ranks, MAX_REFERENCE_RANKS)
    return [40 * share + 3, 17, 24 * share]


def compare_with_reference(plan: Plan, rank: int, dtype: str, device: torch.device, timeout: float) -> str | None:
    """Run a small plan forward and backward, and compare all rows of this rank with dense attention in fp64.

    Every rank makes all inputs from the same seed, so that only the algorithm's own messages travel.

    Returns:
        What is wrong, or None.
    """
    lengths = tuple(plan.documents.lengths.tolist())
    key = ReferenceKey(lengths, lengths, plan.attention, 0)
    q, k, v, dout = (plan.layout.shard(x, rank).to(DTYPES[dtype]).to(device) for x in reference_inputs(key))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(q, k, v, plan, timeout=timeout)
    results = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    for name, result in zip(("out", "dq", "dk", "dv"), results, strict=True):
        reference = plan.layout.shard(reference_results(key)[name], rank)
        difference = relative_difference(result.cpu(), reference) if len(reference) else 0.0
        if not difference <= MAX_DIFFERENCE[dtype]:
            return f"{name} differs from fp64 by {difference:.1e}, limit {MAX_DIFFERENCE[dtype]:.0e}"
    return None


def time_layers(
    plan: Plan,
    rank: int,
    dtype: str,
    device: torch.device,
    timeout: float,
    seconds: Callable[[Callable[[], None]], float],
) -> list[float]:
    """Return the seconds of forward and backward of attention on this rank, of each repeat.

    Args:
        plan: the plan, prepared here.
        rank: this rank.
        dtype, device: of the tensors.
        timeout: limit of a message in seconds.
        seconds: called with a run; returns its seconds on this rank.
    """
    attention, generator = plan.attention, torch.Generator().manual_seed(rank)
    prepare(plan, rank, dtype=DTYPES[dtype], device=device)
    rows = int(plan.layout.token_counts[rank])
    q, k, v, dout = (
        torch.randn(rows, heads, attention.head_dim, generator=generator).to(DTYPES[dtype]).to(device)
        for heads in (attention.heads, attention.kv_heads, attention.kv_heads, attention.heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> None:
        out = context_parallel_attention(q, k, v, plan, timeout=timeout)
        torch.autograd.grad(out, leaves, dout)

    seconds(run)  # connects, and loads kernels
    return [seconds(run) for _ in range(REPEATS)]
