"""The check of attention: no difference where attention is right; else it names head, rows and rank."""

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
from mindspeed_cp.engine.attention_check import (
    PAIRS,
    QUERIES,
    AttentionCheck,
    _difference,
    check_attention,
    draw_sample,
)
from mindspeed_cp.engine.rank_context import rank_context
from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.ops.attention.backends import backend_for_device
from tests.engine.cases import DEFAULT_SIZES, VARIANTS, Case, all_ranks, attend, attend_here, local
from tests.engine.draw import problem
from tests.workers import GlooPool
from tools import capabilities

EXACT = [c for c in capabilities.all_cells() if c.backend == "cpu" and capabilities.unsupported(c) is None]
ONE_DOCUMENT = Case((230,), 4, heads=4, kv_heads=2, algorithm="ring")


def watch(
    case: Case,
    plan: Plan,
    leaves: Sequence[Sequence[torch.Tensor]],
    out: Sequence[torch.Tensor],
    seed: int,
    sink: torch.Tensor | None = None,
    kv_up: torch.Tensor | None = None,
) -> list[AttentionCheck]:
    """Checks that observed one call, one for each rank."""
    checks = [AttentionCheck(1, (seed,)) for _ in range(case.ranks)]
    for rank, check in enumerate(checks):
        key = case.dropout_key if case.dropout else None
        check.observe(*(of_ranks[rank] for of_ranks in leaves), out[rank], plan, rank, key, sink, kv_up)
    return checks


def compare_here(checks: Sequence[AttentionCheck]) -> str | None:
    """What `compare` returns on the rank of the queries, for the checks of all ranks in this process."""
    observed = [check._observed for check in checks]
    if observed[0] is None:
        return None
    shards = {rank: x.kv for rank, x in enumerate(observed) if x is not None and len(x.kv)}
    owner = observed[observed[0].sample.rank]
    assert owner is not None
    return _difference(owner, shards, range(len(observed)), checks[0].layer)


def backward(leaves: Sequence[Sequence[torch.Tensor]], out: Sequence[torch.Tensor], dout: Any) -> None:
    torch.autograd.grad(out, [x for of_ranks in leaves for x in of_ranks], dout)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(EXACT),
    st.sampled_from(DEFAULT_SIZES),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.randoms(use_true_random=False),
)
def test_right_attention_in_every_cell_has_no_difference(
    cell: capabilities.Cell, ranks: int, dtype: torch.dtype, rng: Random
) -> None:
    case = replace(problem(cell, ranks, rng), dtype=dtype)
    plan, leaves, dout = all_ranks(case)
    out = attend_here(case, plan, leaves)
    watched = [watch(case, plan, leaves, out, seed) for seed in range(4)]
    backward(leaves, out, dout)
    assert [compare_here(checks) for checks in watched] == [None] * 4


def drop_last_tiles(case: Case, plan: Plan, rank: int, direction: str) -> None:
    """Let a rank leave out the tiles of its last step."""
    backend = backend_for_device("cpu")
    context = rank_context(plan, rank, backend, case.dtype, torch.device("cpu"))
    (schedule,) = context.schedules(plan, backend, direction, False)
    step = max(n for n, step in enumerate(schedule.steps) if step.compute)
    steps = [replace(x, compute=[]) if n == step else x for n, x in enumerate(schedule.steps)]
    object.__setattr__(schedule, "steps", steps)


@pytest.mark.parametrize("variant", ["ring", "hybrid", "direct", "double_ring"])
def test_a_missing_tile_is_found_wherever_it_changes_the_rows_and_its_rank_is_named(variant: str) -> None:
    case = ONE_DOCUMENT.on(4, variant)
    plan = case.plan()
    _, leaves, _ = all_ranks(case)
    whole = attend_here(case, plan, leaves)
    drop_last_tiles(case, plan, 3, "forward")
    out = attend_here(case, plan, leaves)
    texts = []
    for seed in range(40):
        checks = watch(case, plan, leaves, out, seed)
        sample = checks[0]._observed.sample
        rows = slice(sample.row, sample.row + sample.rows), sample.head
        differs = not torch.equal(out[sample.rank][rows], whole[sample.rank][rows])
        texts.append(compare_here(checks))
        assert (texts[-1] is not None) == differs, (seed, sample, texts[-1])
    problems = [text for text in texts if text is not None]
    assert len(problems) >= 4
    for text in problems:
        assert "attention of layer 1" in text and "the output of queries" in text and "computed on rank 3" in text


def test_a_wrong_backward_shows_in_the_gradient_of_q() -> None:
    plan = ONE_DOCUMENT.plan()
    _, leaves, dout = all_ranks(ONE_DOCUMENT)
    drop_last_tiles(ONE_DOCUMENT, plan, 1, "backward")
    out = attend_here(ONE_DOCUMENT, plan, leaves)
    watched = [watch(ONE_DOCUMENT, plan, leaves, out, seed) for seed in range(20)]
    backward(leaves, out, dout)
    problems = [text for text in map(compare_here, watched) if text is not None]
    assert problems and all("the gradient of q of queries" in x and "computed on rank 1" in x for x in problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_and_nan_are_named_with_head_and_rank(dtype: torch.dtype) -> None:
    case = replace(ONE_DOCUMENT, dtype=dtype)
    plan, leaves, _ = all_ranks(case)
    out = [x.detach().clone() for x in attend_here(case, plan, leaves)]
    noise = torch.randn(out[2][:, 1].shape, generator=torch.Generator().manual_seed(3))
    out[2][:, 1] += (0.25 * noise).to(dtype)
    out[0][:, 0, 3] = float("nan")
    problems = [compare_here(watch(case, plan, leaves, out, seed)) for seed in range(40)]
    assert any(text is not None and "head 1" in text and "computed on rank 2" in text for text in problems)
    assert any(text is not None and "head 0" in text and "computed on rank 0" in text for text in problems)
    assert any(text is not None and "is NaN" in text for text in problems)


def test_recomputation_is_observed_once_and_adds_the_gradients() -> None:
    plan, leaves, dout = all_ranks(ONE_DOCUMENT)
    with torch.no_grad():
        first = [x + 0.0 for x in attend_here(ONE_DOCUMENT, plan, leaves)]
    checks = watch(ONE_DOCUMENT, plan, leaves, first, 3)
    out = [x + 9.0 for x in attend_here(ONE_DOCUMENT, plan, leaves)]
    for rank, check in enumerate(checks):
        check.observe(*(x[rank] for x in leaves), out[rank], plan, rank)
    owner = checks[0]._observed.sample.rank
    assert "dout" not in checks[owner]._observed.rows
    backward(leaves, out, dout)
    assert "dq" in checks[owner]._observed.rows
    assert compare_here(checks) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_together_hold_exactly_the_keys_that_the_queries_see(variant: str) -> None:
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


def test_a_sample_has_a_bounded_number_of_pairs() -> None:
    plan = Case((60_000, 300_000), 8).plan()
    for seed in range(20):
        sample = draw_sample(plan, np.random.default_rng(seed))
        assert sample is not None and (sample.rows == 1 or sample.rows * sample.keys <= PAIRS)
    assert draw_sample(Case((0, 0), 3).plan(), np.random.default_rng(0)) is None


def problems_of_processes(rank: int, group: Any, seeds: int) -> list[str | None]:
    """Rank 1 changes its result."""
    case = ONE_DOCUMENT.on(3)
    plan, leaves, dout = local(rank, case)
    texts = []
    for seed in range(seeds):
        check = AttentionCheck(1, (seed,))
        out = attend(case, plan, leaves, group) * (2.0 if rank == 1 else 1.0)
        check.observe(*leaves, out, plan, rank)
        torch.autograd.grad(out, leaves, dout)
        texts.append(check.compare(group))
    return texts


def test_the_rank_of_the_queries_reports_the_difference(workers: GlooPool) -> None:
    first, second, third = workers.run(3, problems_of_processes, 12)
    assert first == third == [None] * 12
    assert 0 < sum(text is not None for text in second) < 12


def errors_of_a_call(rank: int, group: Any, factor: float, in_backward: bool) -> list[str]:
    """Rank 1 computes a result that is `factor` times too large."""
    case = ONE_DOCUMENT.on(3)
    plan, leaves, dout = local(rank, case)
    errors = []
    for seed in range(8):
        out = attend(case, plan, leaves, group) * (factor if rank == 1 else 1.0)
        try:
            if in_backward:
                check = AttentionCheck(1, (seed,))
                check.observe(*leaves, out, plan, rank)
                check.compare_in_backward(leaves[0], group, f"batch {seed}: ")
                torch.autograd.grad(out, leaves, dout)
            else:
                check_attention(*leaves, out, plan, group, seed=seed)
        except CorruptionError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("in_backward", [False, True])
def test_one_call_finds_a_result_that_is_one_percent_too_large(workers: GlooPool, in_backward: bool) -> None:
    assert workers.run(3, errors_of_a_call, 1.0, in_backward) == [[], [], []]
    first, second, third = workers.run(3, errors_of_a_call, 1.01, in_backward)
    assert first == third == [] and second
    for text in second:
        assert (
            "attention of layer 1, head" in text and "of document 0, computed on rank 1 " in text and "\n" not in text
        )
        assert not in_backward or text.startswith("batch ")
