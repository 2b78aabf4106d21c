"""Linear layers on a layout of their own: attention against the dense fp64 reference, and hidden states there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mindspeed_cp import Plan
from mindspeed_cp.comm import Transport
from mindspeed_cp.engine.remap import remap_of, remapped
from mindspeed_cp.layout import OBJECTIVES, in_shares
from mindspeed_cp.plan.remapped import with_linear_layout
from tests.engine.cases import Case, run_all, worst

LENGTHS = (129, 3, 0, 50, 7, 211)
BALANCED = (("layout", "balanced"),)


@dataclass(frozen=True)
class Remapped(Case):
    """Attention of a plan that was balanced, called with equal token counts."""

    objective: str = "minmax"

    def plan(self) -> Plan:
        return with_linear_layout(super().plan(), "qkv", self.objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (1, 5), (2, 4), (2, 8)])
def test_attention_is_exact(workers, nodes, ranks, objective):
    base = {"options": BALANCED, "nodes": nodes, "objective": objective}
    cases = [
        Remapped(LENGTHS, ranks, 6, 2, algorithm="direct", **base),
        Remapped(LENGTHS, ranks, 6, 2, algorithm="ring", **base),
        Remapped(LENGTHS, ranks, 6, 2, algorithm="all_gather", alibi=True, **base),
        Remapped(LENGTHS, ranks, 6, 2, algorithm="hybrid", dropout=0.2, **base),
        Remapped((1, 2, 1), ranks, 2, 2, algorithm="direct", **base),
        Remapped(LENGTHS, ranks, 2, 2, 24, 16, "full", kv_lengths=(13, 5, 60, 0, 120, 9), algorithm="direct", **base),
    ]
    parts = workers.run(ranks, run_all, cases, timeout=120)
    assert max(worst(case, [part[i] for part in parts]) for i, case in enumerate(cases)) <= 1e-5


def there_and_back(rank: int, group: Any, case: Case, shares: int, multiple: int) -> list[torch.Tensor]:
    """What attention's rows are on this rank, what comes back of their squares, and the gradient of the sum of that."""
    plan = with_linear_layout(case.plan(), "hidden")
    assert plan.linear is not None
    x = torch.randn(plan.documents.tokens, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = in_shares(plan.linear, shares, multiple).shard(x, rank).requires_grad_()
    remap, transport = remap_of(plan, rank, x.device, shares, multiple), Transport(group, 60.0, x.device)
    moved = remapped(mine, remap, transport)
    back = remapped(moved * moved, remap.turned, transport)
    (gradient,) = torch.autograd.grad(back.sum(), mine)
    return [moved.detach(), back.detach(), gradient]


@pytest.mark.parametrize(("ranks", "shares", "multiple"), [(4, 1, 1), (4, 2, 2), (2, 4, 8), (3, 2, 4)])
def test_hidden_states_go_there_and_back(workers, ranks, shares, multiple):
    for lengths in (LENGTHS, (1, 2, 0), (40,)):
        case = Case(lengths, ranks, algorithm="direct", options=BALANCED)
        plan = with_linear_layout(case.plan(), "hidden")
        if plan.linear is None:
            continue
        found = workers.run(ranks * shares, there_and_back, case, shares, multiple)
        linear, layout = (in_shares(one, shares, multiple) for one in (plan.linear, plan.layout))
        linear.check()
        x = torch.randn(plan.documents.tokens, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert torch.equal(layout.unshard([moved for moved, _, _ in found]), x)
        assert torch.equal(linear.unshard([back for _, back, _ in found]), x * x)
        assert torch.equal(linear.unshard([gradient for _, _, gradient in found]), 2 * x)


def test_the_layouts_of_these_tests_differ() -> None:
    for ranks in (2, 3, 4, 5, 8):
        assert with_linear_layout(Case(LENGTHS, ranks, algorithm="direct", options=BALANCED).plan(), "hidden").linear
