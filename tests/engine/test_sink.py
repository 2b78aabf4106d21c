"""Attention sinks: out, dq, dk, dv and dsink against the dense fp64 reference, with sinks about as large as lse.

A sink that is counted once a call, or not at all, is wrong by a tenth and more here; one near zero would hide it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError, context_parallel_attention
from mindspeed_cp.engine import Stepping, attend_in_process
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.sink import sink_gradient
from tests.engine.all_ranks import attend_all_ranks
from tests.engine.cases import NAMES, VARIANTS, Case, all_ranks, attend_here, variants
from tests.engine.draw import problem
from tests.engine.layer_weights import exact_results, largest_error, run, sink_of
from tests.engine.test_attention_check import compare_here, watch
from tests.plan.parts import mixed_plan
from tools import capabilities

RESULTS = (*NAMES, "dsink")

PROBLEMS = {
    "packed and ragged": Case((129, 3, 0, 50, 7, 190), 1),
    "GQA": Case((61, 130, 5), 1, heads=6, kv_heads=2),
    "heads that no rank count divides": Case((90, 41), 1, heads=7, kv_heads=7),
    "shorter than the ranks": Case((1, 2, 0, 1), 1),
    "no token": Case((0, 0), 1),
    "full mask": Case((129, 3, 0, 50, 7), 1, mask="full", kv_heads=2),
    "window": Case((129, 3, 0, 50, 7, 190), 1, window=(30, 0)),
    "window on both sides": Case((129, 3, 50, 190), 1, mask="full", window=(13, 40)),
    "window that looks ahead only": Case((60, 31), 1, mask="full", window=(0, 25)),
    "ALiBi": Case((129, 3, 0, 50, 7), 1, heads=6, kv_heads=3, alibi=True),
    "latent attention": Case((65, 30), 1, heads=2, kv_heads=2, head_dim=48, head_dim_v=32),
    "dropout": Case((129, 3, 0, 50), 1, dropout=0.3),
    "keys of other lengths": Case((40, 0, 7, 90), 1, kv_lengths=(13, 5, 0, 120), mask="full", kv_heads=2),
    "queries, but no keys": Case((9, 30), 1, kv_lengths=(0, 0), mask="full"),
    "answers to two prompts": Case((61, 30, 0, 45, 9, 1, 12), 1, kv_heads=2, parents=(-1, 0, 0, 0, -1, 4, 4)),
    "everything": Case((129, 3, 0, 50), 1, 6, 2, 24, 16, "full", (50, 9), True, 0.2, kv_lengths=(90, 0, 8, 70)),
}


@variants()
def test_fp32_agrees_with_fp64(variant: str, ranks: int, request: pytest.FixtureRequest) -> None:
    """Every third problem by default, other ones for every variant."""
    stepping = Stepping(lazy=ranks % 2 == 0)
    worst, first = {}, list(VARIANTS).index(variant) % 3
    thorough = request.config.getoption("thorough")
    for name in list(PROBLEMS)[0 if thorough else first :: 1 if thorough else 3]:
        case = PROBLEMS[name].on(ranks, variant)
        worst[name] = largest_error(case, run(case, stepping, sink=sink_of(case)))
    assert {name: error for name, error in worst.items() if error > 1e-5} == {}


def test_the_gradient_of_a_sink_is_that_of_all_parts() -> None:
    case = Case((64, 30, 20, 9), 3)
    plan = mixed_plan(case.plan().documents, 3, case.plan().attention)
    assert len(plan.parts) > 1
    assert largest_error(case, run(case, plan=plan, sink=sink_of(case))) <= 1e-5


EXACT = [c for c in capabilities.all_cells() if c.backend == "cpu" and capabilities.unsupported(c) is None]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EXACT), st.integers(1, 7), st.randoms(use_true_random=False))
def test_every_cell_of_the_table_takes_a_sink(cell: capabilities.Cell, ranks: int, rng: Random) -> None:
    case = problem(cell, ranks, rng)
    assert largest_error(case, run(case, Stepping(lazy=ranks % 2 == 0), sink=sink_of(case))) < 1e-5, case


def test_the_sink_takes_a_share_of_every_row() -> None:
    case = PROBLEMS["packed and ragged"].on(3, "ring")
    without = attend_in_process(case.plan(), *case.inputs())
    moved = (run(case, sink=sink_of(case))["out"] - without.out).abs().max() / without.out.abs().max()
    assert moved > 0.2
    assert without.dsink is None


@pytest.mark.parametrize("ranks", [1, 8])
def test_bf16_is_as_exact_as_without_a_sink(ranks: int) -> None:
    case = replace(Case((129, 3, 0, 50, 7, 311), 1, kv_heads=2), dtype=torch.bfloat16).on(ranks, "hierarchical")
    assert largest_error(case, run(case, sink=sink_of(case))) < 2e-2


def step(rank: int, group: Any, cases: list[Case]) -> list[list[torch.Tensor]]:
    """This rank's out, dq, dk and dv of each case, and dsink summed over the ranks, over real messages."""
    results = []
    for case in cases:
        plan, (q, k, v, dout) = case.plan(), case.inputs()
        leaves = [plan.layout.shard(q, rank), plan.kv_layout_in.shard(k, rank), plan.kv_layout_in.shard(v, rank)]
        leaves = [x.requires_grad_() for x in (*leaves, sink_of(case))]
        key = case.dropout_key if case.dropout else None
        out = context_parallel_attention(*leaves[:3], plan, group, dropout_key=key, sink=leaves[3])
        gradients = torch.autograd.grad(out, leaves, plan.layout.shard(dout, rank))
        dist.all_reduce(gradients[3], group=group)  # as a framework does with the gradients of parameters
        results.append([out.detach(), *gradients])
    return results


def test_processes_agree_with_fp64(workers) -> None:
    names = ["packed and ragged", "heads that no rank count divides", "window", "dropout"]
    cases = [PROBLEMS[name].on(3, variant) for name in names for variant in ("ring", "ulysses", "hierarchical")]
    for case, results in zip(cases, zip(*workers.run(3, step, cases), strict=True), strict=True):
        plan = case.plan()
        layouts = plan.layout, plan.layout, plan.kv_layout_in, plan.kv_layout_in
        whole = [layout.unshard([part[i] for part in results]) for i, layout in enumerate(layouts)]
        for _, *_, dsink in results:
            assert largest_error(case, dict(zip(RESULTS, [*whole, dsink], strict=True))) < 1e-5


def call(rank: int, group: Any) -> str:
    """What a rank says to a sink that it alone has."""
    case = PROBLEMS["GQA"].on(3, "ring")
    plan, (q, k, v, _) = case.plan(), case.inputs()
    leaves = [plan.layout.shard(x, rank) for x in (q, k, v)]
    try:
        context_parallel_attention(*leaves, plan, group, sink=sink_of(case) if rank == 2 else None)
    except ConfigError as error:
        return str(error)
    return "attends"


def test_a_sink_on_one_rank_alone_is_refused(workers) -> None:
    for text in workers.run(3, call):
        assert re.search("has_sink: rank 2 has True; ranks 0, 1 have False", text)


@pytest.mark.parametrize(
    ("sink", "says"),
    [([1.0] * 4, r"sink is a list; valid: a tensor, fp32 \[4\]"), (torch.ones(3), r"sink has shape \[3\]; valid: \[4\]"),
     (torch.ones(4, 1), r"sink has shape \[4, 1\]"), (torch.ones(4).double(), "sink is torch.float64; valid: torch.float32"),
     (torch.ones(4).bfloat16(), "sink is torch.bfloat16; valid: torch.float32"),
     (torch.ones(4, device="meta"), "sink is on meta, q is on cpu")],
)  # fmt: skip
def test_sinks_that_do_not_fit_are_refused(sink: Any, says: str) -> None:
    case = PROBLEMS["packed and ragged"]
    with pytest.raises(ConfigError, match=says):
        context_parallel_attention(*case.inputs()[:3], case.plan(), sink=sink)
    with pytest.raises(ConfigError, match=says):
        attend_all_ranks(*([x] for x in case.inputs()[:3]), case.plan(), sink=sink)
    borders = case.documents.offsets
    with pytest.raises(ConfigError, match=says):
        attention(*case.inputs()[:3], borders, borders, sink=sink)


@pytest.mark.parametrize("name", ["GQA", "window", "ALiBi", "dropout", "queries, but no keys"])
def test_one_device_agrees_with_fp64(name: str) -> None:
    case = PROBLEMS[name]
    q, k, v, dout = case.inputs()
    kv = case.kv_documents or case.documents
    options: dict[str, Any] = {
        "mask": case.mask, "window": case.window, "alibi": case.alibi, "dropout_p": case.dropout,
        "dropout_key": case.dropout_key if case.dropout else None, "saved": {},
    }  # fmt: skip
    out, lse = attention(q, k, v, case.documents.offsets, kv.offsets, sink=sink_of(case), **options)
    gradients = attention_backward(dout, q, k, v, out, lse, case.documents.offsets, kv.offsets, **options)
    dsink = sink_gradient(dout, out, lse, sink_of(case))
    assert largest_error(case, dict(zip(RESULTS, (out, *gradients, dsink), strict=True))) < 1e-5


@pytest.mark.parametrize("name", ["window", pytest.param("dropout", marks=pytest.mark.thorough)])
def test_the_check_of_attention_needs_the_sink(name: str) -> None:
    case = PROBLEMS[name].on(3, "ring")
    plan, leaves, dout = all_ranks(case)
    out = attend_here(case, plan, leaves, sink=sink_of(case))
    texts: dict[bool, list[str | None]] = {True: [], False: []}
    for has_sink in (True, False):
        for seed in range(4):
            checks = watch(case, plan, leaves, out, seed, sink=sink_of(case) if has_sink else None)
            if has_sink:
                torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout, retain_graph=True)
            texts[has_sink].append(compare_here(checks))
    assert texts[True] == [None] * 4
    assert any(text is not None for text in texts[False])


def test_a_sink_of_minus_infinity_is_none() -> None:
    case = Case((40, 0, 7, 90), 1, kv_lengths=(13, 5, 0, 120), mask="full", kv_heads=2).on(3, "ring")
    none = torch.full((case.heads,), -torch.inf)
    with_it = attend_in_process(case.plan(), *case.inputs(), sink=none)
    without = attend_in_process(case.plan(), *case.inputs())
    assert with_it.dsink is not None and (with_it.dsink == 0).all()
    for name in (*NAMES, "lse"):
        assert torch.equal(getattr(with_it, name), getattr(without, name)), name


def test_only_the_sink_may_want_a_gradient() -> None:
    case = PROBLEMS["GQA"]
    sink = sink_of(case).requires_grad_()
    out = context_parallel_attention(*case.inputs()[:3], case.plan(), sink=sink)
    (dsink,) = torch.autograd.grad(out, sink, case.inputs()[3])
    assert float((dsink - exact_results(case, True)["dsink"]).abs().max()) < 1e-4
