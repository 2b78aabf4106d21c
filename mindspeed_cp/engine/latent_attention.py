"""context_parallel_latent_attention: multi-head latent attention, whatever the plan lets travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.engine.attention import check_types, context_parallel_attention
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.latent import checked_up_projection
from mindspeed_cp.plan import AttentionConfig, Plan


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
    check_types(q, shared, latent)
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is {plan!r}; valid: a Plan, from build_plan")
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
