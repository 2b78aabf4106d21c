"""Latents that travel: out and the gradients of q, the latent, the shared channels and the up-projection, against dense
attention of expanded keys and values in fp64."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import (
    ConfigError,
    build_plan,
    context_parallel_attention,
    context_parallel_latent_attention,
    verify_plan,
)
from mindspeed_cp.engine import Stepping
from mindspeed_cp.engine.attention import expanded_rows
from mindspeed_cp.ops.attention.latent import LatentExpansion
from mindspeed_cp.plan import Plan, traffic
from mindspeed_cp.simulate.tile_work import TileCounter
from tests.engine.all_ranks import attend_all_ranks
from tests.engine.cases import Case, all_ranks, variants
from tests.engine.draw import problem
from tests.engine.layer_weights import exact_results, kv_up_of, largest_error, run, sink_of
from tests.engine.test_attention_check import compare_here, watch
from tests.engine.test_buffers import sent
from tools import capabilities

#: Results of attend_in_process, in the order of the inputs: q, shared channels, latents, up-projection.
RESULTS = ("out", "dq", "dk", "dv", "dkv_up")

RAGGED = Case((129, 3, 0, 50, 7, 190), 1, 3, 3, 24, 16, latent=(20, 8))

PROBLEMS = {
    "packed and ragged": RAGGED,
    "one head": replace(RAGGED, heads=1, kv_heads=1),
    "heads that no rank count divides": replace(RAGGED, heads=7, kv_heads=7, lengths=(90, 41)),
    "shorter than the ranks": replace(RAGGED, lengths=(1, 2, 0, 1)),
    "no token": replace(RAGGED, lengths=(0, 0)),
    "full mask": replace(RAGGED, mask="full"),
    "window": replace(RAGGED, window=(30, 0)),
    "window on both sides": replace(RAGGED, mask="full", window=(13, 40)),
    "ALiBi": replace(RAGGED, alibi=True, heads=4, kv_heads=4),
    "dropout": replace(RAGGED, dropout=0.3),
    "keys of other lengths": replace(RAGGED, lengths=(40, 0, 7, 90), kv_lengths=(13, 5, 0, 120), mask="full"),
    "wide latents": replace(RAGGED, latent=(64, 1)),
    "everything": replace(
        RAGGED, lengths=(129, 3, 0, 50), mask="full", window=(50, 9), alibi=True, dropout=0.2, kv_lengths=(90, 0, 8, 70)
    ),
}


@variants()
def test_fp32_agrees_with_fp64(variant: str, ranks: int, request: pytest.FixtureRequest) -> None:
    """Every third problem by default, other ones for every variant."""
    thorough = request.config.getoption("thorough")
    worst, first = {}, ranks % 3
    for name in list(PROBLEMS)[0 if thorough else first :: 1 if thorough else 3]:
        case = PROBLEMS[name].on(ranks, variant)
        worst[name] = largest_error(case, run(case, Stepping(lazy=ranks % 2 == 0)))
    assert {name: error for name, error in worst.items() if error > 1e-5} == {}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_with_a_sink(ranks: int) -> None:
    case = PROBLEMS["window"].on(ranks, "direct")
    results = run(case, sink=sink_of(case))
    assert largest_error(case, results) < 1e-5 and results["dsink"] is not None


EXACT = [
    c
    for c in capabilities.all_cells()
    if c.backend == "cpu" and c.kv_heads == "as queries" and capabilities.unsupported(c) is None
]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(EXACT), st.integers(1, 7), st.randoms(use_true_random=False))
def test_every_cell_without_groups_takes_latents(cell: capabilities.Cell, ranks: int, rng: Random) -> None:
    case = problem(cell, ranks, rng)
    case = replace(case, latent=(rng.choice((1, 16, 33)), rng.randint(1, case.head_dim - 1)))
    verify_plan(case.plan())
    assert largest_error(case, run(case, Stepping(lazy=ranks % 2 == 0))) < 1e-5, case


BF16 = replace(RAGGED, lengths=(400, 3, 0, 250, 607), dtype=torch.bfloat16, latent=(48, 8))


def l2_errors(case: Case, results: dict[str, Any]) -> np.ndarray:
    exact = exact_results(case, False)
    return np.array([float((results[name].double() - x).norm() / x.norm()) for name, x in exact.items()])


def results_of_expanded(case: Case) -> dict[str, Any]:
    """`RESULTS` where keys and values travel; the gradient of the up-projection is that of each rank's rows, summed."""
    plan = plan_without(case)
    q, shared, latent, dout = case.inputs()
    kv_up = kv_up_of(case).requires_grad_()
    leaves = [[layout.shard(x, rank).requires_grad_() for rank in range(plan.ranks)]
              for layout, x in ((plan.layout, q), (plan.layout, shared[:, 0]), (plan.layout, latent[:, 0]))]  # fmt: skip
    expanded = [expanded_rows(*rows, kv_up, case.attention) for rows in zip(*leaves[1:], strict=True)]
    out = attend_all_ranks(leaves[0], *zip(*expanded, strict=True), plan)
    douts, flat = [plan.layout.shard(dout, rank) for rank in range(plan.ranks)], [x for xs in leaves for x in xs]
    *gradients, dkv_up = torch.autograd.grad(out, [*flat, kv_up], douts)
    parts = [out, *(gradients[plan.ranks * i : plan.ranks * (i + 1)] for i in range(3))]
    whole = [plan.layout.unshard([x.detach() for x in xs]) for xs in parts]
    return dict(zip(RESULTS, [*whole[:2], whole[2][:, None], whole[3][:, None], dkv_up], strict=False))


def test_expanded_keys_and_values_agree_with_fp64() -> None:
    case = RAGGED.on(3, "ring")
    assert largest_error(case, results_of_expanded(case)) < 1e-5


@pytest.mark.parametrize("variant", ["ring", "direct", "hierarchical, KV fetch", "ulysses"])
def test_in_bf16_the_ranks_add_nothing(variant: str) -> None:
    """Nor to the up-projection's gradient, beyond the rounding of each rank's share, as of any parameter's."""
    alone, together = (l2_errors(BF16, run(BF16.on(ranks, variant))) for ranks in (1, 8))
    assert (together[:-1] <= 1.1 * alone[:-1]).all(), together / alone
    expanded = l2_errors(BF16, results_of_expanded(BF16.on(8, variant)))
    assert together[-1] <= expanded[-1], (together, expanded)


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_bf16_is_as_exact_as_expanded_keys_and_values(ranks: int) -> None:
    case = BF16.on(ranks, "ring")
    ratios = l2_errors(case, run(case)) / l2_errors(case, results_of_expanded(case))
    assert (ratios <= 1.05).all(), ratios


@pytest.mark.parametrize("variant", ["ring", "direct, 3 rounds ahead", "all_gather", "hierarchical, KV fetch"])
@pytest.mark.parametrize("window", [None, (9, 0)])
def test_the_model_charges_the_rows_that_are_expanded(
    monkeypatch: pytest.MonkeyPatch, variant: str, window: tuple[int, int] | None
) -> None:
    case = replace(RAGGED, window=window, heads=4, kv_heads=4).on(4, variant)
    expanded = 0.0
    expand = LatentExpansion.expand

    def counted(self: LatentExpansion, shared: torch.Tensor, latent: torch.Tensor) -> Any:
        nonlocal expanded
        k, v = expand(self, shared, latent)
        expanded += len(k) * k.shape[1] / case.heads
        return k, v

    monkeypatch.setattr(LatentExpansion, "expand", counted)
    plan = case.plan()
    run(case)
    work = [TileCounter(plan).work(direction).expansions for direction in ("forward", "backward")]
    own = plan.documents.tokens  # each rank reads its own rows once in each direction
    assert work[0].sum() + own + (work[1].sum() + 2 * own) / 3 == pytest.approx(expanded)


@pytest.mark.parametrize("variant", ["ring", "direct", "hierarchical, KV fetch", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_plan_are_sent(variant: str, dtype: torch.dtype) -> None:
    case = replace(RAGGED, dtype=dtype).on(4, variant)
    planned = traffic(case.plan(), dtype.itemsize)
    with sent(case.ranks) as counts:
        run(case)
    for count, row in zip(counts, planned, strict=True):
        moved = row["redistribution_forward"] + row["redistribution_backward"]
        fetched = row["fetch_forward"] + row["fetch_backward"]
        assert count == {"fetch": fetched, "reduce": row["reduce"], "redistribution": moved}


@pytest.mark.parametrize("name", ["window", "packed and ragged"])
def test_the_check_of_attention_expands_latents(name: str) -> None:
    case = PROBLEMS[name].on(3, "ring")
    plan, leaves, dout = all_ranks(case)
    texts: dict[bool, list[str | None]] = {True: [], False: []}
    for right in (True, False):
        weight = kv_up_of(case)
        out = attend_all_ranks(*leaves, plan, kv_up=weight if right else 1.1 * weight)
        for seed in range(4):
            checks = watch(case, plan, leaves, out, seed, kv_up=weight)
            torch.autograd.grad(out, [x for xs in leaves for x in xs], dout, retain_graph=True)
            texts[right].append(compare_here(checks))
    assert texts[True] == [None] * 4
    assert all(text is not None and "attention of layer 1" in text for text in texts[False])


def step(rank: int, group: Any, cases: list[Case]) -> list[list[torch.Tensor]]:
    """This rank's out and gradients of each case with latents, then without; that of the up-projection summed over the
    ranks."""
    results = []
    for case, plan in plans_of(cases):
        q, shared, latent, dout = case.inputs()
        layouts = plan.layout, plan.kv_layout_in, plan.kv_layout_in
        leaves = [layout.shard(x, rank) for layout, x in zip(layouts, (q, shared, latent), strict=True)]
        leaves = [x.requires_grad_() for x in (leaves[0], leaves[1][:, 0], leaves[2][:, 0], kv_up_of(case))]
        key = case.dropout_key if case.dropout else None
        out = context_parallel_latent_attention(*leaves, plan, group=group, dropout_key=key)
        gradients = torch.autograd.grad(out, leaves, plan.layout.shard(dout, rank))
        dist.all_reduce(gradients[3], group=group)  # as a framework does with the gradients of parameters
        results.append([out.detach(), *gradients])
    return results


def plans_of(cases: list[Case]) -> list[tuple[Case, Plan]]:
    return [(case, case.plan()) for case in cases] + [(case, plan_without(case)) for case in cases]


def plan_without(case: Case) -> Plan:
    return build_plan(case.documents, case.plan().topology, case.attention, case.algorithm, latents="off")


def test_processes_agree_with_fp64(workers) -> None:
    names = ["packed and ragged", "dropout"]
    cases = [PROBLEMS[name].on(3, variant) for name in names for variant in ("ring", "direct", "hierarchical")]
    for (case, plan), results in zip(plans_of(cases), zip(*workers.run(3, step, cases), strict=True), strict=True):
        layouts = plan.layout, plan.layout, plan.kv_layout_in, plan.kv_layout_in
        whole = [layout.unshard([part[i] for part in results]) for i, layout in enumerate(layouts)]
        whole[2:] = [x[:, None] for x in whole[2:]]
        for *_, dkv_up in results:
            assert largest_error(case, dict(zip(RESULTS, [*whole, dkv_up], strict=False))) < 1e-5


@pytest.mark.parametrize(
    ("kv_up", "says"),
    [(None, r"kv_up is a NoneType; valid for a plan whose attention has latents: .* a tensor \[96, 20\]"),
     (torch.ones(96, 21), r"kv_up has shape \[96, 21\]; valid: \[96, 20\], for each of 3 heads the 16 rows of k"),
     (torch.ones(96, 20).bfloat16(), r"kv_up is torch.bfloat16 on cpu, q is torch.float32 on cpu"),
     (torch.ones(96, 20, device="meta"), "kv_up is torch.float32 on meta, q is torch.float32 on cpu")],
)  # fmt: skip
def test_up_projections_that_do_not_fit_are_refused(kv_up: Any, says: str) -> None:
    inputs, plan = RAGGED.inputs()[:3], RAGGED.plan()
    with pytest.raises(ConfigError, match=says):
        context_parallel_attention(*inputs, plan, kv_up=kv_up)
    with pytest.raises(ConfigError, match=says):
        attend_all_ranks(*([x] for x in inputs), plan, kv_up=kv_up)
    q, shared, latent = inputs
    with pytest.raises(ConfigError, match=says.replace(" for a plan whose attention has latents", ".*")):
        context_parallel_latent_attention(q, shared[:, 0], latent[:, 0], kv_up, plan_without(RAGGED))


def test_calls_that_do_not_fit_are_refused() -> None:
    q, shared, latent, _ = RAGGED.inputs()
    without = plan_without(RAGGED)
    k, v = expanded_rows(shared[:, 0], latent[:, 0], kv_up_of(RAGGED), RAGGED.attention)
    with pytest.raises(ConfigError, match="kv_up is given, but the plan's attention has no latents"):
        context_parallel_attention(q, k, v, without, kv_up=kv_up_of(RAGGED))
    with pytest.raises(ConfigError, match=r"k has shape \[379, 3, 24\]; the plan gives this rank \[379, 1, 8\]"):
        context_parallel_attention(q, k, v, RAGGED.plan(), kv_up=kv_up_of(RAGGED))
    with pytest.raises(ConfigError, match=r"latent has shape \[379, 1, 20\]; valid: \[rows, channels\]"):
        context_parallel_latent_attention(q, shared[:, 0], latent, kv_up_of(RAGGED), without)
    with pytest.raises(ConfigError, match="plan is None; valid: a Plan"):
        context_parallel_latent_attention(q, shared[:, 0], latent[:, 0], kv_up_of(RAGGED), None)  # type: ignore
