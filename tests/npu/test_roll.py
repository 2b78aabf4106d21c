"""Rolls inside documents with torch-npu, over the stand-in for HCCL: rows, gradients, tokens and flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_cp import context_parallel_roll
from tests.engine.test_roll import LENGTHS, expected_roll, plan_of, whole_rows
from tests.npu import ranks


def rolls_of_rank(rank: int, size: int, name: str, shift: int) -> list[Any]:
    plan = plan_of(name, size)
    layout = plan.batch_layout
    x, weights = whole_rows(plan, 5).float(), whole_rows(plan, 5).float() ** 2
    tokens = torch.arange(plan.documents.tokens)
    own = layout.shard(x, rank).to("npu").requires_grad_()
    out = context_parallel_roll(own, plan, shift)
    (gradient,) = torch.autograd.grad((out * layout.shard(weights, rank).to("npu")).sum(), own)
    rows = layout.shard(tokens, rank).to("npu")
    rolled = [out.detach(), gradient, context_parallel_roll(rows, plan, shift, fill=-1),
              context_parallel_roll(rows % 3 == 0, plan, shift)]  # fmt: skip
    return [part.cpu().numpy() for part in rolled]


@pytest.mark.parametrize(
    ("size", "name", "shift"),
    [
        (2, "balanced, linear layout", 1),
        pytest.param(3, "zig-zag", 2, marks=pytest.mark.thorough),
        pytest.param(3, "hierarchical", -1, marks=pytest.mark.thorough),
    ],
)
def test_ranks_roll_as_the_whole_row(size: int, name: str, shift: int) -> None:
    values = ranks.run(size, rolls_of_rank, name, shift).values()
    plan = plan_of(name, size, LENGTHS)
    x, tokens = whole_rows(plan, 5).float(), torch.arange(plan.documents.tokens)
    rows, gradients, token_rows, flags = (
        torch.from_numpy(plan.batch_layout.unshard([value[part] for value in values])) for part in range(4)
    )
    assert torch.equal(rows, expected_roll(x, plan, shift))
    assert torch.equal(gradients, expected_roll(x**2, plan, -shift))
    assert torch.equal(token_rows, expected_roll(tokens, plan, shift, -1))
    assert torch.equal(flags, expected_roll(tokens % 3 == 0, plan, shift))
