"""Whole packed rows to the rows of one rank and back: for heads that pool, and for trainers that slice and gather
tensors themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm import group_size, resolve_group
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.layout.host_arrays import as_integers


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


def gather_rows(x: Tensor, plans: RankPlans, dim: int = 1, gradient_factor: float = 1.0, tokens: Any = None) -> Tensor:
    """Return the whole tensor whose rows the ranks of a group hold, or chosen rows of it; the inverse of
    :func:`slice_rows`.

    All ranks compute the same loss from the result, and each takes the gradients of its own rows.

    Args:
        x: [..., padded rows, ...] of this rank, such as hidden states [1, rows, channels]; ranks differ in the number
            of rows.
        plans: plans of this rank, ``rows["plan"]`` of :func:`planned_batch`.
        dim: dimension of the rows.
        gradient_factor: factor of gradients in the backward pass. Where gradients are averaged over the ranks of the
            group afterwards, as DDP and FSDP do, this is their number.
        tokens: numbers of n tokens of the packed batch without padding, [n], the same on all ranks, such as the last of
            each document, ``plans.plans.documents.offsets[1:] - 1``; default: all tokens.

    Returns:
        [..., tokens, ...] in the order of the batch, or [..., n, ...] in the order of `tokens`; the same on all ranks.

    Raises:
        ConfigError: x has another number of rows than the plans give this rank, or a token is not in the batch.
    """
    if x.shape[dim] != plans.padded_rows:
        raise ConfigError(
            f"the tensor has shape {list(x.shape)}; valid: {plans.padded_rows} rows in dimension {dim}, those of rank "
            f"{plans.rank}"
        )
    x = x.movedim(dim, 0)
    if tokens is None:
        whole: Tensor = _Gather.apply(x, plans, gradient_factor)
        return whole.movedim(0, dim)
    chosen = as_integers("tokens", tokens.cpu() if isinstance(tokens, Tensor) else tokens, 1)
    count = plans.plans.documents.tokens
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if len(wrong):
        raise ConfigError(f"tokens has {wrong[0]}; valid: 0 to {count - 1}, the tokens of {plans.plans.documents!r}")
    row_of_token = np.full(count, -1)
    row_of_token[plans.plans.layout.tokens(plans.rank)] = np.arange(plans.rows)
    numbers = np.flatnonzero(row_of_token[chosen] >= 0)
    own = x[torch.from_numpy(row_of_token[chosen[numbers]]).to(x.device)]
    return gather_numbered(own, torch.from_numpy(numbers).to(x.device), len(chosen), plans, gradient_factor).movedim(
        0, dim
    )


def gather_numbered(x: Tensor, numbers: Tensor, count: int, plans: RankPlans, gradient_factor: float) -> Tensor:
    """Return values of which each is on one rank, in the order of their numbers.

    Args:
        x: [n, ...] of this rank.
        numbers: number of each among those of all ranks, int64 [n].
        count: values of all ranks.
        plans, gradient_factor: as for :func:`gather_rows`.

    Returns:
        [count, ...], the same on all ranks.
    """
    return _GatherNumbered.apply(x, numbers, count, plans, gradient_factor)


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


class _GatherNumbered(torch.autograd.Function):
    """The sum over ranks of values at their places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, count: int, plans: RankPlans, factor: float) -> Tensor:
        ctx.numbers, ctx.factor = numbers, factor
        whole = x.new_zeros(count, *x.shape[1:])
        whole[numbers] = x
        if group_size(plans.group) > 1:
            dist.all_reduce(whole, group=resolve_group(plans.group))
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradients[0][ctx.numbers] * ctx.factor, None, None, None, None


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
