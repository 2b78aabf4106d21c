"""Thousands of changed plans: each is refused by PlanError, or runs and is exact; nothing else is raised.

Whether a plan is exact is judged by running it: all ranks in this process, forward and backward, on one of the
backends, against dense attention in fp64 of the plan's own documents and attention.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from mindspeed_cp import Plan, PlanError, verify_plan
from mindspeed_cp.ascend_kernels.tile_attention import TILE_MAX_HEAD_DIM
from mindspeed_cp.engine import Stepping, attend_in_process
from mindspeed_cp.engine.attention import expanded_rows
from mindspeed_cp.ops.attention.contract import AttentionBackend
from mindspeed_cp.ops.attention.cuda.tile_attention import CudaTileAttention
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from tests.engine.cases import filled_with_nan
from tests.ops.npu_oracle import OracleOperator
from tests.plan.mutations import mutated, random_plan

KEY = (7, 3)  # of dropout
PER_TEST = 200


def outcome(seed: object) -> str:
    """ "refused", "exact", or what is wrong with a changed plan."""
    rng = Random(f"mutated plan {seed}")
    plan = mutated(random_plan(rng), rng)
    try:
        verify_plan(plan)
    except PlanError as error:
        return "refused" if "\n" not in str(error) else "a message of several lines"
    except Exception as error:
        return f"verify_plan raises {type(error).__name__}: {error}"
    return wrong_result(plan, rng) or "exact"


def wrong_result(plan: Plan, rng: Random) -> str | None:
    """How a plan's result differs from dense attention, None if it does not."""
    backends: list[AttentionBackend | None] = [None, None]
    if not plan.attention.dropout and max(plan.attention.head_dim, plan.attention.head_dim_v) <= TILE_MAX_HEAD_DIM:
        backends.append(CudaTileAttention("cpu", "torch"))
    for lowering in ("tnd", "masks") if plan.attention.slopes is None else ("tnd",):
        backends.append(NpuAttention(lowering, operator=OracleOperator()))
    backend = rng.choice(backends)
    try:
        error = largest_error(plan, backend, Stepping(lazy=rng.random() < 0.5, seed=rng.randrange(100)))
    except Exception as raised:
        return f"{type(backend).__name__} raises {type(raised).__name__}: {raised}"
    return None if error <= (1e-4 if plan.reduce_dtype == "float32" else 2e-2) else f"{backend} is off by {error}"


def largest_error(plan: Plan, backend: AttentionBackend | None, stepping: Stepping) -> float:
    """Largest error of out, dq, dk and dv, over the largest number of each, which counts as 1 at least."""
    attention, generator = plan.attention, torch.Generator().manual_seed(0)
    key = KEY if attention.dropout and backend is None else None  # other backends draw from their generators
    heads, width, width_v = attention.kv_row
    queries, keys = plan.documents.tokens, plan.kv_documents.tokens
    shapes = (
        (queries, attention.heads, attention.head_dim),
        (keys, heads, width),
        (keys, heads, width_v),
        (queries, attention.heads, attention.head_dim_v),
    )
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    kv_up = None
    if attention.latent is not None:
        rows = attention.heads * (attention.head_dim - attention.latent[1] + attention.head_dim_v)
        kv_up = torch.randn(rows, attention.latent[0], generator=generator) / attention.latent[0] ** 0.5
    with filled_with_nan():
        result = attend_in_process(
            plan, q, k, v, dout, backend, dropout_key=key, training=key is not None, stepping=stepping, kv_up=kv_up
        )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    dense_k, dense_v = leaves[1:]
    if kv_up is not None:
        dense_k, dense_v = expanded_rows(leaves[1][:, 0], leaves[2][:, 0], kv_up.double(), attention)
    exact, _ = dense_packed_attention(
        attention.expanded, leaves[0], dense_k, dense_v, plan.documents, kv_documents=plan.kv_documents, dropout_key=key
    )
    wanted = [exact.detach(), *torch.autograd.grad(exact, leaves, dout.double())]
    largest = 1 / (1 - attention.dropout)
    return max(
        float((actual.double() - x).abs().max()) / max(largest, float(x.abs().max())) if x.numel() else 0.0
        for actual, x in zip((result.out, result.dq, result.dk, result.dv), wanted, strict=True)
    )


@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.thorough if n else ()) for n in range(15)])
def test_changed_plans_are_refused_or_exact(part: int) -> None:
    outcomes = {number: outcome(number) for number in range(part * PER_TEST, (part + 1) * PER_TEST)}
    assert {number: text for number, text in outcomes.items() if text not in ("refused", "exact")} == {}
    counts = Counter(outcomes.values())
    assert counts["refused"] > PER_TEST / 3 and counts["exact"] > PER_TEST / 8, counts
