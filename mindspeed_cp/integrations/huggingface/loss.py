"""Labels of a packed batch, and its loss: global sum over global count, independent of how rows are cut over ranks.

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
from mindspeed_cp.layout import Documents

#: Label of rows that predict nothing, as in cross_entropy.
IGNORED = -100


def shifted_labels(labels: Tensor, documents: Documents) -> Tensor:
    """Return for each token the label of the next one in its document, [tokens].

    The last one predicts nothing, nor does a token that sees the next one, because both are in a block.
    """
    shifted = torch.cat([labels[1:], labels.new_full((1,), IGNORED)]) if len(labels) else labels.clone()
    ends = documents.offsets[1:][documents.lengths > 0] - 1
    shifted[torch.from_numpy(ends).to(labels.device)] = IGNORED
    if documents.blocks is not None:
        shifted[torch.from_numpy(documents.blocks.seen_labels).to(labels.device)] = IGNORED
    return shifted


def check_vocabulary(name: str, tokens: Tensor, vocabulary: int | None) -> None:
    """Raise ConfigError if tokens (IGNORED aside) are none of a vocabulary; None: its size is not known."""
    if vocabulary is None or tokens.is_floating_point():
        return
    wrong = tokens[(tokens != IGNORED) & ((tokens < 0) | (tokens >= vocabulary))]
    if len(wrong):
        raise ConfigError(
            f"{name} has {int(wrong[0])}; valid: 0 to {vocabulary - 1}, the model's vocabulary, or {IGNORED}, which is "
            "ignored"
        )


def masked_labels(labels: Tensor | None, loss_mask: Tensor) -> Tensor:
    """Return labels [rows, tokens] in which tokens that the loss mask leaves out are ignored.

    Args:
        labels: [rows, tokens], not shifted.
        loss_mask: as labels; 1 for tokens that are learned, 0 for others.

    Raises:
        ConfigError: there are no labels, the shapes differ, or the mask has other values.
    """
    if labels is None:
        raise ConfigError(
            "the batch has loss_mask and no labels; valid: labels as well (such as input_ids), in which tokens whose "
            "loss_mask is 0 are then ignored"
        )
    if loss_mask.shape != labels.shape:
        raise ConfigError(f"loss_mask has shape {list(loss_mask.shape)}; valid: {list(labels.shape)}, that of labels")
    learned = loss_mask.to(labels.device) != 0
    if not bool((~learned | (loss_mask.to(labels.device) == 1)).all()):
        raise ConfigError(
            "loss_mask has other values than 0 and 1; valid: 0 and 1; weights of tokens go into the batch under "
            "another name, which planned_batch cuts like input_ids, and into a loss of your own"
        )
    return labels.masked_fill(~learned, IGNORED)


_NO_LABELS = "labels has no tensor; valid: what planned_batch returns of a batch with labels"


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
        labels: [1, t], those of :func:`planned_batch`.
        count: result of :func:`count_labels`.
        group: as for :func:`count_labels`.

    Returns:
        float32 scalar; 0 for a rank without labels.

    Raises:
        ConfigError: logits and labels do not fit, a label is beyond the vocabulary, or the count is no count.
    """
    if labels is None:
        raise ConfigError(_NO_LABELS)
    if isinstance(count, Tensor) and count.device.type != "cpu":  # to look would mean to wait
        is_count = count.numel() == 1
    else:
        value = count.tolist() if isinstance(count, Tensor) else count
        is_count = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not is_count:
        raise ConfigError(f"count is {count!r}; valid: a number, 0 or more: the result of count_labels")
    if labels.device.type == "cpu":  # on a device to look would mean to wait; planned_batch has looked
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


def global_loss(total: Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Return the mean loss over all labels of a step, for the log; the same on all ranks, which all call it.

    Args:
        total: this rank's shares by :func:`loss`, added up over the batches of the step, scalar.
        group: as for :func:`count_labels`.
    """
    whole = total.detach().clone()
    if group_size(group) > 1:
        dist.all_reduce(whole, group=group)
    return float(whole) / max(1, group_size(group))


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
