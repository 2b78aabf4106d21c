"""Checks of the arguments of the attention operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.ops.attention.contract import DropoutKey, checked_dropout_key
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import tiles_between


@dataclass(frozen=True)
class CheckedArguments:
    """Checked arguments of :func:`mindspeed_cp.ops.attention.attention`.

    Attributes:
        attention: configuration of the layer.
        tiles: records of dtype TILE, step and slot 0.
        dropout_key: (seed, layer); None: no dropout.
    """

    attention: AttentionConfig
    tiles: np.ndarray
    dropout_key: DropoutKey | None

    @staticmethod
    def check(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | np.ndarray,
        cu_seqlens_kv: Tensor | np.ndarray,
        mask: str,
        scale: float | None,
        window: tuple[int, int] | None,
        alibi: object,
        dropout_p: float,
        dropout_key: DropoutKey | None,
    ) -> CheckedArguments:
        """Check the arguments and derive the tiles.

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
        tiles = _tiles(np.diff(cu_q), np.diff(cu_k), attention)
        return CheckedArguments(attention, tiles, key)


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
