"""A script's loss function whose count of tokens Megatron would divide by wrongly is refused in the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import loss_function, megatron_imports
from mindspeed_cp.megatron.adaptors.loss import LossKind, compare_token_counts, problem_of_counts
from mindspeed_cp.megatron.patches import versions
from tests.megatron.gpt import Case, megatron, planned
from tests.megatron.ranks import MegatronRanks

with megatron_imports():
    from megatron.core import parallel_state

CASE = Case(((37, 0, 5, 1, 64), (3, 50, 1, 1, 0, 7)), masked=0.3)


NONE, SUM, OTHER, UNKNOWN = LossKind


@pytest.mark.parametrize(
    ("counts", "counted", "kinds", "megatron_sums", "expected"),
    [
        ([5, 7], [5, 7], [SUM, SUM], True, None),
        ([12, 12], [5, 7], [SUM, SUM], True, "a count of 12 tokens on every.*own .5, 7..*2 times as many"),
        ([12, 12], [12, 0], [SUM, NONE], True, "every context-parallel rank"),
        ([12, 12], [6, 6], [SUM, SUM], True, "every context-parallel rank"),
        ([12, 12], [5, 7], [OTHER, OTHER], True, None),  # multiplied by the number of ranks: right
        ([12, 12], [5, 7], [SUM, OTHER], True, None),
        ([12, 0], [12, 0], [SUM, NONE], True, None),
        ([6, 6], [6, 6], [SUM, SUM], True, None),
        ([3, 3], [5, 7], [SUM, SUM], True, None),  # weights of its own
        ([12, 12], [0, 0], [UNKNOWN, UNKNOWN], True, None),
        ([12, 12], [5, 7], [SUM, SUM], False, None),
        ([5, 7], [5, 7], [SUM, SUM], False, "counts of 5, 7 tokens.*copies of weights drift apart"),
        ([5, 7], [5, 7], [OTHER, OTHER], False, "copies of weights drift apart"),
        ([6, 6], [6, 6], [SUM, SUM], False, "counts of 6, 6 tokens.*their sum.*gradients by a part"),
        ([6, 6], [6, 6], [OTHER, OTHER], False, None),
        ([5, 7], [0, 0], [UNKNOWN, UNKNOWN], False, "counts of 5, 7 tokens"),
        ([6, 6], [0, 0], [UNKNOWN, UNKNOWN], False, None),
        ([0, 0], [5, 7], [SUM, SUM], True, "a loss of 12 tokens without their number.*gradients of 2 ranks"),
        ([0, 0], [5, 0], [OTHER, NONE], False, "a loss of 5 tokens without.*three values"),
        ([0], [5], [SUM], True, None),  # one rank
        ([0, 0], [0, 0], [NONE, NONE], True, None),
        ([0, 0], [0, 0], [NONE, NONE], False, None),
        ([5], [5], [SUM], False, None),
    ],
)  # fmt: skip
def test_a_count_that_contradicts_the_gradients_is_refused(
    counts: list[int], counted: list[int], kinds: list[int], megatron_sums: bool, expected: str | None
) -> None:
    problem = problem_of_counts(counts, counted, kinds, megatron_sums, len(counts))
    assert re.search(expected, problem) if expected and problem else problem == expected


def by_the_other_rule(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """Counts as another version of Megatron wants them."""
    total, _, report = loss_function(mask, losses)
    count = mask.count_nonzero().to(torch.int32)
    if versions.SUMS_OVER_RANKS:
        dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return total, count, report


def mean(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The mean over this rank's tokens, without a count."""
    total, _, report = loss_function(mask, losses)
    return total / mask.count_nonzero().clamp(min=1), report


def weighted(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """A count that is not that of the tokens, by the rule of the installed version."""
    total, count, report = loss_function(mask, losses)
    return total, torch.full_like(count, 3), report


def times_ranks(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The tokens of all ranks, and a loss that makes up for their being added again: right in both versions."""
    total, _, report = loss_function(mask, losses)
    count = mask.count_nonzero().to(torch.int32)
    group = parallel_state.get_context_parallel_group()
    dist.all_reduce(count, group=group)
    return total * (group.size() if versions.SUMS_OVER_RANKS else 1), count, report


def error_on_rank(rank: int, group: None, loss: Callable[..., Any], cp: int, case: Case = CASE) -> str:
    with mock.patch("tests.megatron.gpt.loss_function", loss), megatron(cp=cp):
        try:
            planned(case, cp=cp)
        except ConfigError as error:
            return str(error)
        return ""


def test_counts_by_the_rule_of_another_version_are_refused_on_all_ranks(ranks: MegatronRanks) -> None:
    first, *others = ranks.run(2, error_on_rank, by_the_other_rule, 2)
    assert "the loss function returned" in first and "pretrain.loss_func, or" in first
    assert others == [first]


def test_a_loss_without_a_count_is_refused(ranks: MegatronRanks) -> None:
    for error in ranks.run(2, error_on_rank, mean, 2):
        assert "tokens without their number" in error
    assert ranks.run(1, error_on_rank, mean, 1) == [""]


@pytest.mark.parametrize("loss", [weighted, times_ranks])
def test_losses_that_make_up_for_their_counts_are_taken(loss: Callable[..., Any], ranks: MegatronRanks) -> None:
    assert ranks.run(2, error_on_rank, loss, 2) == ["", ""]


def test_a_step_without_tokens_judges_nothing(ranks: MegatronRanks) -> None:
    """The first one has none: the second one is looked at."""
    case = Case(CASE.batches, optimizer="float32", steps=2)
    errors = ranks.run(2, errors_of_two_steps, case)
    assert all("the loss function returned" in error for error in errors)


_STEPS: list[int] = []


def errors_of_two_steps(rank: int, group: None, case: Case) -> str:
    _STEPS.clear()
    return error_on_rank(rank, group, _from_the_second_step_on, 2, case)


def _from_the_second_step_on(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    _STEPS.append(0)
    return by_the_other_rule(mask if len(_STEPS) > len(CASE.batches) else torch.zeros_like(mask), losses)


class Stage(torch.nn.Module):
    """A virtual pipeline stage with a config of its own, as the scripts of Megatron up to 0.16 build them."""

    def __init__(self, is_last: bool, finalize: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.post_process = is_last
        self.config = SimpleNamespace(finalize_model_grads_func=finalize, grad_scale_func=None)
        self.weight = torch.nn.Parameter(torch.ones(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def errors_of_stages(rank: int, group: None, scale: float, per_token: float, grads: bool) -> tuple[str, int]:
    """The error of a step, and how often Megatron's own function was called; the count is that of both ranks."""
    calls: list[int] = []

    def finalize(model: Any, num_tokens: torch.Tensor) -> None:
        calls.append(int(num_tokens))

    with megatron(cp=2):
        stages = [Stage(False, finalize), Stage(True)]
        for stage in stages:
            for _ in range(2):  # a second call changes nothing
                compare_token_counts(stage, parallel_state.get_context_parallel_group())
        config = stages[0].config
        config.grad_scale_func = lambda loss: loss * scale
        count = torch.tensor(16 if versions.SUMS_OVER_RANKS else 8, dtype=torch.int32)
        for _ in range(2):
            with torch.set_grad_enabled(grads):
                losses = stages[1](stages[0](torch.ones(2, 4)))
            if grads:
                config.grad_scale_func(losses.sum() * per_token).backward()
            try:
                config.finalize_model_grads_func([*stages], count)
            except ConfigError as error:
                return str(error), len(calls)
        return "", len(calls)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_the_first_virtual_stage_has_the_function_and_the_last_the_losses(scale: float, ranks: MegatronRanks) -> None:
    for error, calls in ranks.run(2, errors_of_stages, scale, 1.0, True):
        assert "the loss function returned" in error and calls == 0


@pytest.mark.parametrize(("per_token", "grads"), [(2.0, True), (1.0, False)])
def test_weights_and_steps_without_gradients_are_not_judged(
    per_token: float, grads: bool, ranks: MegatronRanks
) -> None:
    assert ranks.run(2, errors_of_stages, 1.0, per_token, grads) == [("", 2), ("", 2)]
