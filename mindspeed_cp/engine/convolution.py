"""context_parallel_conv1d: the short causal convolution before linear attention, inside documents, across ranks.

Every token reads itself and the `width` - 1 tokens before it on its path. Those that another rank holds, the halo of
each segment, are fetched once by each rank that reads them; segments shorter than the halo take it from several ranks.
A rank then convolves each of its segments with its halo before it::

    segment of a rank      5 6 7 8          of another document     0 1 2
    convolved           2 3 4 5 6 7 8       with zeros        0 0 0 0 1 2     width 4
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT, Transport
from mindspeed_cp.comm.groups import group_rank, group_size
from mindspeed_cp.comm.redistribution import RankRedistribution, rank_redistribution
from mindspeed_cp.engine.hidden_states import redistribute_rows
from mindspeed_cp.engine.linear_attention import bind_group
from mindspeed_cp.engine.plan_cache import kept_with_plan
from mindspeed_cp.engine.program_run import Run, run_to_end
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import TOKEN_SPAN, Layout, Redistribution
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.states import StatePlan, last_token_before, segments_of
from mindspeed_cp.schema.messages import short_repr

#: Widest kernel: convolutions of linear attention have 2 to 4 rows, and each row more is one more of every halo.
WIDTH_LIMIT = 256

ACTIVATIONS = {None: None, "silu": functional.silu}


@dataclass(frozen=True)
class RankHalo:
    """The halo of one rank.

    Attributes:
        rank, rows: rank, and its rows.
        fetch, adjoint: from the rows of all ranks to the rows that this rank reads, by token; and back.
        stream: what is convolved: numbers of rows of the rank, then of the halo; then that of a row of zeros.
        outputs: where the rows of the rank are in the convolved stream.
    """

    rank: int
    rows: int
    fetch: RankRedistribution
    adjoint: RankRedistribution
    stream: Tensor
    outputs: Tensor


def tokens_before(layout: Layout, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the segments of a layout, and for each the `width` - 1 tokens before it on its path, -1 where there are no
    more; int64 [segments, width - 1]."""
    segments = segments_of(layout)
    out = np.full((len(segments), width - 1), -1)
    doc, token = segments["doc"].copy(), segments["start"].copy()
    for column in range(width - 2, -1, -1):
        reached = token >= 0
        token[reached] = last_token_before(layout.documents, doc[reached], token[reached])
        reached = token >= 0
        doc[reached] = layout.documents.document_of(token[reached])
        out[:, column] = token
    return segments, out


def _halo_layout(layout: Layout, segments: np.ndarray, before: np.ndarray) -> Layout:
    """Return the layout in which each rank has the tokens before its segments that other ranks hold, each once."""
    owner = np.empty(layout.documents.tokens, np.int64)
    for span in layout.spans:
        owner[span["start"] : span["stop"]] = span["rank"]
    rank = np.repeat(segments["rank"], before.shape[1])
    token = before.reshape(-1)
    foreign = (token >= 0) & (owner[token] != rank)
    pairs = np.unique(np.stack([rank[foreign], token[foreign]], 1), axis=0)
    spans = np.empty(len(pairs), TOKEN_SPAN)
    spans["rank"], spans["start"], spans["stop"] = pairs[:, 0], pairs[:, 1], pairs[:, 1] + 1
    spans["doc"] = layout.documents.document_of(pairs[:, 1])
    return Layout(layout.documents, layout.ranks, spans)


def rank_halo(layout: Layout, width: int, rank: int, device: torch.device, moved: Redistribution) -> RankHalo:
    """Return what a rank does in a convolution, with row numbers on a device."""
    segments, before = tokens_before(layout, width)
    own, before = segments[segments["rank"] == rank], before[segments["rank"] == rank]
    row_of = np.full(layout.documents.tokens + 1, -1)  # the last one is that of token -1
    tokens, halo = layout.tokens(rank), moved.target.tokens(rank)
    row_of[tokens], row_of[halo] = np.arange(len(tokens)), len(tokens) + np.arange(len(halo))
    row_of[-1] = len(tokens) + len(halo)
    length = own["stop"] - own["start"] + width - 1
    first = np.cumsum(length) - length
    stream = np.empty(int(length.sum()), np.int64)
    is_halo = np.zeros(len(stream), bool)
    is_halo[(first[:, None] + np.arange(width - 1)).reshape(-1)] = True
    stream[is_halo], stream[~is_halo] = row_of[before.reshape(-1)], np.arange(len(tokens))
    return RankHalo(
        rank,
        len(tokens),
        rank_redistribution(moved, rank, device),
        # begins with zeros: most rows have no reader elsewhere
        replace(rank_redistribution(moved, rank, device, adjoint=True), accumulates=True),
        torch.from_numpy(stream).to(device),
        torch.from_numpy(np.flatnonzero(~is_halo) - (width - 1)).to(device),
    )


def halo_of(plan: Plan | StatePlan, width: int, rank: int, device: torch.device) -> RankHalo:
    """Return the halo of a rank; it is kept as long as the plan lives."""
    layout = plan.batch_layout

    def move() -> Redistribution:
        return Redistribution(layout, _halo_layout(layout, *tokens_before(layout, width)), 1)

    moved = kept_with_plan(plan, ("halos", width), move)
    return kept_with_plan(plan, ("halo", width, rank, device), partial(rank_halo, layout, width, rank, device, moved))


def fetch_run(x: Tensor, halo: RankHalo, transport: Transport | None) -> Run[Tensor]:
    """Return the rows of other ranks that this rank reads, [rows, channels]."""
    return (yield from redistribute_rows(x, halo.fetch, transport, "halo of a convolution"))


def return_run(gradient: Tensor, halo: RankHalo, transport: Transport | None) -> Run[Tensor]:
    """Return what other ranks read of this rank's rows as a gradient of these, [t, channels]."""
    return (yield from redistribute_rows(gradient, halo.adjoint, transport, "gradients of a halo"))


class _FetchHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: RankHalo, transport: Transport | None) -> Tensor:
        ctx.call = halo, transport
        return run_to_end(fetch_run(x, halo, transport))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return run_to_end(return_run(gradient, *ctx.call)), None, None


def convolve(x: Tensor, fetched: Tensor, weight: Tensor, bias: Tensor | None, halo: RankHalo) -> Tensor:
    """Convolve the segments of a rank; the rows before them are `fetched` from other ranks."""
    if not halo.rows:  # nothing to compute, but the rows that others read have gradients to receive
        return x + fetched.sum() + (weight.sum() if bias is None else weight.sum() + bias.sum()) * 0
    rows = torch.cat([x, fetched, x.new_zeros(1, x.shape[1])]).index_select(0, halo.stream)
    out = functional.conv1d(rows.t()[None], weight[:, None], bias, groups=x.shape[1])[0].t()
    return out.index_select(0, halo.outputs)


def context_parallel_conv1d(
    x: Tensor,
    weight: Tensor,
    plan: Plan | StatePlan,
    bias: Tensor | None = None,
    activation: str | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Tensor:
    """Convolve each channel of the rows with the rows before them in the same document, in a tree on the same path,
    over all ranks of a plan. Every rank of the group must call it with its own rows, and run its backward, including
    ranks without tokens. Differentiable once.

    Args:
        x: rows of this rank in ``plan.batch_layout``, [t, channels].
        weight: [channels, width], width 1 to 256; the last column is that of the row itself, as in torch's conv1d; the
            same on all ranks. Its gradient on a rank is that of the rank's rows; frameworks add it up over ranks.
        plan: a Plan, or a plan of states. The same on every rank, as the sizes of weight, activation, and whether there
            is a bias; every call compares these.
        bias: [channels], or None.
        activation: None or "silu".
        group: context-parallel ranks; default: all processes.
        timeout: seconds to wait for a peer, on gloo.

    Returns:
        [t, channels] of the type of x.

    Raises:
        ConfigError: a shape, a type or the group does not fit the plan, or ranks have different plans.
        PeerError: a peer died or did not answer in time.
    """
    if not isinstance(plan, (Plan, StatePlan)):
        raise ConfigError(f"plan is {short_repr(plan)}; valid: a Plan, or a StatePlan")
    ranks = group_size(group)
    if ranks != plan.ranks:
        valid = "only the group's own ranks call it" if ranks < 0 else "build the plan for the group's size"
        raise ConfigError(f"the plan is for {plan.ranks} ranks, but the group has {max(ranks, 0)}; {valid}")
    rank = group_rank(group) if ranks > 1 else 0
    check_convolution(x, weight, bias, activation, int(plan.batch_layout.token_counts[rank]), rank)
    halo = halo_of(plan, weight.shape[1], rank, x.device)
    transport = None
    if ranks > 1:
        transport, agreement = bind_group(plan, group, timeout, x.device)
        kernel = (*weight.shape, activation, bias is not None)  # of all rows that travel
        agreement.check(plan, x.dtype, channels_width_activation_bias=kernel)
    out = convolve(x, _FetchHalo.apply(x, halo, transport), weight, bias, halo)
    function = ACTIVATIONS[activation]
    return out if function is None else function(out)


def check_convolution(x: object, weight: object, bias: object, activation: object, rows: int, rank: int) -> None:
    """Check the arguments of a convolution on one rank."""
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, Tensor) or value.dim() != 2:
            shown = list(value.shape) if isinstance(value, Tensor) else short_repr(value)
            raise ConfigError(f"{name} is {shown}; valid: a tensor [{'rows' if name == 'x' else 'channels'}, n]")
    assert isinstance(x, Tensor) and isinstance(weight, Tensor)
    channels, width = weight.shape
    if not 1 <= width <= WIDTH_LIMIT:
        raise ConfigError(f"weight has {width} columns, the width of the kernel; valid: 1 to {WIDTH_LIMIT}")
    if len(x) != rows:
        raise ConfigError(
            f"rank {rank}: x has {len(x)} rows; the plan gives this rank {rows} (is it a plan of another batch?)"
        )
    if not x.is_floating_point():
        raise ConfigError(f"x is {x.dtype}; valid: a type of floating-point numbers")
    if x.shape[1] != channels:
        raise ConfigError(f"x has {x.shape[1]} channels, weight {channels}; valid: equally many")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (channels,)):
        shown = list(bias.shape) if isinstance(bias, Tensor) else short_repr(bias)
        raise ConfigError(f"bias is {shown}; valid: a tensor [{channels}], or None")
    for name, value in (("weight", weight), ("bias", bias)):
        if isinstance(value, Tensor) and (value.dtype != x.dtype or value.device != x.device):
            raise ConfigError(f"{name} is {value.dtype} on {value.device}, x is {x.dtype} on {x.device}; valid: alike")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation is {short_repr(activation)}; valid: None or 'silu'")
