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
from mindspeed_cp.integrations.huggingface.batch import documents_of_batch
from mindspeed_cp.integrations.huggingface.families import dropout_rate
from mindspeed_cp.integrations.huggingface.plans import RankPlans, rank_plans_on_mesh
from mindspeed_cp.layout.runs import as_integers


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
    return plans.padded(rows, padding, dim)


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
    layout = plans.plans.layout
    numbers, rows, count = layout.tokens(plans.rank), np.arange(plans.rows), layout.documents.tokens
    if tokens is not None:
        chosen = as_integers("tokens", tokens.cpu() if isinstance(tokens, Tensor) else tokens, 1)
        wrong = chosen[(chosen < 0) | (chosen >= count)]
        if len(wrong):
            raise ConfigError(f"tokens has {wrong[0]}; valid: 0 to {count - 1}, the tokens of {layout.documents!r}")
        row_of_token = np.full(count, -1)
        row_of_token[numbers] = rows
        numbers, count = np.flatnonzero(row_of_token[chosen] >= 0), len(chosen)
        rows = row_of_token[chosen[numbers]]
    own = x.movedim(dim, 0)[torch.from_numpy(rows).to(x.device)]
    places = torch.from_numpy(numbers).to(x.device)
    return GatherNumbered.apply(own, places, count, plans, gradient_factor).movedim(0, dim)


class GatherNumbered(torch.autograd.Function):
    """Values of which each is on one rank, in the order of their numbers: `apply(x, numbers, count, plans, factor)`.

    `numbers` are those of this rank's values x [n, ...] among the `count` of all ranks; the result is [count, ...].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, count: int, plans: RankPlans, factor: float) -> Tensor:
        ctx.numbers, ctx.factor = numbers, factor
        summed = torch.uint8 if x.dtype is torch.bool else x.dtype
        whole = x.new_zeros(count, *x.shape[1:], dtype=summed)
        whole[numbers] = x.to(summed)
        if group_size(plans.group) > 1:
            dist.all_reduce(whole, group=resolve_group(plans.group))
        return whole.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradients[0][ctx.numbers] * ctx.factor, None, None, None, None


def packed_row_plans(
    config: Any, mesh: Any, position_ids: Tensor, number: int, *, seed: int = 0, **arguments: Any
) -> RankPlans:
    """Build the plans of a packed row whose position_ids say where documents begin, for this rank.

    Args:
        config: the model's configuration.
        mesh: device mesh of the context-parallel ranks.
        position_ids: [1, tokens], from 0 in each document.
        number: of the row; rows drop other attention weights, if the model has attention dropout.
        seed: of attention dropout.
        arguments: algorithm, backend, timeout, and options of the algorithm, as for :func:`rank_plans_on_mesh`.

    Raises:
        ConfigError: the positions are no packed row, or the model, the algorithm or an option is not supported.
    """
    if position_ids.dim() != 2 or position_ids.shape[0] != 1:
        raise ConfigError(
            f"position_ids have shape {list(position_ids.shape)}; valid: [1, tokens], one packed row (positions of "
            "vision-language models are not supported)"
        )
    documents = documents_of_batch({"input_ids": position_ids, "position_ids": position_ids})
    first = int(mesh.mesh.flatten()[0])  # another one in other replicas
    seeds = np.random.SeedSequence([seed, first, number]).generate_state(1, np.uint32)
    dropout_seed = int(seeds[0]) if dropout_rate(config) else None
    return rank_plans_on_mesh(config, documents, mesh, dropout_seed=dropout_seed, **arguments)
