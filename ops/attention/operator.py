"""attention and attention_backward on one device, for packed sequences given by cumulative lengths."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.backends import backend_for
from mindspeed_cp.ops.attention.contract import BackwardState, ForwardState
from mindspeed_cp.plan import CAUSAL, FULL, TILE, AttentionConfig


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | np.ndarray,
    cu_seqlens_kv: Tensor | np.ndarray,
    *,
    mask: str = "causal",
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences; sequence i of q meets sequence i of k and v. Not differentiable: its gradient is
    :func:`attention_backward`, and :func:`mindspeed_cp.context_parallel_attention` is the function for autograd.

    Args:
        q: [tq, heads, head_dim].
        k: [tk, kv heads, head_dim].
        v: [tk, kv heads, head_dim_v].
        cu_seqlens_q, cu_seqlens_kv: cumulative lengths from 0, int [sequences + 1].
        mask: "full", or "causal" aligned bottom right: the last query of a sequence sees its last key. A sequence then
            needs at least as many keys as queries, or none.
        scale: factor of q.k; default head_dim ** -0.5.
        backend: name; default: by the device of q.

    Returns:
        out [tq, heads, head_dim_v] of q's type and lse fp32 [tq, heads]; rows that see no key are 0 and -inf.

    Raises:
        ConfigError: shapes, lengths or types do not fit, or the backend does not support them.
    """
    config, tiles = _problem(q, k, v, cu_seqlens_q, cu_seqlens_kv, mask, scale)
    runner = backend_for(q.device.type, backend)
    runner.check(config, q.dtype)
    out = q.new_zeros(len(q), q.shape[1], v.shape[-1], dtype=torch.float32)
    lse = q.new_full((len(q), q.shape[1]), float("-inf"), dtype=torch.float32)
    calls = runner.lower_forward(tiles, len(q), config).get((0, 0), ())
    q, k, v = (_dense(x) for x in (q, k, v))
    runner.forward(calls, config, ForwardState(q, out, lse), k, v)
    return out.to(q.dtype), lse


@torch.no_grad()
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | np.ndarray,
    cu_seqlens_kv: Tensor | np.ndarray,
    *,
    mask: str = "causal",
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention`, from the GLOBAL out and lse: k and v may be a part of all keys.

    Args:
        dout: gradient of out, [tq, heads, head_dim_v].
        out, lse: of the complete attention over all keys.
        q, k, v, cu_seqlens_q, cu_seqlens_kv, mask, scale, backend: as for :func:`attention`.

    Returns:
        dq, dk and dv in fp32, of the shapes of q, k and v; dq is this part's share.

    Raises:
        ConfigError: as for :func:`attention`, or dout, out or lse do not fit q and v.
    """
    config, tiles = _problem(q, k, v, cu_seqlens_q, cu_seqlens_kv, mask, scale)
    runner = backend_for(q.device.type, backend)
    runner.check(config, q.dtype)
    rows = len(q), q.shape[1]
    for name, x, shape, dtype in (
        ("dout", dout, (*rows, v.shape[2]), q.dtype),
        ("out", out, (*rows, v.shape[2]), q.dtype),
        ("lse", lse, rows, torch.float32),
    ):
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != q.device:
            raise ConfigError(
                f"{name} is {x.dtype} {list(x.shape)} on {x.device}; valid: {dtype} {list(shape)} on {q.device}"
            )
    q, k, v, out, dout = (_dense(x) for x in (q, k, v, out, dout))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    calls = runner.lower_backward(tiles, len(q), config).get((0, 0), ())
    runner.backward(calls, config, BackwardState(q, out, lse, dout, dq), k, v, dk, dv)
    return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """Kernels read the last dimension as contiguous, whatever its stride says."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | np.ndarray,
    cu_seqlens_kv: Tensor | np.ndarray,
    mask: str,
    scale: float | None,
) -> tuple[AttentionConfig, np.ndarray]:
    """The configuration, and one tile for every sequence that has queries and keys."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ConfigError(f"{name} has shape {tuple(x.shape)}; valid: [rows, heads, dim]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must agree")
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise ConfigError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")
    config = AttentionConfig(q.shape[1], k.shape[1], q.shape[2], v.shape[2], mask=mask, scale=scale)
    cu_q, cu_k = (np.asarray(x, np.int64) for x in (cu_seqlens_q, cu_seqlens_kv))
    for name, cu, rows in (("cu_seqlens_q", cu_q, len(q)), ("cu_seqlens_kv", cu_k, len(k))):
        if (
            cu.ndim != 1
            or len(cu) != len(cu_q)
            or not len(cu)
            or cu[0] != 0
            or cu[-1] != rows
            or (np.diff(cu) < 0).any()
        ):
            raise ConfigError(f"{name} must rise from 0 to {rows}, one entry more than sequences, alike for q and kv")
    n_q, n_k = np.diff(cu_q), np.diff(cu_k)
    short = np.flatnonzero((n_k < n_q) & (n_k > 0)) if mask == "causal" else np.zeros(0, int)
    if len(short):
        i = short[0]
        raise ConfigError(
            f"sequence {i} has {n_q[i]} queries and {n_k[i]} keys; a causal mask needs as many keys, or none, or "
            "use mask='full'"
        )
    keep = (n_q > 0) & (n_k > 0)
    tiles = np.zeros(int(keep.sum()), TILE)
    for name, column in (("q_row", cu_q[:-1]), ("q_rows", n_q), ("k_row", cu_k[:-1]), ("k_rows", n_k)):
        tiles[name] = column[keep]
    tiles["mask"] = CAUSAL if mask == "causal" else FULL
    return config, tiles
