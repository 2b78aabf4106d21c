"""All ranks of a plan in one process and one thread: for tests, notebooks, and devices of which there is only one.

Every rank runs the same computation as in :func:`mindspeed_cp.context_parallel_attention`, messages and redistributions
included, over an :class:`mindspeed_cp.comm.in_memory.InMemoryNetwork`. Ranks take turns: a rank runs until it has to
wait, and continues when everything that it waits for has been posted. The order is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.comm.in_memory import InMemoryNetwork, InMemoryPending
from mindspeed_cp.engine.attention import (
    SAVED_TENSORS,
    LayerWeights,
    RankCall,
    backward_run,
    check_inputs,
    check_options,
    check_types,
    checked_key,
    checked_weights,
    forward_run,
)
from mindspeed_cp.engine.program_run import Run
from mindspeed_cp.engine.rank_context import rank_context
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.backends import backend_for_device
from mindspeed_cp.ops.attention.contract import AttentionBackend, DropoutKey
from mindspeed_cp.plan import Plan, document_mask
from mindspeed_cp.schema.numbers import check_type

Result = TypeVar("Result")


@dataclass(frozen=True)
class Stepping:
    """Order in which ranks run, and when messages are copied.

    Attributes:
        lazy: when messages are copied, see :class:`mindspeed_cp.comm.in_memory.InMemoryNetwork`.
        seed: None resumes the ranks in ascending order, one step each; a number draws the next rank at random.
        around: called with a rank; context that is entered whenever the rank runs, for instance to measure it.
    """

    lazy: bool = False
    seed: int | None = None
    around: Callable[[int], AbstractContextManager[Any]] = lambda rank: nullcontext()


def run_all_ranks(
    runs: Sequence[Run[Result]], network: InMemoryNetwork, stepping: Stepping | None = None
) -> list[Result]:
    """Run one computation per rank to their ends and return their results.

    Args:
        runs: a computation for each rank, over the transports of `network`; it yields the transfers that it waits for
            next.
        network: connects the ranks; checked to be empty at the end.
        stepping: order in which the ranks run.

    Raises:
        PeerError: no rank can continue (names what each of them waits for), or a message was left over.
    """
    stepping = stepping or Stepping()
    random = None if stepping.seed is None else Random(stepping.seed)
    results: dict[int, Result] = {}
    awaited: dict[int, Sequence[InMemoryPending]] = dict.fromkeys(range(len(runs)), ())
    while awaited:
        ready = [rank for rank, pending in awaited.items() if all(transfer.ready for transfer in pending)]
        if not ready:
            transfers = [transfer for pending in awaited.values() for transfer in pending if not transfer.ready]
            blocked = [f"{transfer.description} waits for the other end" for transfer in transfers]
            raise PeerError(f"dead-lock: {'; '.join(blocked)}")
        for rank in ready if random is None else [random.choice(ready)]:
            awaited[rank] = ()  # holds no buffer while the rank runs
            try:
                with stepping.around(rank):
                    awaited[rank] = cast(Sequence[InMemoryPending], next(runs[rank]))
            except StopIteration as end:
                results[rank] = end.value
                del awaited[rank]
    network.check_empty()
    return [results[rank] for rank in range(len(runs))]


def checked_calls(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    plan: Plan,
    backend: str | AttentionBackend | None,
    dropout_key: DropoutKey | None,
    training: bool,
) -> list[RankCall]:
    """Check the rows and options of all ranks, and return the call of each rank, without a transport."""
    check_type("plan", plan, Plan, "a Plan, from build_plan")
    if not len(q) == len(k) == len(v) == plan.ranks:
        raise ConfigError(
            f"the plan is for {plan.ranks} ranks, but q, k and v are lists of {len(q)}, {len(k)} and {len(v)} tensors; "
            "valid: one tensor per rank"
        )
    for tensors in zip(q, k, v, strict=True):
        check_types(*tensors, plan)
    check_options(training)
    runner = backend_for_device(q[0].device.type, backend)
    contexts = [rank_context(plan, rank, runner, q[0].dtype, q[0].device) for rank in range(plan.ranks)]
    for rank, context in enumerate(contexts):
        check_inputs(q[rank], k[rank], v[rank], context)
    key = checked_key(plan, dropout_key) if training and plan.attention.dropout else None
    return [RankCall(plan, context, runner, None, key) for context in contexts]


def run_forward(
    calls: Sequence[RankCall], stepping: Stepping, qkv: Sequence[Tensor], weights: LayerWeights
) -> list[tuple[Tensor, Sequence[Any], Sequence[Any]]]:
    """Run the forward of all ranks, with q of all ranks, then k, then v."""
    network, ranks = InMemoryNetwork(len(calls), stepping.lazy), len(calls)
    q, k, v = (qkv[ranks * i : ranks * (i + 1)] for i in range(3))
    runs = [
        forward_run(replace(call, transport=network.transport(rank)), q[rank], k[rank], v[rank], weights)
        for rank, call in enumerate(calls)
    ]
    with torch.autocast(qkv[0].device.type, enabled=False):
        return run_all_ranks(runs, network, stepping)


def run_backward(
    calls: Sequence[RankCall],
    stepping: Stepping,
    dout: Sequence[Tensor],
    saved: Sequence[Sequence[Any]],
    backend_states: Sequence[Sequence[Any]],
) -> tuple[list[Tensor], LayerWeights]:
    """Run the backward of all ranks. Returns dq of all ranks, then dk, then dv; and the weights' gradients, summed over
    them."""
    network = InMemoryNetwork(len(calls), stepping.lazy)
    runs = [
        backward_run(replace(call, transport=network.transport(rank)), dout[rank], saved[rank], backend_states[rank])
        for rank, call in enumerate(calls)
    ]
    del saved
    with torch.autocast(dout[0].device.type, enabled=False):
        gradients = run_all_ranks(runs, network, stepping)
    of_ranks = zip(*(weights for *_, weights in gradients), strict=True)
    sums = [None if xs[0] is None else torch.stack(xs).sum(0, dtype=torch.float32).to(xs[0].dtype) for xs in of_ranks]
    qkv_gradients = [gradient[i] for i in range(3) for gradient in gradients]
    return cast(list[Tensor], qkv_gradients), LayerWeights(*sums)


@dataclass(frozen=True)
class WholeResult:
    """Output and gradients of the whole batch.

    Attributes:
        out: [tokens, heads, head_dim_v].
        lse: fp32 [tokens, heads], with the sink if there is one.
        dq, dk, dv: of the shapes of q, k and v; None without `dout`.
        dsink: fp32 [heads]; None without `dout` or a sink.
        dkv_up: of the shape and type of kv_up; None without `dout` or latents.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsink: Tensor | None = None
    dkv_up: Tensor | None = None


@torch.no_grad()
def attend_in_process(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    backend: str | AttentionBackend | None = None,
    dropout_key: DropoutKey | None = None,
    training: bool = True,
    stepping: Stepping | None = None,
    sink: Tensor | None = None,
    kv_up: Tensor | None = None,
) -> WholeResult:
    """Run all ranks of a plan on the whole batch, forward and, with ``dout``, backward::

        plan = build_plan(documents, Topology(1, 4), attention, "ring")
        result = attend_in_process(plan, q, k, v, dout)

    Args:
        plan: any plan.
        q: [tokens, heads, head_dim].
        k, v: [tokens, kv_heads, head_dim] and [tokens, kv_heads, head_dim_v]; in cross-attention, tokens of the keys.
            For a plan with latents, the shared channels and the latents, [tokens, 1, channels] each.
        dout: gradient of the output [tokens, heads, head_dim_v].
        backend, dropout_key, training, sink, kv_up: as for :func:`mindspeed_cp.context_parallel_attention`; the
            gradients of the last two are those of all ranks.
        stepping: order in which the ranks run.

    Raises:
        ConfigError: a shape, a type or the backend does not fit the plan.
        PeerError: the plan dead-locks, or the two ends of a message do not match.
    """
    layouts, ranks, stepping = (plan.layout, plan.kv_layout_in, plan.kv_layout_in), plan.ranks, stepping or Stepping()
    qs, ks, vs = (
        [layout.shard(x, rank) for rank in range(ranks)] for x, layout in zip((q, k, v), layouts, strict=True)
    )
    calls = checked_calls(qs, ks, vs, plan, backend, dropout_key, training)
    results = run_forward(calls, stepping, [*qs, *ks, *vs], checked_weights(plan, q, sink, kv_up))
    saved = [saved for _, saved, _ in results]
    out, lse = plan.layout.unshard([out for out, *_ in results]), _whole_lse(plan, saved)
    if dout is None:
        return WholeResult(out, lse, None, None, None)
    douts = [plan.layout.shard(dout, rank) for rank in range(ranks)]
    gradients, weights = run_backward(calls, stepping, douts, saved, [states for *_, states in results])
    dq, dk, dv = (layout.unshard(gradients[ranks * i : ranks * (i + 1)]) for i, layout in enumerate(layouts))
    return WholeResult(out, lse, dq, dk, dv, *weights)


def _whole_lse(plan: Plan, saved: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the lse of the batch, fp32 [tokens, heads], from the tensors that each rank saved."""
    lse = saved[0][SAVED_TENSORS - 1].new_empty(plan.documents.tokens, plan.attention.heads)
    for index, part in enumerate(plan.parts_or_self):
        tokens = np.flatnonzero(np.repeat(document_mask(part), plan.documents.lengths))
        for rank, tensors in enumerate(saved):
            spans = part.q_layout_compute.rank_spans(rank)
            rows = tokens[ragged_arange(spans["start"], spans["stop"] - spans["start"])]
            heads = slice(*part.q_layout_compute.head_range(rank, plan.attention.heads))
            lse[torch.from_numpy(rows).to(lse.device), heads] = tensors[SAVED_TENSORS * (index + 1) - 1]
    return lse
