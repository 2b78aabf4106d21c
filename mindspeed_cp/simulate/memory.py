"""Peak bytes of one attention layer on each rank."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.transfers import GRADIENT_BYTES
from mindspeed_cp.plan.verify.memory import peak_bytes


def attention_peak_bytes(plan: Plan, bytes_per_element: int = 2) -> np.ndarray:
    """Return the peak bytes of one layer's attention, int64 [ranks]: the larger of forward and backward.

    Included are the caller's q, k, v, out and, in the backward, their gradients; out, lse and the gradient of q in fp32
    during accumulation; and the communication buffers of :func:`mindspeed_cp.plan.verify.memory.peak_bytes`, an upper
    bound. With latents, so are the keys and values of a slot while it is read, and their gradients. Weights,
    activations of other layers and buffers inside kernels are not included.
    """
    attention = plan.attention
    width, width_v = attention.head_dim, attention.head_dim_v
    q_tokens, kv_tokens = plan.layout.token_counts, plan.kv_layout_in.token_counts
    kv_channels = attention.kv_row.channels
    caller = (q_tokens * attention.heads * (width + width_v) + kv_tokens * kv_channels) * bytes_per_element
    rows = np.zeros(plan.ranks, np.int64)  # computed queries times their heads
    for part in plan.parts_or_self:
        rows += part.q_layout_compute.token_counts * part.q_layout_compute.head_counts(attention.heads)
    forward = caller + rows * (4 * width_v + 4) + peak_bytes(plan, "forward", bytes_per_element)["total"]
    backward = 2 * caller + rows * (4 * width + 4) + peak_bytes(plan, "backward", bytes_per_element)["total"]
    forward += expanded_bytes(plan, "forward", bytes_per_element)
    backward += expanded_bytes(plan, "backward", bytes_per_element)
    return np.maximum(forward, backward)


def expanded_bytes(plan: Plan, direction: str, bytes_per_element: int) -> np.ndarray:
    """Return an upper bound of the bytes of the keys and values that are expanded from the latents of one slot, and in
    the backward of their gradients, in fp32 and as the operand of the products; int64 [ranks]."""
    attention, out = plan.attention, np.zeros(plan.ranks, np.int64)
    if attention.latent is None:
        return out
    element = bytes_per_element if direction == "forward" else 2 * bytes_per_element + GRADIENT_BYTES
    for part in plan.parts_or_self:
        heads = part.q_layout_compute.head_counts(attention.heads)
        rows = getattr(part, direction).capacity.max(1, initial=0)
        out = np.maximum(out, rows * heads * (attention.head_dim + attention.head_dim_v) * element)
    return out
