"""The loss of a planned batch: global sum over global count, independent of the distribution of tokens.

Every rank returns the sum of its tokens' losses and their number; gradients and the reported loss are the sums over all
data- and context-parallel ranks divided by the count over all of them. A mean of the ranks' means would differ whenever
ranks hold unequal counts, as they do with packed documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.patches import versions

REPORT_KEY = "lm loss"
MAX_COUNT = 2**31 - 1  # Megatron's schedules add token counts up in int32


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute Megatron's three-value loss; bind the mask for each micro-batch: ``partial(loss_function,
    batch["loss_mask"])``.

    Needs ``calculate_per_token_loss=True``, which PlannedAttention checks when it is built: with False, Megatron would
    divide each rank's sum by that rank's own count.

    Args:
        loss_mask: this rank's mask, [1, t] or [b, s]: 0 or 1 (a weight counts as one token). As in Megatron's own
            loss_func, losses are multiplied by it, so that a NaN in a masked row makes the loss NaN.
        losses: the model's output for labels, of as many elements.

    Returns:
        (sum of masked losses, float32 scalar; number of counted tokens, int32 scalar; {"lm loss": [sum, count] float32}
        for :func:`global_loss` or Megatron's own logging). Zeros for a rank without tokens. Megatron 0.12 adds the
        second value up over data-parallel ranks alone, so there it is that of all context-parallel ranks.

    Raises:
        ConfigError: mask and losses differ in size.
    """
    if loss_mask.numel() != losses.numel():
        raise ConfigError(
            f"loss_mask has shape {list(loss_mask.shape)}, but the model's losses {list(losses.shape)}; slice "
            "loss_mask with the batch: planned_batch does"
        )
    mask = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * mask).sum()
    count = mask.count_nonzero()
    report = torch.stack([total.detach(), count.to(total.dtype)])
    return total, versions.counted_tokens(count.to(torch.int32)), {REPORT_KEY: report}


class GlobalLoss(NamedTuple):
    """The loss of one step over all ranks. `mean` is 0.0 where no token counts at all."""

    mean: float
    tokens: int


def global_loss(
    reports: Sequence[Mapping[str, Tensor]], group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> GlobalLoss:
    """Return the mean loss over all micro-batches of a step and all ranks of a group: reduced sum over reduced count.

    A NaN on any rank makes the mean NaN. The counts of micro-batches are exact up to 2**24 tokens each on one rank.

    Args:
        reports: result of Megatron's schedule: the third value of :func:`loss_function` of each micro-batch; empty on
            pipeline stages without a loss, whose result has no meaning.
        group: data x context parallel ranks (``get_data_parallel_group(with_context_parallel=True)``); None: this rank
            alone.
        device: device on which the group communicates.
    """
    total = torch.zeros(1, dtype=torch.float32, device=device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    for report in reports:
        total += report[REPORT_KEY][0].to(device)
        count += report[REPORT_KEY][1].to(device=device, dtype=torch.int64)
    if group is not None:
        dist.all_reduce(total, group=group)
        dist.all_reduce(count, group=group)
    tokens = int(count)
    return GlobalLoss(float(total) / tokens if tokens else float(total), tokens)


def check_tokens_per_step(tokens: int) -> None:
    """Raise ConfigError if a step has more tokens than Megatron's int32 count holds: the count would turn negative.

    Args:
        tokens: upper bound over all ranks, data parallel ones included: rows of a step x context.
    """
    if tokens > MAX_COUNT:
        raise ConfigError(
            f"a step has up to {tokens} tokens; valid: at most {MAX_COUNT}, since Megatron counts them in int32; use a "
            "smaller global batch or context"
        )
