"""The canary of attention: silent for every kind of attention, and it names the rank and the tile that were wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import Plan
from mindspeed_cp.engine.canary import AttentionCanary, check_all_ranks
from mindspeed_cp.engine.rank_context import rank_context
from mindspeed_cp.ops.attention import backend_for_device
from mindspeed_cp.plan.sample import PAIRS, QUERIES, draw_sample
from tests.engine.cases import DEFAULT_SIZES, VARIANTS, Case, all_ranks, attend, attend_here, local
from tests.engine.draw import problem
from tests.workers import GlooPool
from tools import capabilities

EXACT = [c for c in capabilities.all_cells() if c.backend == "cpu" and capabilities.unsupported(c) is None]
ONE_DOCUMENT = Case((230,), 4, heads=4, kv_heads=2, algorithm="ring")


def watch(
    case: Case, plan: Plan, leaves: Sequence[Sequence[torch.Tensor]], out: Sequence[torch.Tensor], seed: int
) -> list[AttentionCanary]:
    """Canaries that saw one call, one for each rank."""
    canaries = [AttentionCanary(1, (seed,)) for _ in range(case.ranks)]
    for rank, canary in enumerate(canaries):
        key = case.dropout_key if case.dropout else None
        canary.observe(*(of_ranks[rank] for of_ranks in leaves), out[rank], plan, rank, key)
    return canaries


def backward(leaves: Sequence[Sequence[torch.Tensor]], out: Sequence[torch.Tensor], dout: Any) -> None:
    torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(EXACT),
    st.sampled_from(DEFAULT_SIZES),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.randoms(use_true_random=False),
)
def test_it_is_silent_where_attention_is_right(
    cell: capabilities.Cell, ranks: int, dtype: torch.dtype, rng: Random
) -> None:
    case = replace(problem(cell, ranks, rng), dtype=dtype)
    plan, leaves, dout = all_ranks(case)
    out = attend_here(case, plan, leaves)
    watched = [watch(case, plan, leaves, out, seed) for seed in range(4)]
    backward(leaves, out, dout)
    assert [check_all_ranks(canaries) for canaries in watched] == [None] * 4


def drop_last_tiles(case: Case, plan: Plan, rank: int, direction: str) -> int:
    """Let a rank leave out the tiles of its last step; return the step."""
    backend = backend_for_device("cpu")
    context = rank_context(plan, rank, backend, case.dtype, torch.device("cpu"))
    (schedule,) = context.schedules(plan, backend, direction, False)
    step = max(n for n, step in enumerate(schedule.steps) if step.compute)
    steps = [replace(x, compute=[]) if n == step else x for n, x in enumerate(schedule.steps)]
    object.__setattr__(schedule, "steps", steps)
    return step


@pytest.mark.parametrize("variant", ["ring", "hybrid", "direct", "double_ring"])
def test_a_tile_that_is_left_out_is_named_with_its_rank(variant: str) -> None:
    case = ONE_DOCUMENT.on(4, variant)
    plan = case.plan()
    _, leaves, _ = all_ranks(case)
    whole = attend_here(case, plan, leaves)
    step = drop_last_tiles(case, plan, 3, "forward")
    out = attend_here(case, plan, leaves)
    texts = []
    for seed in range(40):
        canaries = watch(case, plan, leaves, out, seed)
        sample = canaries[0]._taken.sample
        rows = slice(sample.row, sample.row + sample.rows), sample.head
        differs = not torch.equal(out[sample.rank][rows], whole[sample.rank][rows])
        texts.append(check_all_ranks(canaries))
        assert (texts[-1] is not None) == differs, (seed, sample, texts[-1])
    told = [text for text in texts if text is not None]
    assert len(told) >= 4
    for text in told:
        assert "attention of layer 1" in text and "the output of queries" in text and "computed on rank 3" in text
        assert f"tile of step {step}" in text and "was missing" in text, text


def test_a_wrong_backward_is_found_in_the_gradient_of_q() -> None:
    plan = ONE_DOCUMENT.plan()
    _, leaves, dout = all_ranks(ONE_DOCUMENT)
    drop_last_tiles(ONE_DOCUMENT, plan, 1, "backward")
    out = attend_here(ONE_DOCUMENT, plan, leaves)
    watched = [watch(ONE_DOCUMENT, plan, leaves, out, seed) for seed in range(20)]
    backward(leaves, out, dout)
    told = [text for text in map(check_all_ranks, watched) if text is not None]
    assert told and all("the gradient of q of queries" in text and "computed on rank 1" in text for text in told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_no_tile_explains_are_told_by_their_queries(dtype: torch.dtype) -> None:
    case = replace(ONE_DOCUMENT, dtype=dtype)
    plan, leaves, _ = all_ranks(case)
    out = [x.detach().clone() for x in attend_here(case, plan, leaves)]
    noise = torch.randn(out[2][:, 1].shape, generator=torch.Generator().manual_seed(3))
    out[2][:, 1] += (0.25 * noise).to(dtype)  # of one query, a tile may explain it by chance
    out[0][:, 0, 3] = float("nan")
    told = [check_all_ranks(watch(case, plan, leaves, out, seed)) for seed in range(40)]
    assert any(text is not None and "head 1" in text and "computed on rank 2" in text for text in told)
    assert any(text is not None and "head 0" in text and "computed on rank 0" in text for text in told)
    assert all(text is None or "tile" not in text for text in told)


def test_recomputation_counts_once_and_brings_the_gradients() -> None:
    plan, leaves, dout = all_ranks(ONE_DOCUMENT)
    with torch.no_grad():
        first = [x + 0.0 for x in attend_here(ONE_DOCUMENT, plan, leaves)]
    canaries = watch(ONE_DOCUMENT, plan, leaves, first, 3)
    out = [x + 9.0 for x in attend_here(ONE_DOCUMENT, plan, leaves)]
    for rank, canary in enumerate(canaries):
        canary.observe(*(x[rank] for x in leaves), out[rank], plan, rank, None)
    owner = canaries[0]._taken.sample.rank
    assert "dout" not in canaries[owner]._taken.rows
    backward(leaves, out, dout)
    assert "dq" in canaries[owner]._taken.rows
    assert check_all_ranks(canaries) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_keys_of_all_ranks_are_those_that_the_queries_see(variant: str) -> None:
    case = Case((37, 0, 51, 3), 4, window=(9, 0), heads=8).on(4, variant)
    plan = case.plan()
    for seed in range(20):
        sample = draw_sample(plan, np.random.default_rng(seed))
        assert sample is not None and 1 <= sample.rows <= QUERIES
        tokens = plan.layout.tokens(sample.rank)[sample.row : sample.row + sample.rows]
        first = plan.documents.offsets[sample.document]
        assert (tokens - first == sample.position + np.arange(sample.rows)).all()
        seen = []
        for rank in range(case.ranks):
            key_rows, positions = sample.key_rows(plan, rank)
            rows = plan.kv_layout_in.tokens(rank)[key_rows]
            assert (rows == first + sample.first_key + positions).all()
            seen += rows.tolist()
        wanted = range(max(0, sample.position - 9), sample.position + sample.rows)
        assert sorted(seen) == [first + position for position in wanted]


def test_the_number_of_pairs_is_bounded() -> None:
    plan = Case((60_000, 300_000), 8).plan()
    for seed in range(20):
        sample = draw_sample(plan, np.random.default_rng(seed))
        assert sample is not None and (sample.rows == 1 or sample.rows * sample.keys <= PAIRS)
    assert draw_sample(Case((0, 0), 3).plan(), np.random.default_rng(0)) is None


def told_by_processes(rank: int, group: Any, seeds: int) -> list[str | None]:
    """Rank 1 changes its result."""
    case = ONE_DOCUMENT.on(3)
    plan, leaves, dout = local(rank, case)
    texts = []
    for seed in range(seeds):
        canary = AttentionCanary(1, (seed,))
        out = attend(case, plan, leaves, group) * (2.0 if rank == 1 else 1.0)
        canary.observe(*leaves, out, plan, rank, None)
        torch.autograd.grad(out, leaves, dout)
        texts.append(canary.check(group))
    return texts


def test_processes_tell_it_on_the_rank_of_the_queries(workers: GlooPool) -> None:
    first, second, third = workers.run(3, told_by_processes, 12)
    assert first == third == [None] * 12
    assert 0 < sum(text is not None for text in second) < 12
