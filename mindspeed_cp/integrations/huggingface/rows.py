"""Whole packed rows to the rows of one rank and back, for trainers that slice and gather tensors themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm import group_size, resolve_group
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.plans import RankPlans


def slice_rows(x: Tensor, plans: RankPlans, dim: int, padding: float = 0) -> Tensor:
    """Return this rank's rows of a whole tensor.

    Args:
        x: [..., tokens, ...], the same on all ranks of the group.
        plans: plans of this rank.
        dim: dimension of the tokens.
        padding: value of the rows behind the rank's own (a rank without tokens has one such row).

    Returns:
        [..., padded rows, ...] in the order of the plan's layout.

    Raises:
        ConfigError: x has another number of tokens than the plans.
    """
    tokens = plans.plans.documents.tokens
    if x.shape[dim] != tokens:
        raise ConfigError(f"the tensor has shape {list(x.shape)}; valid: the plans' {tokens} tokens in dimension {dim}")
    rows = x.index_select(dim, torch.from_numpy(plans.plans.layout.tokens(plans.rank)).to(x.device))
    return _pad(rows, dim, plans.padded_rows - plans.rows, padding)


def gather_rows(x: Tensor, plans: RankPlans, dim: int, gradient_factor: float = 1.0) -> Tensor:
    """Return the whole tensor whose rows the ranks of a group hold; the inverse of :func:`slice_rows`.

    Args:
        x: [..., padded rows, ...] of this rank; ranks differ in the number of rows.
        plans: plans of this rank.
        dim: dimension of the rows.
        gradient_factor: factor of gradients in the backward pass. All ranks compute the same loss from the whole
            tensor, and each takes the gradients of its own rows. Where gradients are averaged over the ranks of the
            group afterwards, as DDP and FSDP do, this is their number.

    Returns:
        [..., tokens, ...] in the order of the batch, the same on all ranks.

    Raises:
        ConfigError: x has another number of rows than the plans give this rank.
    """
    if x.shape[dim] != plans.padded_rows:
        raise ConfigError(
            f"the tensor has shape {list(x.shape)}; valid: {plans.padded_rows} rows in dimension {dim}, those of rank "
            f"{plans.rank}"
        )
    whole: Tensor = _Gather.apply(x.movedim(dim, 0), plans, gradient_factor)
    return whole.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """All-gather of unequal numbers of rows; ranks with fewer than the largest number send padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plans: RankPlans, factor: float) -> Tensor:
        ctx.plans, ctx.factor = plans, factor
        layout = plans.plans.layout
        largest = max(1, int(layout.token_counts.max()))
        sent = _pad(x[: plans.rows], 0, largest - plans.rows, 0).contiguous()
        gathered = sent
        if group_size(plans.group) > 1:
            gathered = sent.new_empty(layout.ranks * largest, *sent.shape[1:])
            dist.all_gather_into_tensor(gathered, sent, group=resolve_group(plans.group))
        source = np.empty(layout.documents.tokens, np.int64)
        for rank in range(layout.ranks):
            tokens = layout.tokens(rank)
            source[tokens] = rank * largest + np.arange(len(tokens))
        return gathered[torch.from_numpy(source).to(x.device)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        plans, (gradient,) = ctx.plans, gradients
        own = gradient[torch.from_numpy(plans.plans.layout.tokens(plans.rank)).to(gradient.device)] * ctx.factor
        return _pad(own, 0, plans.padded_rows - plans.rows, 0), None, None


def batch_seed(seed: int, mesh: Any, number: int) -> int:
    """Return the seed of attention dropout for a batch: the same on the ranks of a group, another for other batches.

    Args:
        seed: seed of the run.
        mesh: device mesh of the context-parallel ranks; replicas have other ranks in it.
        number: number of the batch.
    """
    first = int(mesh.mesh.flatten()[0])
    return int(np.random.SeedSequence([seed, first, number]).generate_state(1, np.uint32)[0])


def _pad(x: Tensor, dim: int, rows: int, value: float) -> Tensor:
    """Return x with rows of a value behind it."""
    if not rows:
        return x
    shape = list(x.shape)
    shape[dim] = rows
    return torch.cat([x, x.new_full(shape, value)], dim)
