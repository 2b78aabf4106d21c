"""Losses of trajectories packed as trees: weighted cross-entropy, and log-probabilities for losses of one's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mindspeed_cp.comm import group_size
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.loss import loss_share
from mindspeed_cp.integrations.huggingface.rows import gather_numbered
from mindspeed_cp.integrations.huggingface.trees import RankTargets


def sum_weights(targets: RankTargets | Iterable[RankTargets], group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum the loss weights of a step over all ranks: the divisor of a mean over the trajectories' tokens.

    Args:
        targets: this rank's targets of all batches of the step (several with gradient accumulation).
        group: all ranks that average their gradients, data- and context-parallel ones; default: all processes.

    Returns:
        fp32 scalar on the device of the targets, the same on all ranks.

    Raises:
        ConfigError: a weight on some rank is below 0, or there are no targets of a batch; on all ranks.
    """
    batches = [targets] if isinstance(targets, RankTargets) else list(targets)
    if not batches or not all(isinstance(batch, RankTargets) for batch in batches):
        raise ConfigError("targets has none of a batch; valid: what shard_trajectories or planned_trajectories returns")
    weights = torch.cat([batch.weights for batch in batches])
    sums = torch.stack([weights.sum(), (weights < 0).sum().to(weights.dtype)])
    if group_size(group) > 1:
        dist.all_reduce(sums, group=group)
    if int(sums[1]):
        raise ConfigError(
            f"{int(sums[1])} targets have weights below 0, so that their sum is no divisor of a mean; valid: a divisor "
            "of your own for tree_loss, such as the number of the trajectories' tokens"
        )
    return sums[0]


def tree_loss(
    logits: Tensor, targets: RankTargets, divisor: Tensor | float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return this rank's share of the weighted cross-entropy of all trajectories of a step.

    Averaged over the ranks of the group, and added up over the batches of the step, it is the sum over all tokens of
    all trajectories of weight times cross-entropy, divided by the divisor: so are gradients under DDP and FSDP2.

    Args:
        logits: [1, t, vocabulary] of this rank.
        targets: result of :func:`shard_trajectories`.
        divisor: result of :func:`sum_weights`, or a number of your own, the same on all ranks; 0 counts as 1.
        group: as for :func:`sum_weights`.

    Returns:
        float32 scalar; 0 for a rank without targets.

    Raises:
        ConfigError: logits and targets do not fit.
    """
    total = -(targets.weights * target_log_probs(logits, targets)).sum()
    if isinstance(divisor, Tensor):
        return loss_share(total, torch.where(divisor == 0, 1.0, divisor), group)
    return loss_share(total, divisor or 1.0, group)


def target_log_probs(logits: Tensor, targets: RankTargets) -> Tensor:
    """Return the log-probability of each target of this rank.

    For losses that differ between trajectories: ``[targets.target_of_token]`` of it stands beside
    ``targets.values(...)``, and :func:`loss_share` divides the sum of the terms as :func:`tree_loss` does.

    Args:
        logits: [1, t, vocabulary] of this rank.
        targets: result of :func:`shard_trajectories`.

    Returns:
        fp32 [n].

    Raises:
        ConfigError: logits and targets do not fit.
    """
    expected = (1, targets.plan.padded_rows)
    if logits.dim() != 3 or tuple(logits.shape[:2]) != expected:
        raise ConfigError(
            f"logits have shape {list(logits.shape)}, the targets' rows are {list(expected)}; valid: those of the same "
            "batch, without logits_to_keep"
        )
    rows, row_of_target = torch.unique(targets.rows, return_inverse=True)  # a row with several targets is computed once
    return F.log_softmax(logits[0, rows].float(), -1)[row_of_target, targets.labels]


def trajectory_log_probs(log_probs: Tensor, targets: RankTargets, gradient_factor: float = 1.0) -> tuple[Tensor, ...]:
    """Gather the log-probabilities of whole trajectories, for losses with terms of whole trajectories.

    All ranks of the context-parallel group get the same and compute the same loss; each takes the gradients of its own
    targets.

    Args:
        log_probs: result of :func:`target_log_probs`, [n].
        targets: result of :func:`shard_trajectories`.
        gradient_factor: factor of gradients in the backward pass; the number of ranks of the group where gradients are
            averaged over them afterwards, as DDP and FSDP do, and losses over replicas alone.

    Returns:
        For each trajectory the log-probabilities of its tokens but the first, [length - 1].

    Raises:
        ConfigError: log_probs are not those of the targets.
    """
    if log_probs.shape != targets.numbers.shape:
        raise ConfigError(
            f"log_probs have shape {list(log_probs.shape)}; valid: {list(targets.numbers.shape)}, one for each target "
            "of this rank, as target_log_probs returns them"
        )
    whole = gather_numbered(log_probs, targets.numbers, len(targets.batch_targets), targets.plan, gradient_factor)
    numbers = [torch.from_numpy(numbers).to(whole.device) for numbers in targets.batch_targets.of_trajectories]
    return tuple(whole[number] for number in numbers)
