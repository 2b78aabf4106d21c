"""The loss of a planned batch: global sum over global count, independent of how rows are cut over ranks.

A mean of the ranks' means would differ whenever ranks count unequal numbers of labels, as they do with packed
documents. DDP and FSDP2 average gradients over ranks, so that each rank's share is multiplied by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mindspeed_cp.comm import group_size
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.labels import IGNORED, check_vocabulary

_NO_LABELS = (
    "labels has no tensor; valid: shift_labels of shard_batch, or what planned_batch returns, of a batch with labels"
)


def count_labels(labels: Tensor | Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Count the labels of a step over all ranks.

    Args:
        labels: this rank's labels of all batches of the step (several with gradient accumulation).
        group: all ranks that average their gradients, data- and context-parallel ones; default: all processes.

    Returns:
        int64 scalar on the device of the labels, the same on all ranks.

    Raises:
        ConfigError: there are no labels.
    """
    if labels is None:
        raise ConfigError(_NO_LABELS)
    tensors = [labels] if isinstance(labels, Tensor) else list(labels)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ConfigError(f"{_NO_LABELS}; of all batches of the step")
    count = torch.stack([(tensor != IGNORED).sum() for tensor in tensors]).sum()
    if group_size(group) > 1:
        dist.all_reduce(count, group=group)
    return count


def loss(logits: Tensor, labels: Tensor, count: Tensor | int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this rank's share of the mean cross-entropy over all labels of a step.

    Averaged over the ranks of the group, and added up over the batches of the step, it is the mean over all labels: so
    are gradients under DDP and FSDP2, and so is ``all_reduce(loss, op=AVG)`` for the report.

    Args:
        logits: [1, t, vocabulary] of this rank.
        labels: [1, t], ``shift_labels`` of :func:`shard_batch` (``labels`` with a full mask).
        count: result of :func:`count_labels`.
        group: as for :func:`count_labels`.

    Returns:
        float32 scalar; 0 for a rank without labels.

    Raises:
        ConfigError: logits and labels do not fit, a label is beyond the vocabulary, or the count is no count.
    """
    if labels is None:
        raise ConfigError(_NO_LABELS)
    if not isinstance(count, Tensor) and not (isinstance(count, Real) and math.isfinite(count) and count >= 0):
        raise ConfigError(f"count is {count!r}; valid: 0 or more, the result of count_labels")
    if labels.device.type == "cpu":  # on a device to look would mean to wait; shard_batch has looked
        check_vocabulary("labels", labels, logits.shape[-1])
    if logits.shape[:-1] != labels.shape:
        raise ConfigError(
            f"logits have shape {list(logits.shape)}, labels {list(labels.shape)}; valid: those of the same batch, "
            "without logits_to_keep"
        )
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten().to(logits.device), ignore_index=IGNORED, reduction="sum"
    )
    return loss_share(total, count.clamp(min=1) if isinstance(count, Tensor) else max(1, count), group)


def loss_share(total: Tensor, divisor: Tensor | float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a rank's sum of losses so that its average over the ranks of the group is the global sum over a divisor.

    Args:
        total: sum over this rank's rows, scalar.
        divisor: the same on all ranks, such as the number of labels of all of them.
        group: as for :func:`count_labels`.

    Returns:
        Scalar on the device of the sum.

    Raises:
        ConfigError: the divisor is a number that is not finite, or 0.
    """
    if not isinstance(divisor, Tensor) and not (isinstance(divisor, Real) and math.isfinite(divisor) and divisor):
        raise ConfigError(f"divisor is {divisor!r}; valid: a finite number other than 0, the same on all ranks")
    ranks = max(1, group_size(group))
    return total * ranks / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)
