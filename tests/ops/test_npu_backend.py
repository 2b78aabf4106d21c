"""The npu backend on whole plans, all ranks in this process, against dense attention in fp64. The fused operators are
the stand-in's oracle, which refuses what Ascend's operators refuse: no device is in these tests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, capabilities
from mindspeed_cp.layout import expand
from mindspeed_cp.ops.attention import BACKENDS, BackwardState, ForwardState, Heads, backend_for, dense_attention
from mindspeed_cp.ops.attention.npu import NpuAttention
from mindspeed_cp.plan import ALGORITHMS, Plan
from tests.engine.cases import Case
from tests.engine.draw import problem
from tests.ops.npu_oracle import OracleOperator, kept_weights
from tests.ops.test_npu_lowering import numbers

NAMES = ("out", "lse", "dq", "dk", "dv")


def tokens_of(spans):
    return torch.from_numpy(expand(spans["start"], spans["stop"] - spans["start"]))


class Rank:
    """One rank of a plan: its slots are filled from the whole batch, what nobody sent is NaN."""

    def __init__(self, plan: Plan, rank: int, case: Case, backend: NpuAttention, inputs):
        self.plan, self.rank, self.backend, self.attention = plan, rank, backend, plan.attention
        heads, kv_heads = self.attention.heads, self.attention.kv_heads
        self.heads = Heads(plan.q_layout.head_range(rank, heads), plan.kv_layout.head_range(rank, kv_heads))
        self.rows = tokens_of(plan.q_layout.of(rank))
        q, k, v, dout = inputs
        mine, self.theirs = slice(*self.heads.q), slice(*self.heads.kv)
        self.mine = mine
        self.q, self.dout = (x[self.rows][:, mine].contiguous() for x in (q, dout))
        self.k, self.v = k[:, self.theirs], v[:, self.theirs]
        self.key = (1, 2) if self.attention.dropout else None
        self.state = ForwardState(
            self.q,
            torch.full((*self.q.shape[:2], v.shape[2]), float("nan")),
            torch.full(self.q.shape[:2], float("-inf")),
            self.heads,
            self.key,
        )

    def places(self, direction: str):
        """(calls, k, v, rows of the slot and their tokens) of each step and slot."""
        program = getattr(self.plan, direction)
        lower = getattr(self.backend, f"lower_{direction}")
        tiles = program.tiles(self.rank)
        for place, calls in lower(tiles, len(self.q), self.attention, self.q.dtype).items():
            capacity = int(program.capacity[self.rank, place[1]])
            k, v = (torch.full((capacity, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in (self.k, self.v))
            rows, tokens = [], []
            for content in program.contents_of(self.rank):
                if (content["step"], content["slot"]) == place:
                    tokens.append(tokens_of(program.spans_in(content)))
                    rows.append(torch.arange(len(tokens[-1])) + int(content["row"]))
            rows, tokens = torch.cat(rows), torch.cat(tokens)
            k[rows], v[rows] = self.k[tokens], self.v[tokens]
            yield calls, k, v, rows, tokens

    def forward(self):
        seen = torch.zeros(len(self.q), dtype=torch.bool)
        for calls, k, v, _, _ in self.places("forward"):
            for call in calls:
                seen[torch.from_numpy(numbers(call.q).copy())] = True
            self.backend.forward(calls, self.attention, self.state, k, v)
        self.state.out[~seen] = 0

    def backward(self, dk, dv):
        """Adds to the whole batch's dk and dv; returns dq."""
        s = self.state
        dq = torch.zeros(self.q.shape)
        back = BackwardState(s.q, s.out.to(s.q.dtype), s.lse, self.dout, dq, s.heads, s.dropout, s.kept)
        for calls, k, v, rows, tokens in self.places("backward"):
            parts = [torch.zeros(x.shape) for x in (k, v)]
            self.backend.backward(calls, self.attention, back, k, v, *parts)
            for total, part in zip((dk, dv), parts, strict=True):
                total[:, self.theirs] = total[:, self.theirs].index_add(0, tokens, part[rows])
        return dq


def run(case: Case, backend: NpuAttention):
    """out, lse, dq, dk, dv of the whole batch, and the ranks."""
    plan, inputs = case.plan(), case.inputs()
    q, k, v, dout = inputs
    backend.check(plan.attention, case.dtype)
    out, lse = torch.zeros(dout.shape, dtype=case.dtype), torch.full(q.shape[:2], float("-inf"))
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    ranks = [Rank(plan, rank, case, backend, inputs) for rank in range(plan.ranks)]
    for rank in ranks:
        rank.forward()
        at = rank.rows[:, None], torch.arange(*rank.heads.q)
        out[at], lse[at] = rank.state.out.to(case.dtype), rank.state.lse
        dq[at] = rank.backward(dk, dv)
    return [out, lse, dq, dk, dv], ranks


def reference(case: Case, keep=None):
    """The same in fp64."""
    attention = case.attention
    q, k, v, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys = case.documents if case.kv_documents is None else case.kv_documents
    where = []
    for documents in (case.documents, keys):
        n = documents.lengths
        where.append((torch.from_numpy(np.repeat(np.arange(len(n)), n)), torch.from_numpy(expand(0 * n, n))))
    (doc_q, pos_q), (doc_k, pos_k) = where
    out, lse = dense_attention(
        *leaves, doc_q, doc_k, pos_q, pos_k, mask=attention.mask, scale=attention.scale, window=attention.window,
        slopes=attention.slopes, keep=keep, dropout_p=attention.dropout,
    )  # fmt: skip
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(case: Case, backend: NpuAttention, limits, keep=None):
    found, ranks = run(case, backend)
    for name, got, want, limit in zip(NAMES, found, reference(case, keep), limits, strict=True):
        assert got.shape == want.shape, (name, case)
        if not want.numel():
            continue
        blind = torch.isinf(want)
        assert (torch.isinf(got) == blind).all(), (name, case)
        wrong = (got.double() - want).masked_fill(blind, 0)
        assert torch.isfinite(wrong).all(), (name, case)
        scale = max(1 / (1 - case.dropout), float(want.masked_fill(blind, 0).abs().max()))
        assert float(wrong.abs().max()) / scale <= limit, (name, float(wrong.abs().max()) / scale, case)
    return ranks


EXACT = [1e-5] * 5
HALF = (2**-6, 2**-6, 2**-4, 2**-4, 2**-6)

CELLS = [
    cell
    for cell in capabilities.cells()
    if cell.backend == "cpu" and cell.dropout == "none" and capabilities.refusal(cell) is None
]


def drawn(cell, ranks: int, rng: Random) -> Case:
    """A problem that the npu backend takes."""
    case = problem(cell, ranks, rng)
    return case if case.head_dim >= case.head_dim_v else replace(case, head_dim=case.head_dim_v, head_dim_v=case.head_dim)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(CELLS),
    st.sampled_from((1, 2, 3, 4, 5, 8)),
    st.sampled_from(("tnd", "masks")),
    st.sampled_from(("shared", "split")),
    st.sampled_from(("fp32", "ring_update")),
    st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
    st.randoms(use_true_random=False),
)
def test_any_plan_agrees_with_fp64(cell, ranks, lowering, alibi, merge, dtype, rng):
    case = replace(drawn(cell, ranks, rng), dtype=dtype)
    lowering = "tnd" if case.alibi else lowering
    backend = NpuAttention(lowering, alibi, merge, OracleOperator())
    compare(case, backend, EXACT if dtype == torch.float32 else HALF)
