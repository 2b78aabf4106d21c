"""context_parallel_attention: one autograd function that runs any plan and knows no algorithm."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.comm import DEFAULT_TIMEOUT, Transport, checked_timeout, group_rank, group_size
from mindspeed_cp.engine.agenda import agenda_of, heads_of
from mindspeed_cp.engine.clock import Track, new_call, track_of
from mindspeed_cp.engine.moves import move_all
from mindspeed_cp.engine.pieces import MOVES, Piece, join, pieces_of, take, take_turns
from mindspeed_cp.engine.run import Run
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention import AttentionBackend, BackwardState, ForwardState, backend_for
from mindspeed_cp.ops.attention.contract import DropoutKey, checked_dropout_key
from mindspeed_cp.plan import AttentionConfig, Plan


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
) -> Tensor:
    """Exact attention over all ranks of a plan; every rank of the group calls it with its own rows, and every rank runs
    its backward, one without tokens too: keys and values, and their gradients, pass through all of them.

    Differentiable once; may be run again by activation recompute, and its backward may run again with
    ``retain_graph=True``. out, lse, dq, dk and dv are summed in fp32 over all steps and rounded to q's type in the end
    (the cpu backend's kernel rounds the part of each call as well, see docs/decisions.md).

    Args:
        q: this rank's rows in plan.layout, [t, heads, head_dim].
        k: this rank's rows in plan.layout_kv (plan.layout, but in cross-attention), [t, kv_heads, head_dim].
        v: [t, kv_heads, head_dim_v], rows as k.
        plan: from :func:`mindspeed_cp.build_plan`, the same on every rank; :func:`mindspeed_cp.check_agreement` tells
            whether it is.
        group: the context-parallel ranks; default: all processes.
        backend: of the attention operator, by name or with options of its own; default: by the device of q.
        timeout: seconds until a peer that does not answer in one transfer is given up; on gloo. NCCL and HCCL use the
            time-out of their group.
        dropout_key: (seed, layer), needed where the plan's attention has dropout. The same on all ranks of the group;
            another one for every layer and micro-batch. With head, document and positions it decides which weights are
            dropped, so the result depends neither on the number of ranks nor on the algorithm. May be given where there
            is no dropout; it is not used then.
        training: False drops nothing.

    Returns:
        [t, heads, head_dim_v] of q's type.

    Raises:
        ConfigError: a shape, a type, the group or the backend does not fit the plan.
        PeerError: the neighbour that this rank waited for died or did not answer within `timeout`; names it. That one
            may itself have been waiting for another.
    """
    timeout = checked_timeout(timeout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name} is a {type(x).__name__}; valid: a torch.Tensor")
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is {plan!r}; valid: a Plan, from build_plan")
    runner = backend_for(q.device.type, backend)
    size = group_size(group)
    if size < 0:
        raise ConfigError(
            "this process is not in the group; only the group's own ranks call context_parallel_attention"
        )
    if size != plan.ranks:
        raise ConfigError(
            f"the plan is for {plan.ranks} ranks, but the group has {size}; build the plan for the group's size"
        )
    rank = group_rank(group)
    _check(q, k, v, plan, rank, runner)
    key = _dropout_key(plan.attention.dropout, dropout_key) if training and plan.attention.dropout > 0 else None
    transport = Transport(group, timeout, q.device) if size > 1 else None
    return _Attention.apply(q, k, v, plan, rank, transport, runner, key)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        rank: int,
        transport: Transport | None,
        backend: AttentionBackend,
        dropout: DropoutKey | None,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        pieces = pieces_of(plan, rank, q.device)
        call = new_call()
        runs = [
            _forward(part, piece, q, k, v, rank, transport, backend, dropout, track_of(call, "forward", n))
            for n, (part, piece) in enumerate(zip(plan.pieces, pieces.all, strict=True))
        ]
        with torch.autocast(q.device.type, enabled=False):  # accumulators are fp32 whatever autocast says
            results = take_turns(runs, pieces.turns["forward"])
        ctx.save_for_backward(*(x for _, saved, _ in results for x in saved))
        ctx.how = plan, rank, transport, backend, dropout, [kept for *_, kept in results], call
        if len(results) == 1:
            return results[0][0]
        return join([(result[0], piece.rows) for result, piece in zip(results, pieces.all, strict=True)], len(q))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        plan, rank, transport, backend, dropout, kept, call = ctx.how
        dout, saved = dout.contiguous(), ctx.saved_tensors
        pieces = pieces_of(plan, rank, dout.device)
        how = rank, transport, backend, dropout
        runs = [
            _backward(part, piece, dout, saved[5 * n : 5 * n + 5], kept[n], *how, track_of(call, "backward", n))
            for n, (part, piece) in enumerate(zip(plan.pieces, pieces.all, strict=True))
        ]
        del saved
        with torch.autocast(dout.device.type, enabled=False):
            results = take_turns(runs, pieces.turns["backward"])
        if len(results) == 1:
            return *results[0], None, None, None, None, None
        rows, kv_rows = [piece.rows for piece in pieces.all], [piece.kv_rows for piece in pieces.all]
        count, kv_count = int(plan.layout.token_counts[rank]), int(plan.layout_kv.token_counts[rank])
        dq, dk, dv = zip(*results, strict=True)
        found = [
            join(list(zip(parts, of, strict=True)), total)
            for parts, of, total in ((dq, rows, count), (dk, kv_rows, kv_count), (dv, kv_rows, kv_count))
        ]
        return *found, None, None, None, None, None


def _forward(
    plan: Plan,
    piece: Piece,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: int,
    transport: Transport | None,
    backend: AttentionBackend,
    dropout: DropoutKey | None,
    track: Track | None,
) -> Generator[None, None, tuple[Tensor, Sequence[Tensor], Any]]:
    """The forward of one part, from the caller's rows; its output there, what its backward needs, and what the backend
    keeps for that."""
    moves = piece.moves
    agenda = agenda_of(plan, rank, "forward", backend, q.dtype, dropout is not None, q.device)
    q = q if moves.q is not None else take(q, piece.rows)
    if moves.kv is None:
        k, v = take(k, piece.kv_rows), take(v, piece.kv_rows)
    if moves.q is None and moves.kv is None:
        yield
    else:
        there = (moves.q, moves.kv, moves.kv)
        q, k, v = yield from move_all((q, k, v), there, transport, "q, k and v to heads", piece.tag, track)
    empty = q.new_empty if agenda.stores_all_rows else q.new_zeros  # the first tile of a row is stored, not added
    out = empty((len(q), q.shape[1], v.shape[2]), dtype=torch.float32)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    state = ForwardState(q, out, lse, heads_of(plan, rank), dropout)
    run = Run(agenda, k, v, transport, piece.tag + MOVES, track)
    yield from _forward_steps(run, state, plan.attention, backend)
    del run  # its buffers
    out = out.to(q.dtype)
    saved = q, k, v, out, lse
    if moves.q_back is None:
        yield
        return out, saved, state.kept
    (result,) = yield from move_all((out,), (moves.q_back,), transport, "outputs to tokens", piece.tag, track)
    return result, saved, state.kept


def _backward(
    plan: Plan,
    piece: Piece,
    dout: Tensor,
    saved: Sequence[Tensor],
    kept: Any,
    rank: int,
    transport: Transport | None,
    backend: AttentionBackend,
    dropout: DropoutKey | None,
    track: Track | None,
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """The backward of one part: dq, dk and dv at the caller."""
    moves, (q, k, v, out, lse) = piece.moves, saved
    dout = dout if moves.q is not None else take(dout, piece.rows)
    if moves.q is None:
        yield
    else:
        what = "gradients of outputs to heads"
        (dout,) = yield from move_all((dout,), (moves.q,), transport, what, piece.tag, track)
    agenda = agenda_of(plan, rank, "backward", backend, q.dtype, dropout is not None, q.device)
    run = Run(agenda, k, v, transport, piece.tag + MOVES, track)
    dq = torch.zeros_like(q, dtype=torch.float32)
    state = BackwardState(q, out, lse, dout, dq, heads_of(plan, rank), dropout, kept)
    dk, dv = yield from _run_backward(run, state, plan.attention, backend)
    del run  # its buffers
    if not moves.kv_copies:  # copies are summed in fp32 first
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    if moves.q_back is None and moves.kv_back is None:
        yield
        return dq.to(q.dtype), dk, dv
    back, what = (moves.q_back, moves.kv_back, moves.kv_back), "gradients of q, k and v to tokens"
    dq, dk, dv = yield from move_all((dq.to(q.dtype), dk, dv), back, transport, what, piece.tag, track)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _forward_steps(
    run: Run, state: ForwardState, attention: AttentionConfig, backend: AttentionBackend
) -> Iterator[None]:
    """All steps; buffers go with `run`."""
    return run.steps(lambda slot, calls: backend.forward(calls, attention, state, run.k[slot], run.v[slot]))


def _run_backward(
    run: Run, state: BackwardState, attention: AttentionConfig, backend: AttentionBackend
) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """All steps; dK and dV of slot 0."""

    def compute(slot: int, calls: Any) -> None:
        backend.backward(calls, attention, state, run.k[slot], run.v[slot], *run.gradient(slot))

    yield from run.steps(compute)
    return run.gradient(0)


def _dropout_key(share: float, key: DropoutKey | None) -> DropoutKey:
    if key is None:
        raise ConfigError(
            f"attention.dropout is {share} and no dropout_key was given; valid: dropout_key=(seed, layer), the same on "
            "all ranks, or training=False, which drops nothing"
        )
    return checked_dropout_key(key)


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan, rank: int, backend: AttentionBackend) -> None:
    a = plan.attention
    rows, kv_rows = int(plan.layout.token_counts[rank]), int(plan.layout_kv.token_counts[rank])
    shapes = (
        ("q", q, rows, a.heads, a.head_dim),
        ("k", k, kv_rows, a.kv_heads, a.head_dim),
        ("v", v, kv_rows, a.kv_heads, a.head_dim_v),
    )
    for name, x, rows, heads, width in shapes:
        if tuple(x.shape) != (rows, heads, width):
            raise ConfigError(
                f"rank {rank}: {name} has shape {list(x.shape)}; the plan gives this rank [{rows}, {heads}, {width}]"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"rank {rank}: {name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must agree"
            )
    backend.check(a, q.dtype)
    backend.check_device(q.device)
