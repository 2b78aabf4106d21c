"""context_parallel_roll against a roll of the whole row: values, gradients, any plan, real process groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan, context_parallel_roll
from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.comm.in_memory import InMemoryNetwork
from mindspeed_cp.engine.all_ranks import run_all_ranks
from mindspeed_cp.engine.roll import rank_roll, roll_run
from tests.layout.test_roll import dense_roll

LENGTHS = (37, 0, 5, 1, 64, 2, 23, 11)
ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=8)

#: Algorithm, its options, and the layout of linear layers, of the plans whose rows are rolled.
PLANS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "zig-zag": ("ring", {}, None),
    "contiguous": ("ring", {"layout": "contiguous"}, None),
    "balanced": ("direct", {"layout": "balanced"}, None),
    "balanced, linear layout": ("direct", {"layout": "balanced"}, "hidden"),
    "heads split": ("ulysses", {}, None),
    "hierarchical": ("hierarchical", {}, None),
}


def plan_of(name: str, ranks: int, lengths: tuple[int, ...] = LENGTHS) -> Plan:
    """Build one of PLANS."""
    algorithm, options, mode = PLANS[name]
    plan = build_plan(Documents(lengths), Topology(1, ranks), ATTENTION, algorithm, **options)
    return plan if mode is None else with_linear_layout(plan, mode)


def whole_rows(plan: Plan, *shape: int) -> torch.Tensor:
    """Draw rows of the whole batch in fp64."""
    return torch.randn(plan.documents.tokens, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def expected_roll(x: torch.Tensor, plan: Plan, shift: int, fill: float = 0.0) -> torch.Tensor:
    return torch.from_numpy(dense_roll(x.numpy(), plan.documents, shift, fill))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(5, marks=pytest.mark.thorough)])
def test_all_ranks_of_any_plan(name: str, ranks: int) -> None:
    for shift in (1, 2, -3, 70):
        plan = plan_of(name, ranks)
        x, layout = whole_rows(plan, 3, 2), plan.batch_layout
        network = InMemoryNetwork(ranks)
        runs = [
            roll_run(
                layout.shard(x, rank),
                rank_roll(layout, shift, rank, x.device),
                network.transport(rank),
                -1.0,
                "rows",
            )
            for rank in range(ranks)
        ]
        assert torch.equal(layout.unshard(run_all_ranks(runs, network)), expected_roll(x, plan, shift, -1.0))


def rolls_of_rank(rank: int, group: Any, names: list[str], lengths: tuple[int, ...], shift: int) -> list[Any]:
    """Return, for each plan, rolled rows, the gradient of their weighted sum, and rolled tokens and flags."""
    results = []
    for name in names:
        plan = plan_of(name, group.size(), lengths)
        layout = plan.batch_layout
        x, weights = whole_rows(plan, 2, 3), whole_rows(plan, 2, 3) ** 2
        own = layout.shard(x, rank).requires_grad_()
        out = context_parallel_roll(own, plan, shift, group)
        (gradient,) = torch.autograd.grad((out * layout.shard(weights, rank)).sum(), own)
        tokens = torch.arange(plan.documents.tokens)
        results.append(
            [
                out.detach(),
                gradient,
                context_parallel_roll(layout.shard(tokens, rank), plan, shift, group, fill=-100),
                context_parallel_roll(layout.shard(tokens % 3 == 0, rank), plan, shift, group),
            ]
        )
    return results


@pytest.mark.parametrize(
    ("ranks", "lengths", "shift"), [(2, LENGTHS, 1), (3, LENGTHS, -2), (3, (1, 2), 1), (4, (0, 3, 1), 1)]
)
def test_ranks_of_a_group_roll_rows_and_gradients(workers, ranks, lengths, shift):
    names = ["zig-zag", "balanced, linear layout", "hierarchical"]
    results = workers.run(ranks, rolls_of_rank, names, lengths, shift)
    for number, name in enumerate(names):
        plan = plan_of(name, ranks, lengths)
        x, tokens = whole_rows(plan, 2, 3), torch.arange(plan.documents.tokens)
        rows, gradients, token_rows, flags = (
            plan.batch_layout.unshard([result[number][part] for result in results]) for part in range(4)
        )
        assert torch.equal(rows, expected_roll(x, plan, shift))
        assert torch.equal(gradients, expected_roll(x**2, plan, -shift))
        assert torch.equal(token_rows, expected_roll(tokens, plan, shift, -100))
        assert torch.equal(flags, expected_roll(tokens % 3 == 0, plan, shift))
        assert (token_rows.dtype, flags.dtype) == (torch.int64, torch.bool)


def test_one_rank_needs_no_group() -> None:
    plan = plan_of("zig-zag", 1)
    x = whole_rows(plan)
    assert torch.equal(context_parallel_roll(x, plan), expected_roll(x, plan, 1))
    assert torch.autograd.gradcheck(lambda rows: context_parallel_roll(rows, plan_of("zig-zag", 1, (3, 1)), 1),
                                    torch.ones(4, 2, dtype=torch.float64, requires_grad=True))  # fmt: skip


def test_what_does_not_fit_the_plan_is_refused() -> None:
    plan = plan_of("zig-zag", 1)
    tokens = torch.arange(plan.documents.tokens)
    for arguments, words in (
        ((tokens[1:], plan), r"rank 0: x has shape \[142\]; valid: \[143, ...\]"),
        ((np.arange(143), plan), "x has shape ndarray"),
        ((tokens, plan, 1.5), "shift is 1.5; valid: an integer"),
        ((tokens, plan.documents), "plan is .*valid: a Plan"),
        ((tokens, plan_of("zig-zag", 2)), "the plan is for 2 ranks, but the group has 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            context_parallel_roll(*arguments)
