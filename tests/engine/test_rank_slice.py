"""The engine runs slices of a plan as it runs the plan: not a bit differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp.engine import Stepping
from mindspeed_cp.engine import all_ranks as engine
from mindspeed_cp.engine.agreement import adopt_fingerprints, plan_digest, plan_fingerprints
from mindspeed_cp.engine.rank_context import rank_context
from mindspeed_cp.plan.plan_bytes import plan_from_bytes, plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan
from tests.engine.cases import VARIANTS, Case, all_ranks

CASE = Case((40, 0, 13, 77), 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_that_run_their_slices(variant: str) -> None:
    case = CASE.on(4, variant)
    plan, leaves, _ = all_ranks(case)
    calls = engine._checked_calls(*leaves, plan, None, None, True)
    results = []
    for own in (False, True):
        tensors = [x.detach().clone().requires_grad_() for group in leaves for x in group]
        if own:
            parts = [plan_from_bytes(plan_to_bytes(slice_plan(plan, rank))) for rank in range(4)]
            calls = [
                replace(
                    call, plan=part, context=rank_context(part, rank, call.backend, tensors[0].dtype, tensors[0].device)
                )
                for rank, (call, part) in enumerate(zip(calls, parts, strict=True))
            ]
        out = engine._AllRanks.apply(calls, Stepping(), None, None, *tensors)
        torch.cat([x.flatten() for x in out]).sum().backward()
        results.append([*out, *(x.grad for x in tensors)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_slice_has_the_digest_of_its_plan() -> None:
    plan = CASE.on(4, "direct").plan()
    part = slice_plan(plan, 1)
    adopt_fingerprints(part, plan_fingerprints(plan))
    assert plan_digest(part) == plan_digest(plan)
