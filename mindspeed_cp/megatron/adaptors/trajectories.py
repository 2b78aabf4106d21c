"""Trajectories as prefix trees: a rank's rows with the tokens that each predicts, and their loss.

A token of a tree may be followed by several tokens, of different trajectories, and predicts each of them. Its first
target is its label; the others, those of branching tokens, are listed beside the rows::

    trajectories   1 2 3,  1 2 4        tree tokens   1  2  3  4
                                        labels        2  3  -  -      branch_labels  4 (of row 1)

Megatron's model computes the loss of labels only, so it is called without them and returns its logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mindspeed_cp import ConfigError, Plan
from mindspeed_cp.layout import PackedTrajectories
from mindspeed_cp.megatron.adaptors.batch import planned_batch
from mindspeed_cp.megatron.adaptors.loss import REPORT_KEY
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.patches import versions

LABEL_ROWS = "label_rows"  # key of the batch that only batches of trajectories have


def trajectory_batch(
    packed: PackedTrajectories,
    plan: Plan | Sequence[Plan],
    rank: int,
    weights: Sequence[Any] | None = None,
    *,
    rows_multiple: int = 1,
    dropout_seed: int | None = None,
    pooled: bool = False,
) -> tuple[dict[str, Tensor], PlannedBatchParams]:
    """Return this rank's rows of a micro-batch of trajectories, what they predict, and the ``packed_seq_params``.

    ::

        packed = Documents.from_trajectories(trajectories)
        plan = build_plan(packed.documents, topology, attention_config(config))
        batch, params = trajectory_batch(packed, plan, rank, weights)
        logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)
        return logits, partial(trajectory_loss_function, batch, model)    # what a forward_step returns

    Args:
        packed: the trajectories, the same on all context-parallel ranks.
        plan: plan of ``packed.documents``, or one for each of the different ``layer_attentions(config)``.
        rank: this context-parallel rank.
        weights: for each trajectory the loss weight of every token as one to predict, [length] (the first is not
            used), or one number; default: 1.
        rows_multiple, dropout_seed, pooled: as for :func:`planned_params`. Dropout drops the same weights of a shared
            token for all trajectories.

    Returns:
        A batch, and the parameters. The batch has tokens, position_ids (along each path) and labels, each int64
        [1, t]; label_rows, rows that have a label, int64 [n]; branch_rows and branch_labels, further targets of rows,
        int64 [m]; targets, the numbers of all these in ``packed.targets``, int64 [n + m]; target_weights, fp32
        [n + m]; and counted_tokens, the trajectory tokens with a weight other than 0 that they stand for, int32 [].

    Raises:
        ConfigError: the plan is one of other documents, or as :func:`planned_params`, or weights do not fit the
            trajectories.
    """
    batch, params = planned_batch(
        {"tokens": packed.tokens}, plan, rank, rows_multiple=rows_multiple, dropout_seed=dropout_seed, pooled=pooled
    )
    if params.linear.documents != packed.documents:
        raise ConfigError(
            f"the plan is one of {params.linear.documents!r}, but the trajectories are {packed.documents!r}; valid: "
            "build_plan(packed.documents, ...)"
        )
    targets = packed.targets
    whole = targets.weights(weights)
    if params.batch_digest is not None:
        params.batch_digest = zlib.crc32(np.ascontiguousarray(whole).data, params.batch_digest)
    numbers, rows = targets.of_rows(params.linear.tokens(rank))
    first = targets.is_first[numbers]
    ordered = np.concatenate([numbers[first], numbers[~first]])
    labels = torch.zeros_like(batch["tokens"])
    labels[0, torch.from_numpy(rows[first])] = torch.from_numpy(targets.token[numbers[first]])
    batch |= {
        "labels": labels,
        LABEL_ROWS: torch.from_numpy(rows[first]),
        "branch_rows": torch.from_numpy(rows[~first]),
        "branch_labels": torch.from_numpy(targets.token[numbers[~first]]),
        "targets": torch.from_numpy(ordered),
        "target_weights": torch.from_numpy(whole[ordered]).float(),
        "counted_tokens": torch.tensor(int(_counts(packed, weights)[ordered].sum()), dtype=torch.int32),
    }
    return batch, params


def _counts(packed: PackedTrajectories, weights: Sequence[Any] | None) -> np.ndarray:
    """Return the number of trajectory tokens with a weight other than 0 of each target, int64 [targets]."""
    counted = None if weights is None else [np.asarray(given) != 0 for given in weights]
    return np.rint(packed.targets.weights(counted)).astype(np.int64)


def target_losses(batch: Mapping[str, Tensor], model: nn.Module, logits: Tensor) -> Tensor:
    """Return the cross entropy of this rank's targets, fp32 [n + m], in the order of ``batch["targets"]``.

    The negative of it is a target's log-probability, for losses that :func:`trajectory_loss_function` is not. The
    logits are overwritten, as by Megatron's own loss.

    Args:
        batch: result of :func:`trajectory_batch`, on the device of the logits.
        model: the model, bare or wrapped, whose cross entropy is used: vocabulary-parallel, fused if it is.
        logits: output of the model without labels, [1, t, vocabulary of this tensor-parallel rank].

    Raises:
        ConfigError: the logits have another shape, as those of a model that was given labels.
    """
    if logits.dim() != 3 or logits.shape[:2] != batch["tokens"].shape:
        raise ConfigError(
            f"the model's output has shape {list(logits.shape)}; valid with trajectories: logits, "
            f"{[*batch['tokens'].shape, 'vocabulary']}: call the model without labels"
        )
    stage: Any = model
    while not hasattr(stage, "compute_language_model_loss"):
        stage = stage.module
    by_row = logits.transpose(0, 1)
    branches = by_row[batch["branch_rows"]]  # copied first: the cross entropy overwrites its logits
    losses = stage.compute_language_model_loss(batch["labels"], by_row)[0, batch[LABEL_ROWS]]
    if not len(branches):
        return losses
    return torch.cat([losses, stage.compute_language_model_loss(batch["branch_labels"][None], branches)[0]])


def trajectory_loss_function(
    batch: Mapping[str, Tensor], model: nn.Module, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute Megatron's three-value loss of trajectories; bind batch and model for each micro-batch.

    It is that of the trajectories one by one: the sum of their tokens' weighted losses, divided by the number of tokens
    whose weight is not 0 (a weight counts as one token, as in :func:`loss_function`).

    Args:
        batch, model, logits: as for :func:`target_losses`.

    Returns:
        (weighted sum of this rank's targets, float32 scalar; number of trajectory tokens that they stand for, int32
        scalar; {"lm loss": [sum, count] float32}), as :func:`loss_function`.

    Raises:
        ConfigError: as for :func:`target_losses`.
    """
    total = (target_losses(batch, model, logits).float() * batch["target_weights"]).sum()
    count = batch["counted_tokens"]
    report = torch.stack([total.detach(), count.to(total.dtype)])
    return total, versions.counted_tokens(count.clone()), {REPORT_KEY: report}
