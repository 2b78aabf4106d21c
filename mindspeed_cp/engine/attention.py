"""context_parallel_attention: one autograd function that runs any plan and knows no algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT, Transport
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.engine.program_run import ProgramRun, Run, SlotReader, redistribute, run_interleaved, run_to_end
from mindspeed_cp.engine.rank_context import REDISTRIBUTION_TAGS, RankContext, RankSchedule, bind_rank, join_rows
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.contract import (
    AttentionBackend,
    BackwardState,
    DropoutKey,
    ForwardState,
    Heads,
    checked_dropout_key,
)
from mindspeed_cp.ops.attention.latent import LatentExpansion, checked_up_projection
from mindspeed_cp.ops.attention.sink import add_sink, checked_sink, sink_gradient
from mindspeed_cp.ops.rows import take_rows
from mindspeed_cp.plan import AttentionConfig, Plan
from mindspeed_cp.schema.numbers import is_int

#: Tensors that the forward of a part saves for its backward: q, k, v, out and lse.
SAVED_TENSORS = 5


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    backend: str | AttentionBackend | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    dropout_key: DropoutKey | None = None,
    training: bool = True,
    batch_digest: int | None = None,
    sink: Tensor | None = None,
    kv_up: Tensor | None = None,
) -> Tensor:
    """Compute exact attention over all ranks of a plan. Every rank of the group must call it with its own rows, and
    every rank must run its backward, including ranks without tokens: keys, values and their gradients pass through all
    ranks.

    Differentiable once. Activation recomputation may run it again, and its backward may run again with
    ``retain_graph=True``. out, lse, dq, dk and dv are accumulated in fp32 over all steps and rounded to the type of q
    once. A kernel may round the result of each of its calls as well (docs/verification.md, "Numerics").

    Args:
        q: rows of this rank in plan.layout, [t, heads, head_dim].
        k: rows of this rank in plan.kv_layout_in (equals plan.layout except in cross-attention),
            [t, kv_heads, head_dim].
        v: [t, kv_heads, head_dim_v], rows as for k.
        plan: from :func:`mindspeed_cp.build_plan`, the same on every rank. Every call compares a digest of it, of the
            release of this package, of the type of q, of the dropout key and of `batch_digest` over the group;
            :mod:`mindspeed_cp.engine.agreement` says when.
        group: context-parallel ranks; default: all processes.
        backend: attention backend, by name or as an object with options; default: chosen by the device of q.
        timeout: seconds to wait for a peer in one transfer, on gloo. NCCL and HCCL use the timeout of their group.
        dropout_key: (seed, layer), required if the plan's attention has dropout and ignored otherwise. The same on all
            ranks of the group, different for every layer and micro-batch. Together with head, document and positions it
            decides which weights are dropped, so the result depends neither on the number of ranks nor on the
            algorithm.
        training: False disables dropout.
        batch_digest: a number that each rank computes from its whole batch, such as a checksum of the tokens, so that
            ranks with the same plan and other tokens are found; None: the tokens are not compared.
        sink: attention sinks, fp32 [heads], one logit for each head in the softmax's denominator, which has no value
            (:mod:`mindspeed_cp.ops.attention.sink`); the same on all ranks. Its gradient on a rank is the sum over
            the rows and heads that the rank computes; frameworks add it up over ranks, as for any parameter.
        kv_up: for a plan whose attention has latents, the weight of the up-projection of keys and values, of the type
            of q (:mod:`mindspeed_cp.ops.attention.latent`). k is then [t, 1, channels that all heads share] and v the
            latent, [t, 1, channels]. The weight's gradient on a rank is that of the rows that the rank reads.

    Returns:
        [t, heads, head_dim_v] of the type of q.

    Raises:
        ConfigError: a shape, a type, the group or the backend does not fit the plan, or ranks run different plans or
            batches.
        PeerError: the neighbor that this rank waited for died or did not answer within `timeout`. The error names it;
            the neighbor may itself have waited for another rank.
    """
    check_types(q, k, v, plan)
    check_options(training, batch_digest)
    context, runner, transport, agreement = bind_rank(plan, group, backend, timeout, q.dtype, q.device)
    key = checked_key(plan, dropout_key) if training and plan.attention.dropout else None
    if agreement is not None:
        agreement.check(plan, q.dtype, key, batch_digest, sink is not None)
    check_inputs(q, k, v, context)
    weights = checked_weights(plan, q, sink, kv_up)
    call = RankCall(plan, context, runner, transport, key, agreement)
    return _Attention.apply(q, k, v, *weights, call)


def context_parallel_latent_attention(
    q: Tensor, shared: Tensor, latent: Tensor, kv_up: Tensor, plan: Plan, **how: Any
) -> Tensor:
    """Compute exact multi-head latent attention over all ranks of a plan.

    If the plan's attention has latents, these travel and readers expand them. Otherwise this rank expands its own rows,
    and keys and values of all heads travel. `build_plan` decides (option `latents`).

    Args:
        q: rows of this rank in plan.layout, [t, heads, head_dim].
        shared: channels of k that all heads share, with their rotary positions, rows of this rank in plan.kv_layout_in,
            [t, channels].
        latent: [t, channels], after the norm; rows as for `shared`.
        kv_up: weight of the up-projection of keys and values, [heads * (content + head_dim_v), latent channels]
            (:mod:`mindspeed_cp.ops.attention.latent`).
        plan: from :func:`mindspeed_cp.build_plan`, the same on every rank.
        how: further arguments of :func:`mindspeed_cp.context_parallel_attention`.

    Returns:
        [t, heads, head_dim_v] of the type of q.

    Raises:
        ConfigError, PeerError: as there.
    """
    check_types(q, shared, latent, plan)
    for name, x in (("shared", shared), ("latent", latent)):
        if x.dim() != 2:
            raise ConfigError(f"{name} has shape {list(x.shape)}; valid: [rows, channels]")
    if plan.attention.latent is not None:
        return context_parallel_attention(q, shared[:, None], latent[:, None], plan, kv_up=kv_up, **how)
    attention = replace(plan.attention, latent=(latent.shape[1], shared.shape[1]))
    k, v = expanded_rows(shared, latent, checked_up_projection(kv_up, attention, q.dtype, q.device), attention)
    return context_parallel_attention(q, k, v, plan, **how)


def expanded_rows(shared: Tensor, latent: Tensor, kv_up: Tensor, attention: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return keys and values of all heads of rows, under autograd; arguments as for
    :func:`context_parallel_latent_attention`, and an attention with latents."""
    content = attention.head_dim - shared.shape[1]
    kv = (latent @ kv_up.t()).view(len(latent), attention.heads, content + attention.head_dim_v)
    keys, values = kv.split([content, attention.head_dim_v], 2)
    return torch.cat([keys, shared[:, None].expand(-1, attention.heads, -1)], 2), values


def checked_key(plan: Plan, key: DropoutKey | None) -> DropoutKey:
    """Check the dropout key of a plan with dropout."""
    if key is None:
        raise ConfigError(
            f"attention.dropout is {plan.attention.dropout} and no dropout_key was given; valid: dropout_key=(seed, "
            "layer), the same on all ranks, or training=False, which drops nothing"
        )
    return checked_dropout_key(key)


def check_types(q: object, k: object, v: object, *plan: object) -> None:
    """Check that q, k and v are tensors of rows in memory, and the plan, if one is given, is one of attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}; valid: a torch.Tensor")
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
            raise ConfigError(f"{name} is {kind}; valid: a dense torch.Tensor, for example {name}.to_dense()")
    if plan and not isinstance(plan[0], Plan):
        raise ConfigError(f"plan is {plan[0]!r}; valid: a Plan, from build_plan")


def check_options(training: object, batch_digest: object = None) -> None:
    """Check the arguments of a call that are no tensors and have no check of their own."""
    if not isinstance(training, bool):
        raise ConfigError(f"training is {training!r}; valid: True, or False, which drops nothing")
    if batch_digest is not None and not is_int(batch_digest):
        raise ConfigError(
            f"batch_digest is {batch_digest!r}; valid: an integer that each rank computes from its whole batch, such "
            "as zlib.crc32 of the tokens, or None, which compares no batches"
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, context: RankContext) -> None:
    """Check the tensors of one rank against its plan."""
    for (name, shape), x in zip(context.shapes.items(), (q, k, v), strict=True):
        if x.shape != shape:
            raise ConfigError(
                f"rank {context.rank}: {name} has shape {list(x.shape)}; the plan gives this rank {list(shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"rank {context.rank}: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must agree"
            )


class LayerWeights(NamedTuple):
    """What a layer has learned that attention reads beside q, k and v, or the gradients of these.

    Attributes:
        sink: attention sinks, fp32 [heads]; None without.
        kv_up: weight of the up-projection of latents; None where k and v are given.
    """

    sink: Tensor | None = None
    kv_up: Tensor | None = None


def checked_weights(plan: Plan, q: Tensor, sink: Tensor | None, kv_up: Tensor | None) -> LayerWeights:
    """Check the sink and the up-projection of a call against its plan."""
    if sink is not None:
        sink = checked_sink(sink, plan.attention.heads, q.device)
    if plan.attention.latent is not None:
        kv_up = checked_up_projection(kv_up, plan.attention, q.dtype, q.device)
    elif kv_up is not None:
        raise ConfigError(
            "kv_up is given, but the plan's attention has no latents, so that keys and values travel; valid: None with "
            "k and v of all heads (context_parallel_latent_attention expands them), or a plan with latents: 'on'"
        )
    return LayerWeights(sink, kv_up)


@dataclass(frozen=True)
class RankCall:
    """Context that the forward and the backward of one call share on one rank.

    Attributes:
        plan: the plan.
        context: this rank of the plan.
        backend: attention backend.
        transport: transport to the other ranks; None for a single rank.
        dropout: (seed, layer); None without dropout.
        agreement: comparison of calls with those of other ranks; None for a single rank, and without a process group.
    """

    plan: Plan
    context: RankContext
    backend: AttentionBackend
    transport: Transport | None
    dropout: DropoutKey | None
    agreement: CallAgreement | None = None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, kv_up: Tensor | None, call: RankCall
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # accumulators stay fp32 under autocast
            out, saved, backend_states = run_to_end(forward_run(call, q, k, v, LayerWeights(sink, kv_up)))
        ctx.save_for_backward(*saved)
        ctx.call, ctx.backend_states = call, backend_states
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.agreement is not None:
            ctx.call.agreement.read_finished()
        with torch.autocast(dout.device.type, enabled=False):
            *gradients, weights = run_to_end(backward_run(ctx.call, dout, ctx.saved_tensors, ctx.backend_states))
        return *gradients, *weights, None


def forward_run(
    call: RankCall, q: Tensor, k: Tensor, v: Tensor, weights: LayerWeights
) -> Run[tuple[Tensor, Sequence[Tensor | None], Sequence[Any]]]:
    """Run the forward of one rank. Returns its output, what to save for the backward (the tensors of each part, then
    the weights), and what the backend saves for each part."""
    context, parts = call.context, call.context.parts
    schedules = context.schedules(call.plan, call.backend, "forward", call.dropout is not None)
    runs = [
        _forward_part(n, schedule, q.contiguous(), k.contiguous(), v.contiguous(), weights, call)
        for n, schedule in enumerate(schedules)
    ]
    count = len(q)
    del q, k, v
    results = yield from run_interleaved(runs, context.step_order["forward"])
    out = results[0][0]
    if len(results) > 1:
        out = join_rows([(result[0], part.rows) for result, part in zip(results, parts, strict=True)], count)
    saved = [x for _, tensors, _ in results for x in tensors]
    return out, [*saved, *weights], [state for *_, state in results]


def backward_run(
    call: RankCall, dout: Tensor, saved: Sequence[Any], backend_states: Sequence[Any]
) -> Run[tuple[Tensor, Tensor, Tensor, LayerWeights]]:
    """Run the backward of one rank. Returns dq, dk and dv, and the gradients of the weights that there are."""
    context, parts = call.context, call.context.parts
    schedules = context.schedules(call.plan, call.backend, "backward", call.dropout is not None)
    dout = dout.contiguous()
    weights = LayerWeights(*saved[-len(LayerWeights._fields) :])
    gradients = LayerWeights(*(None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in weights))
    runs = []
    for n, schedule in enumerate(schedules):
        tensors = saved[SAVED_TENSORS * n : SAVED_TENSORS * (n + 1)]
        runs.append(_backward_part(n, schedule, dout, tensors, backend_states[n], weights, gradients, call))
    del dout, saved, tensors
    results = yield from run_interleaved(runs, context.step_order["backward"])
    if weights.kv_up is not None and gradients.kv_up is not None:
        gradients = gradients._replace(kv_up=gradients.kv_up.to(weights.kv_up.dtype))
    if len(results) == 1:
        return *results[0], gradients
    rows, kv_rows = [part.rows for part in parts], [part.kv_rows for part in parts]
    dq, dk, dv = zip(*results, strict=True)
    return (
        join_rows(list(zip(dq, rows, strict=True)), context.shapes["q"][0]),
        join_rows(list(zip(dk, kv_rows, strict=True)), context.shapes["k"][0]),
        join_rows(list(zip(dv, kv_rows, strict=True)), context.shapes["v"][0]),
        gradients,
    )


def _forward_part(
    index: int, schedule: RankSchedule, q: Tensor, k: Tensor, v: Tensor, weights: LayerWeights, call: RankCall
) -> Run[tuple[Tensor, Sequence[Tensor], Any]]:
    """Run the forward of one part on the rows of the caller. Returns its output there, the tensors to save for the
    backward, and what the backend saves."""
    context, backend = call.context, call.backend
    part = context.parts[index]
    attention = part.attention
    if part.q is None and part.rows is not None:
        q = take_rows(q, part.rows)
    if part.kv is None and part.kv_rows is not None:
        k, v = take_rows(k, part.kv_rows), take_rows(v, part.kv_rows)
    if part.q is None and part.kv is None:
        yield ()
    else:
        to_compute, label = (part.q, part.kv, part.kv), "q, k and v to heads"
        q, k, v = yield from redistribute((q, k, v), to_compute, call.transport, label, part.tag)
    output = OutputAccumulator(q, attention.head_dim_v, schedule.stores_all_rows)
    state = ForwardState(q, output, part.heads, call.dropout)
    reader = SlotReader(backend, attention, _expansion(weights, attention, state.heads))
    run = ProgramRun(schedule, k, v, call.transport, part.tag + REDISTRIBUTION_TAGS)
    yield from run.steps(partial(reader.forward, state=state))
    del run  # frees its buffers
    if weights.sink is not None:  # rows are complete: once for each, however many calls and ranks their keys were in
        add_sink(*output.fp32(), weights.sink[slice(*state.heads.q)])
    out, lse = output.result(q.dtype)
    saved = q, k, v, out, lse
    if part.q_adjoint is None:
        yield ()
        return out, saved, state.saved
    to_caller, label = (part.q_adjoint,), "outputs to tokens"
    (result,) = yield from redistribute((out,), to_caller, call.transport, label, part.tag)
    return result, saved, state.saved


def _backward_part(
    index: int,
    schedule: RankSchedule,
    dout: Tensor,
    saved: Sequence[Tensor],
    backend_state: Any,
    weights: LayerWeights,
    gradients: LayerWeights,
    call: RankCall,
) -> Run[tuple[Tensor, Tensor, Tensor]]:
    """Run the backward of one part. Returns dq, dk and dv in the layout of the caller, and adds to `gradients`, those
    of the weights."""
    context, backend = call.context, call.backend
    part, (q, k, v, out, lse) = context.parts[index], saved
    attention, heads = part.attention, part.heads
    if part.q is None:
        dout = dout if part.rows is None else take_rows(dout, part.rows)
        yield ()
    else:
        label = "gradients of outputs to heads"
        (dout,) = yield from redistribute((dout,), (part.q,), call.transport, label, part.tag)
    if weights.sink is not None and gradients.sink is not None:
        sink, dsink = (x[slice(*heads.q)] for x in (weights.sink, gradients.sink))
        dsink += sink_gradient(dout, out, lse, sink)
    reduce_dtype: torch.dtype = getattr(torch, call.plan.reduce_dtype)
    run = ProgramRun(schedule, k, v, call.transport, part.tag + REDISTRIBUTION_TAGS, reduce_dtype)
    dq = GradientAccumulator(q)
    state = BackwardState(q, out, lse, dout, dq, heads, call.dropout, backend_state)
    reader = SlotReader(backend, attention, _expansion(weights, attention, heads), gradients.kv_up)
    yield from run.steps(partial(reader.backward, state=state))
    kv_dtype = torch.float32 if part.kv_has_copies else k.dtype  # copies are summed before they are rounded
    dk, dv = run.gradients[0]
    tensors = dq.result(q.dtype), dk.result(kv_dtype), dv.result(kv_dtype)
    del run, reader, state, dq, dk, dv  # frees their buffers
    if part.q_adjoint is None and part.kv_adjoint is None:
        yield ()
        return tensors
    to_caller, label = (part.q_adjoint, part.kv_adjoint, part.kv_adjoint), "gradients of q, k and v to tokens"
    moving = redistribute(tensors, to_caller, call.transport, label, part.tag)
    del tensors  # the moving ones are freed before the moved ones are rounded
    moved_q, moved_k, moved_v = yield from moving
    return moved_q, moved_k.to(k.dtype), moved_v.to(v.dtype)


def _expansion(weights: LayerWeights, attention: AttentionConfig, heads: Heads) -> LatentExpansion | None:
    """Return the expansion of latents to the heads that a rank computes; None where keys and values travel."""
    return None if weights.kv_up is None else LatentExpansion(weights.kv_up, attention, heads.q)
