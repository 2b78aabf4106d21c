"""The loss: global sum over global count."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import check_tokens_per_step, loss_function


def test_the_three_values_are_sum_count_and_report() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    total, count, report = loss_function(mask, losses)
    assert (total.item(), count.item()) == (13.0, 3)
    assert count.dtype == torch.int32 and total.dtype == torch.float32
    assert report["lm loss"].tolist() == [13.0, 3.0] and not report["lm loss"].requires_grad
    total.backward()
    assert losses.grad is not None and torch.equal(losses.grad, mask)


def test_a_rank_without_tokens_gives_zeros() -> None:
    losses = torch.zeros(1, 0, requires_grad=True)
    total, count, report = loss_function(torch.zeros(1, 0), losses)
    assert (total.item(), count.item(), report["lm loss"].tolist()) == (0.0, 0, [0.0, 0.0])
    total.backward()


def test_sums_are_kept_in_float32() -> None:
    losses = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    total, _, _ = loss_function(torch.ones(1, 4096), losses)
    assert float(total) == 4096.0
    assert float(loss_function(torch.ones(1, 4096, dtype=torch.bool), losses)[0]) == 4096.0


def test_mask_and_losses_must_match() -> None:
    with pytest.raises(ConfigError, match=r"loss_mask has shape \[1, 3\], but the model's losses \[1, 4\]"):
        loss_function(torch.ones(1, 3), torch.ones(1, 4))


def test_a_step_that_megatron_cannot_count_is_refused() -> None:
    check_tokens_per_step(2**31 - 1)
    with pytest.raises(ConfigError, match=r"up to 2147483648 tokens; valid: at most 2147483647"):
        check_tokens_per_step(2**31)
