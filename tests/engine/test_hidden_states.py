"""Linear layers on a layout of their own: attention against the dense fp64 reference, and hidden states there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import Plan
from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.comm.group_transport import GroupTransport
from mindspeed_cp.engine.hidden_states import hidden_redistribution, redistribute_hidden
from mindspeed_cp.layout import sequence_parallel_layout
from tests.engine.cases import Case, run_here, worst

LENGTHS = (129, 3, 0, 50, 7, 211)
BALANCED = (("layout", "balanced"),)


class Remapped(Case):
    """Attention of a plan that was balanced, called with equal token counts."""

    def plan(self) -> Plan:
        return with_linear_layout(super().plan(), "qkv")


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (1, 5), (2, 4), (2, 8)])
def test_attention_is_exact(nodes, ranks):
    base = {"options": BALANCED, "nodes": nodes}
    cases = [
        Remapped(LENGTHS, ranks, 6, 2, algorithm="direct", **base),
        Remapped(LENGTHS, ranks, 6, 2, algorithm="ring", **base),
        Remapped(LENGTHS, ranks, 6, 2, algorithm="all_gather", alibi=True, **base),
        Remapped(LENGTHS, ranks, 6, 2, algorithm="hybrid", dropout=0.2, **base),
        Remapped((1, 2, 1), ranks, 2, 2, algorithm="direct", **base),
        Remapped(LENGTHS, ranks, 2, 2, 24, 16, "full", kv_lengths=(13, 5, 60, 0, 120, 9), algorithm="direct", **base),
    ]
    assert max(worst(case, run_here(case)) for case in cases) <= 1e-5


def there_and_back(rank: int, group: Any, case: Case, shares: int, multiple: int) -> list[torch.Tensor]:
    """What attention's rows are on this rank, what comes back of their squares, and the gradient of the sum of that."""
    plan = with_linear_layout(case.plan(), "hidden")
    assert plan.linear_layout is not None
    x = torch.randn(plan.documents.tokens, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = sequence_parallel_layout(plan.linear_layout, shares, multiple).shard(x, rank).requires_grad_()
    remap, transport = (
        hidden_redistribution(plan, rank, x.device, shares, multiple),
        GroupTransport(group, 60.0, x.device),
    )
    moved = redistribute_hidden(own, remap, transport)
    back = redistribute_hidden(moved * moved, remap[::-1], transport)
    (gradient,) = torch.autograd.grad(back.sum(), own)
    return [moved.detach(), back.detach(), gradient]


@pytest.mark.parametrize(
    ("ranks", "shares", "multiple"),
    [
        pytest.param(4, 1, 1, marks=pytest.mark.thorough),
        (4, 2, 2),
        pytest.param(2, 4, 8, marks=pytest.mark.thorough),
        (3, 2, 4),
    ],
)
def test_hidden_states_go_there_and_back(workers, ranks, shares, multiple):
    for lengths in (LENGTHS, (1, 2, 0), (40,)):
        case = Case(lengths, ranks, algorithm="direct", options=BALANCED)
        plan = with_linear_layout(case.plan(), "hidden")
        if plan.linear_layout is None:
            continue
        results = workers.run(ranks * shares, there_and_back, case, shares, multiple)
        linear, layout = (
            sequence_parallel_layout(layout_of_ranks, shares, multiple)
            for layout_of_ranks in (plan.linear_layout, plan.layout)
        )
        linear.check()
        x = torch.randn(plan.documents.tokens, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert torch.equal(layout.unshard([moved for moved, _, _ in results]), x)
        assert torch.equal(linear.unshard([back for _, back, _ in results]), x * x)
        assert torch.equal(linear.unshard([gradient for _, _, gradient in results]), 2 * x)


def test_the_layouts_of_these_tests_differ() -> None:
    for ranks in (2, 3, 4, 5, 8):
        assert with_linear_layout(
            Case(LENGTHS, ranks, algorithm="direct", options=BALANCED).plan(), "hidden"
        ).linear_layout
