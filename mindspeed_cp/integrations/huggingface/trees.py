"""Batches of trajectories packed as trees: the rows of one rank, and what they predict.

A row of a tree may predict several tokens, and a token of a tree stands for one of several trajectories. So a rank gets
no labels but targets, each a pair of a tree token and a token that follows it::

    trajectories   0: 5 6 7        targets   0: 5 > 6    of trajectories   0: targets 0 1
                   1: 5 6 8                  1: 6 > 7                      1: targets 0 2
                                             2: 6 > 8

A loss that depends on targets alone, with a weight for each token of each trajectory, is a weighted sum over targets
(:func:`tree_loss`). One that differs between trajectories, such as a clipped ratio with the advantage of each, is made
of their log-probabilities (:func:`trajectory_log_probs`), which all ranks of the group get.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mindspeed_cp.comm import group_size
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.batch import cut_batch
from mindspeed_cp.integrations.huggingface.families import family_of
from mindspeed_cp.integrations.huggingface.loss import check_vocabulary, loss_share
from mindspeed_cp.integrations.huggingface.plans import RankPlans, rank_plans_on_mesh
from mindspeed_cp.integrations.huggingface.rows import GatherNumbered
from mindspeed_cp.layout import PackedTrajectories, TreeTargets


@dataclass(frozen=True, eq=False)
class RankTargets:
    """What one rank's rows predict: n targets. Those of all ranks are all targets of the batch, each once.

    Attributes:
        numbers: number of each target among those of the batch, int64 [n], ascending.
        rows: local row whose logits predict it, int64 [n]; a row before several tokens comes several times.
        labels: token to predict, int64 [n].
        weights: sum of the loss weights of the trajectories' tokens for which it stands, fp32 [n].
        batch_targets: targets of the whole batch.
        plan: this rank's plans.
    """

    numbers: Tensor
    rows: Tensor
    labels: Tensor
    weights: Tensor
    batch_targets: TreeTargets
    plan: RankPlans


def planned_trajectories(
    packed: PackedTrajectories,
    config: Any,
    mesh: Any,
    algorithm: str = "hierarchical",
    *,
    weights: Sequence[Any] | None = None,
    **arguments: Any,
) -> tuple[dict[str, Any], RankTargets]:
    """Build the plans of trajectories packed as trees, and return this rank's rows and what they predict.

    The first call of attention compares trajectories and weights of all ranks by their digest. With dropout a tree
    token drops the same in all trajectories that share it, as it is computed once.

    Args:
        packed: ``Documents.from_trajectories(...)``, the same on all ranks of the mesh.
        config, mesh, algorithm, arguments: as for :func:`rank_plans_on_mesh`.
        weights: for each trajectory the weight of each of its tokens in the loss, [length] (the first is not used), or
            one number; default: 1.

    Returns:
        Keyword arguments of the model, on the mesh's device: input_ids [1, t], position_ids on the paths from the
        roots, ``use_cache=False`` and ``plan``; and the targets.

    Raises:
        ConfigError: as for :func:`rank_plans_on_mesh`; packed are no packed trajectories, the model has a full mask, or
            the weights do not fit.
    """
    if not isinstance(packed, PackedTrajectories):
        raise ConfigError(f"packed is a {type(packed).__name__}; valid: Documents.from_trajectories(token lists)")
    if family_of(config).mask != "causal":
        raise ConfigError(
            f"model_type is {config.model_type!r}, whose full mask lets a row see the token that it would predict; "
            "valid: a model with a causal mask"
        )
    weights_of_targets = packed.targets.weights(weights)
    rank_plans = rank_plans_on_mesh(config, packed.documents, mesh, algorithm, **arguments)
    device = "cpu" if mesh is None else mesh.device_type
    tokens = torch.from_numpy(packed.tokens)[None].to(device)
    check_vocabulary("packed", tokens, rank_plans.plans.vocabulary)
    rows = cut_batch({"input_ids": tokens}, rank_plans)
    for array in (np.concatenate(packed.tree_tokens), weights_of_targets):
        rank_plans.batch_digest = zlib.crc32(array.tobytes(), rank_plans.batch_digest or 0)
    numbers, local_rows = packed.targets.of_rows(rank_plans.plans.layout.tokens(rank_plans.rank))
    arrays = (numbers, local_rows, packed.targets.token[numbers], weights_of_targets[numbers].astype(np.float32))
    own, own_rows, labels, own_weights = (torch.from_numpy(x).to(device) for x in arrays)
    return rows, RankTargets(own, own_rows, labels, own_weights, packed.targets, rank_plans)


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
        raise ConfigError("targets has none of a batch; valid: what planned_trajectories returns")
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
        targets: result of :func:`planned_trajectories`.
        divisor: result of :func:`sum_weights`, or a number of your own, the same on all ranks; 0 counts as 1.
        group: as for :func:`sum_weights`.

    Returns:
        float32 scalar; 0 for a rank without targets.

    Raises:
        ConfigError: logits and targets do not fit.
    """
    total = -(targets.weights * _target_log_probs(logits, targets)).sum()
    if isinstance(divisor, Tensor):
        return loss_share(total, torch.where(divisor == 0, 1.0, divisor), group)
    return loss_share(total, divisor or 1.0, group)


def trajectory_log_probs(logits: Tensor, targets: RankTargets, gradient_factor: float = 1.0) -> tuple[Tensor, ...]:
    """Gather the log-probabilities of whole trajectories, for losses that differ between trajectories.

    All ranks of the context-parallel group get the same and compute the same loss; each takes the gradients of its own
    targets.

    Args:
        logits: [1, t, vocabulary] of this rank.
        targets: result of :func:`planned_trajectories`.
        gradient_factor: factor of gradients in the backward pass; the number of ranks of the group where gradients are
            averaged over them afterwards, as DDP and FSDP do, and losses over replicas alone.

    Returns:
        For each trajectory the log-probabilities of its tokens but the first, fp32 [length - 1].

    Raises:
        ConfigError: logits and targets do not fit.
    """
    count = len(targets.batch_targets)
    log_probs = _target_log_probs(logits, targets)
    whole = GatherNumbered.apply(log_probs, targets.numbers, count, targets.plan, gradient_factor)
    return tuple(whole[torch.from_numpy(x).to(whole.device)] for x in targets.batch_targets.of_trajectories)


def _target_log_probs(logits: Tensor, targets: RankTargets) -> Tensor:
    """Return the log-probability of each target of this rank, fp32 [n]. Raises ConfigError if the logits are of other
    rows."""
    expected = (1, targets.plan.padded_rows)
    if logits.dim() != 3 or tuple(logits.shape[:2]) != expected:
        raise ConfigError(
            f"logits have shape {list(logits.shape)}, the targets' rows are {list(expected)}; valid: those of the same "
            "batch, without logits_to_keep"
        )
    rows, row_of_target = torch.unique(targets.rows, return_inverse=True)  # a row with several targets is computed once
    return F.log_softmax(logits[0, rows].float(), -1)[row_of_target, targets.labels]
