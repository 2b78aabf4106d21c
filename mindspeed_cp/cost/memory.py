"""Bytes that one attention layer holds on each rank at its fullest moment."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.transfers import GRADIENT, heads_of
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.verify.memory import peak_bytes


def layer_bytes(plan: Plan, bytes_per_element: int = 2) -> np.ndarray:
    """High-water of the attention of one layer, int64 [ranks]: the larger of forward and backward.

    Counted are the caller's q, k, v, out and, in the backward, their gradients, in bf16 unless an element has more
    bytes; out, lse and the gradient of q in fp32 while they are added up; and the communication buffers of
    :func:`mindspeed_cp.plan.verify.memory.peak_bytes`, which is a bound. Not counted: weights, activations of other
    layers, and what kernels make of one call.
    """
    attention = plan.attention
    d, e = attention.head_dim, attention.head_dim_v
    held, keys = plan.layout.token_counts, plan.layout_kv.token_counts
    caller = (held * attention.heads + keys * attention.kv_heads) * (d + e) * bytes_per_element
    rows = np.zeros(plan.ranks, np.int64)  # of queries, times their heads
    for piece in plan.pieces:
        rows += piece.q_layout.token_counts * heads_of(piece.q_layout, attention.heads)
    forward = caller + rows * (4 * e + 4) + peak_bytes(plan, "forward", bytes_per_element)["total"]
    backward = 2 * caller + rows * (4 * d + 4) + peak_bytes(plan, "backward", bytes_per_element)["total"]
    return np.maximum(forward, backward)


def layer_bytes_at_most(plan: Plan, bytes_per_element: int = 2) -> np.ndarray:
    """More than :func:`layer_bytes`, quickly: every message staged at both its ends at once, all slots with gradients,
    and all that moves make kept twice; int64 [ranks]."""
    attention, element = plan.attention, bytes_per_element
    width = attention.head_dim + attention.head_dim_v
    out = np.zeros(plan.ranks, np.float64)
    for layout, heads in ((plan.layout, attention.heads), (plan.layout_kv, attention.kv_heads)):
        out += layout.token_counts * heads * width * 8.0 * element
    for piece in plan.pieces:
        held = heads_of(piece.kv_layout, attention.kv_heads)
        computed = piece.q_layout.token_counts * heads_of(piece.q_layout, attention.heads)
        out += (computed + piece.kv_layout.token_counts * held) * width * 4.0 * (element + GRADIENT)
        out += computed * (GRADIENT * width + GRADIENT)
        for program in (piece.forward, piece.backward):
            out += program.capacity.sum(1) * held * width * float(element + GRADIENT)
            for messages in (program.fetch, program.reduce):
                items = messages.items
                for end in ("src", "dst"):
                    rows = np.bincount(items[end], items["rows"], plan.ranks)
                    out += rows * held.max(initial=0) * width * float(element + GRADIENT)
    return out.astype(np.int64)
