"""A script's loss function whose count of tokens Megatron would divide by wrongly is refused in the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import loss_function, megatron_imports
from mindspeed_cp.megatron.adaptors.token_counts import problem_of_counts
from mindspeed_cp.megatron.patches.spans import SPAN
from tests.megatron.gpt import Case, megatron, planned
from tests.megatron.ranks import MegatronRanks

with megatron_imports():
    from megatron.core import parallel_state

CASE = Case(((37, 0, 5, 1, 64), (3, 50, 1, 1, 0, 7)), masked=0.3)


@pytest.mark.parametrize(
    ("counts", "counted", "megatron_sums", "expected"),
    [
        ([5, 7], [5, 7], True, None),
        ([12, 12], [5, 7], True, "a count of 12 tokens on every context-parallel rank.*own .5, 7..*2 times as many"),
        ([12, 12], [12, 0], True, "every context-parallel rank"),
        ([12, 0], [12, 0], True, None),
        ([6, 6], [6, 6], True, None),
        ([3, 3], [5, 7], True, None),  # weights of its own
        ([12, 12], [-1, -1], True, None),
        ([12, 12], [5, 7], False, None),
        ([5, 7], [5, 7], False, "counts of 5, 7 tokens.*copies of weights drift apart"),
        ([6, 6], [6, 6], False, "counts of 6, 6 tokens.*their sum"),
        ([5, 7], [-1, -1], False, "counts of 5, 7 tokens"),
        ([6, 6], [-1, -1], False, None),
        ([0, 0], [5, 7], True, "a count of 0 tokens in a step, but 12 have a gradient.*three values"),
        ([0, 0], [5, 7], False, "a count of 0 tokens"),
        ([0], [5], True, "a count of 0 tokens"),
        ([0, 0], [0, 0], True, None),
        ([0, 0], [0, 0], False, None),
        ([5], [5], False, None),
    ],
)  # fmt: skip
def test_which_counts_are_wrong(
    counts: list[int], counted: list[int], megatron_sums: bool, expected: str | None
) -> None:
    problem = problem_of_counts(counts, counted, megatron_sums)
    assert re.search(expected, problem) if expected and problem else problem == expected


def by_the_other_rule(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """Counts as another version of Megatron wants them."""
    total, _, report = loss_function(mask, losses)
    count = mask.count_nonzero().to(torch.int32)
    if SPAN.SUMS_COUNTS:
        dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return total, count, report


def mean(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The mean over this rank's tokens, without a count."""
    total, count, report = loss_function(mask, losses)
    return total / count.clamp(min=1), report


def weighted(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """A count that is not that of the tokens, by the rule of the installed version."""
    total, count, report = loss_function(mask, losses)
    return total, torch.full_like(count, 3), report


def error_on_rank(rank: int, group: None, loss: Callable[..., Any], cp: int) -> str:
    with mock.patch("tests.megatron.gpt.loss_function", loss), megatron(cp=cp):
        try:
            planned(CASE, cp=cp)
        except ConfigError as error:
            return str(error)
        return ""


def test_counts_by_the_rule_of_another_version_are_refused_on_all_ranks(ranks: MegatronRanks) -> None:
    first, *others = ranks.run(2, error_on_rank, by_the_other_rule, 2)
    assert "the loss function returned" in first and "pretrain.loss_func(loss_mask, losses)" in first
    assert others == [first]


@pytest.mark.parametrize("cp", [1, 2])
def test_a_loss_without_a_count_is_refused(cp: int, ranks: MegatronRanks) -> None:
    for error in ranks.run(cp, error_on_rank, mean, cp):
        assert "a count of 0 tokens in a step" in error


def test_weights_are_the_matter_of_the_loss(ranks: MegatronRanks) -> None:
    assert ranks.run(2, error_on_rank, weighted, 2) == ["", ""]
