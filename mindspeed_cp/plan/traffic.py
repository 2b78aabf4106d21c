"""Bytes that the ranks of a plan send to each other."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.records import Messages, record

#: Bytes that a rank sends in one forward and backward: keys and values of fetches, of the forward and of the backward;
#: gradients of reduces; and moves between the caller's layouts and those where attention is computed, forward and
#: backward.
TRAFFIC = record("fetch_forward fetch_backward reduce move_forward move_backward total")


def traffic(plan: Plan, bytes_per_element: int = 2) -> np.ndarray:
    """What each rank sends, in bytes.

    Gradients of keys and values travel in fp32: between the steps always, in a move back to the caller's layout when
    copies of kv heads are summed there.

    Args:
        plan: the plan; one of parts sends what its parts do.
        bytes_per_element: of q, k, v and out.

    Returns:
        Records of dtype TRAFFIC [ranks].
    """
    out = np.zeros(plan.ranks, TRAFFIC)
    for piece in plan.pieces:
        found = _of(piece, bytes_per_element)
        for name in TRAFFIC.names:  # type: ignore[union-attr]  # a record has names
            out[name] += found[name]
    return out


def _of(plan: Plan, bytes_per_element: int) -> np.ndarray:
    """What the ranks of a plan without parts send."""
    attention = plan.attention
    width, width_v = attention.head_dim, attention.head_dim_v
    heads = np.array([np.diff(plan.kv_layout.head_range(r, attention.kv_heads))[0] for r in range(plan.ranks)])
    row = heads * (width + width_v)

    def rows(messages: Messages) -> np.ndarray:
        items = messages.items
        return np.bincount(items["src"], weights=items["rows"], minlength=plan.ranks).astype(np.int64)

    out = np.zeros(plan.ranks, TRAFFIC)
    out["fetch_forward"] = rows(plan.forward.fetch) * row * bytes_per_element
    out["fetch_backward"] = rows(plan.backward.fetch) * row * bytes_per_element
    out["reduce"] = rows(plan.backward.reduce) * row * 4
    if plan.q_move is not None:  # q there, out back; dout there, dq back
        there, back = (plan.q_move.sent(adjoint) * bytes_per_element for adjoint in (False, True))
        out["move_forward"] += there * width + back * width_v
        out["move_backward"] += there * width_v + back * width
    if plan.kv_move is not None:
        size = 4 if plan.kv_move.replicates else bytes_per_element
        out["move_forward"] += plan.kv_move.sent() * (width + width_v) * bytes_per_element
        out["move_backward"] += plan.kv_move.sent(adjoint=True) * (width + width_v) * size
    for name in TRAFFIC.names[:-1]:  # type: ignore[index]  # a record has names
        out["total"] += out[name]
    return out
