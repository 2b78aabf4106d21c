"""All ranks of a plan in this process under autograd, as the engine runs each rank in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed_cp.engine import Stepping
from mindspeed_cp.engine.all_ranks import checked_calls, run_backward, run_forward
from mindspeed_cp.engine.attention import LayerWeights, RankCall, checked_weights
from mindspeed_cp.ops.attention.contract import AttentionBackend, DropoutKey
from mindspeed_cp.plan import Plan


def attend_all_ranks(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    plan: Plan,
    backend: str | AttentionBackend | None = None,
    dropout_key: DropoutKey | None = None,
    training: bool = True,
    stepping: Stepping | None = None,
    sink: Tensor | None = None,
    kv_up: Tensor | None = None,
) -> list[Tensor]:
    """Run :func:`mindspeed_cp.context_parallel_attention` for all ranks of a plan in this process. Differentiable; the
    backward runs for all ranks at once.

    Args:
        q, k, v: for each rank its rows, as for :func:`mindspeed_cp.context_parallel_attention`.
        plan, backend, dropout_key, training, sink, kv_up: as there; gradients of the last two are those of all ranks.
        stepping: order in which the ranks run.

    Returns:
        For each rank its output.

    Raises:
        ConfigError: a shape, a type or the backend does not fit the plan.
        PeerError: the plan dead-locks, or the two ends of a message do not match.
    """
    calls = checked_calls(q, k, v, plan, backend, dropout_key, training)
    weights = checked_weights(plan, q[0], sink, kv_up)
    return list(_AllRanks.apply(calls, stepping or Stepping(), *weights, *q, *k, *v))


class _AllRanks(Function):
    @staticmethod
    def forward(
        ctx: Any,
        calls: Sequence[RankCall],
        stepping: Stepping,
        sink: Tensor | None,
        kv_up: Tensor | None,
        *qkv: Tensor,
    ) -> tuple[Tensor, ...]:
        results = run_forward(calls, stepping, qkv, LayerWeights(sink, kv_up))
        ctx.save_for_backward(*(x for _, saved, _ in results for x in saved))
        ctx.call = calls, stepping, [states for *_, states in results]
        return tuple(out for out, *_ in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        calls, stepping, backend_states = ctx.call
        saved = ctx.saved_tensors
        count = len(saved) // len(calls)
        saved_of_ranks = [saved[count * rank : count * (rank + 1)] for rank in range(len(calls))]
        gradients, weights = run_backward(calls, stepping, dout, saved_of_ranks, backend_states)
        return None, None, *weights, *gradients
