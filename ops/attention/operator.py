"""Attention of packed sequences on one device: forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.backends import backend_for_device
from mindspeed_cp.ops.attention.contract import (
    AttentionBackend,
    BackwardState,
    DropoutKey,
    ForwardState,
    Heads,
    checked_dropout_key,
)
from mindspeed_cp.ops.attention.sink import add_sink, checked_sink
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import tiles_between


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | np.ndarray,
    cu_seqlens_kv: Tensor | np.ndarray,
    mask: str = "causal",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    alibi: object = False,
    dropout_p: float = 0.0,
    dropout_key: DropoutKey | None = None,
    backend: str | None = None,
) -> tuple[AttentionBackend, AttentionConfig, np.ndarray, DropoutKey | None]:
    """Check the arguments of both directions. Returns the backend, the configuration of the layer, the tiles (records
    of dtype TILE, step and slot 0), and (seed, layer), or None without dropout.

    Raises:
        ConfigError: arguments do not fit.
    """
    _check_tensors(q, k, v)
    attention = AttentionConfig(
        q.shape[1], k.shape[1], q.shape[2], v.shape[2],
        mask=mask, scale=scale, window=window, alibi=alibi, dropout=dropout_p,  # type: ignore[arg-type]  # checked there
    )  # fmt: skip
    if attention.dropout > 0 and dropout_key is None:
        raise ConfigError(f"dropout_p is {dropout_p}, dropout_key is None; valid: (seed, layer), or dropout_p=0.0")
    key = checked_dropout_key(dropout_key) if attention.dropout > 0 else None
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if not np.issubdtype(np.asarray(x).dtype, np.integer):
            raise ConfigError(f"{name} is of {np.asarray(x).dtype}; valid: whole numbers")
    cu_q, cu_k = (np.asarray(x, np.int64) for x in (cu_seqlens_q, cu_seqlens_kv))
    _check_lengths(cu_q, cu_k, len(q), len(k), mask)
    runner = backend_for_device(q.device.type, backend)
    runner.check(attention, q.dtype)
    runner.check_device(q.device)
    return runner, attention, _tiles(np.diff(cu_q), np.diff(cu_k), attention), key


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ConfigError(f"{name} has shape {tuple(x.shape)}; valid: [rows, heads, dim]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; they must agree")
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise ConfigError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")


def _check_lengths(cu_q: np.ndarray, cu_k: np.ndarray, rows_q: int, rows_k: int, mask: str) -> None:
    for name, cu, rows in (("cu_seqlens_q", cu_q, rows_q), ("cu_seqlens_kv", cu_k, rows_k)):
        alike = cu.ndim == 1 and cu.shape == cu_q.shape and len(cu) > 0
        if not alike or cu[0] != 0 or cu[-1] != rows or (np.diff(cu) < 0).any():
            raise ConfigError(f"{name} must rise from 0 to {rows}, one entry more than sequences, alike for q and kv")
    n_q, n_k = np.diff(cu_q), np.diff(cu_k)
    short = np.flatnonzero((n_k < n_q) & (n_k > 0))
    if mask == "causal" and len(short):
        i = short[0]
        raise ConfigError(
            f"sequence {i} has {n_q[i]} queries and {n_k[i]} keys; a causal mask needs as many keys, or none, or "
            "use mask='full'"
        )


def _tiles(n_q: np.ndarray, n_k: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Return the tiles of every sequence that has queries and keys."""
    keys = Documents(n_k)
    k_spans = _spans(keys.offsets[:-1], n_k)
    if attention.mask == "full":
        queries = Documents(n_q)
        return tiles_between(_spans(queries.offsets[:-1], n_q), k_spans, queries, attention, keys)
    n = np.where(n_k > 0, n_q, 0)  # queries are aligned with the last n keys of a sequence
    tiles = tiles_between(_spans(keys.offsets[1:] - n, n), k_spans, keys, attention)
    rows_without_keys = np.cumsum(n_q - n)  # rows without keys, up to and including each sequence
    tiles["q_row"] += rows_without_keys[tiles["doc"]]
    return tiles


def _spans(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    out = np.zeros(len(count), TOKEN_SPAN)
    out["doc"], out["start"], out["stop"] = np.arange(len(count)), start, start + count
    return out[count > 0]


Slopes = Sequence[float] | np.ndarray | Tensor


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
    window: tuple[int, int] | None = None,
    alibi: bool | Slopes = False,
    dropout_p: float = 0.0,
    dropout_key: DropoutKey | None = None,
    backend: str | None = None,
    saved: dict[Any, Any] | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of packed sequences; sequence i of q attends to sequence i of k and v. Not differentiable: use
    :func:`attention_backward` for gradients, or :func:`mindspeed_cp.context_parallel_attention` under autograd.

    Positions count within a sequence: 0, 1, ... for keys and, with mask "full", for queries. With mask "causal" queries
    are aligned bottom right: the last query has the position of the last key.

    Args:
        q: [tq, heads, head_dim].
        k: [tk, kv heads, head_dim]; kv heads divide heads, and query head h reads kv head h // (heads / kv heads).
        v: [tk, kv heads, head_dim_v].
        cu_seqlens_q, cu_seqlens_kv: cumulative lengths from 0, int [sequences + 1].
        mask: "full", or "causal": a query sees keys up to its own position. A sequence then needs at least as many keys
            as queries, or none.
        scale: factor of q.k; default head_dim ** -0.5.
        window: (left, right): a query at position p sees positions p - left .. p + right only; -1 is no limit on that
            side. With mask "causal", right is 0 or -1.
        alibi: linear biases (Press et al. 2022): -slope * |query position - key position| is added to the scaled
            scores. True: the paper's slopes for these heads; else one slope for each head.
        dropout_p: probability of dropping an attention weight, below 1; the others are divided by 1 - dropout_p.
        dropout_key: (seed, layer), integers; with head, sequence and both positions they determine the dropped weights
            (:func:`mindspeed_cp.ops.dropout.keep_mask`). Required if dropout_p > 0, ignored otherwise.
        backend: name; default: by the device of q.
        saved: an empty dict that the forward fills for :func:`attention_backward` with states of the random numbers.
            Required on NPUs and GPUs with dropout.
        sink: fp32 [heads], one more score for each row, whose key has the value 0. The backward takes out and lse as
            they are returned, with the sink; :func:`mindspeed_cp.ops.attention.sink_gradient` returns its gradient.

    Returns:
        out [tq, heads, head_dim_v] of q's type and lse = log(sum(exp(scores))) fp32 [tq, heads], without dropout. Rows
        without a visible key are 0 and -inf, or the sink.

    Raises:
        ConfigError: shapes, lengths, types or settings do not fit, or the backend does not support them.
    """
    runner, config, tiles, key = _checked(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, mask, scale, window, alibi, dropout_p, dropout_key, backend
    )
    calls = runner.lower("forward", tiles, len(q), config, q.dtype).get((0, 0), ())
    q, k, v = (_last_dim_contiguous(x) for x in (q, k, v))
    output = OutputAccumulator(q, v.shape[-1])
    state = ForwardState(q, output, Heads.all(config), key, {} if saved is None else saved)
    runner.forward(calls, config, state, k, v)
    if sink is not None:
        add_sink(*output.fp32(), checked_sink(sink, q.shape[1], q.device))
    return output.result(q.dtype)


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
    saved: dict[Any, Any] | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`attention` from the GLOBAL out and lse; k and v may be a part of all keys.

    Args:
        dout: gradient of out, [tq, heads, head_dim_v].
        out, lse: results of the complete attention over all keys.
        q, k, v, cu_seqlens_q, cu_seqlens_kv: as for :func:`attention`.
        saved: the dict that the forward filled.
        **settings: mask, scale, window, alibi, dropout_p, dropout_key and backend, as of the forward; the same key
            drops the same weights.

    Returns:
        dq, dk and dv in fp32, of the shapes of q, k and v; dq is the contribution of these keys.

    Raises:
        ConfigError: as for :func:`attention`, or dout, out or lse do not fit q and v.
    """
    runner, config, tiles, key = _checked(q, k, v, cu_seqlens_q, cu_seqlens_kv, **settings)
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
    q, k, v, out, dout = (_last_dim_contiguous(x) for x in (q, k, v, out, dout))
    dq, dk, dv = (GradientAccumulator(x) for x in (q, k, v))
    calls = runner.lower("backward", tiles, len(q), config, q.dtype).get((0, 0), ())
    state = BackwardState(q, out, lse, dout, dq, Heads.all(config), key, saved or {})
    runner.backward(calls, config, state, k, v, dk, dv)
    return dq.fp32(), dk.fp32(), dv.fp32()


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, which kernels assume."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
