"""Seconds of this machine's attention and matrix products, over sizes.

Attention is the backend that the engine uses, called as the engine calls it: tiles are lowered once, and only the
kernels are timed.  All sizes have their turn in every round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mindspeed_cp.cost.compute import ATTENTION_BACKWARD
from mindspeed_cp.cost.measurements import Measurement
from mindspeed_cp.layout import SPAN, Documents
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads, backend_named
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import pairs as pairs_of
from mindspeed_cp.plan.tiles import tiles_between

BLOCK = 0.01  # seconds that calls of one size are repeated for, within a round
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
        heads, kv_heads, head_dim: of the attention, on one rank.
        longest: rows of the largest tile.
        hidden_size: of the matrix products [tokens, hidden] x [hidden, hidden].
        dtype: of all of it.
        seconds: about as long it may take in all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    longest: int
    hidden_size: int
    dtype: torch.dtype
    seconds: float


@dataclass
class _Case:
    """One thing to time: what it counts for, and a call of it."""

    measurement: Measurement
    run: Callable[[], None]
    calls: int = 1


def measure_kernels(
    device: torch.device, shapes: Shapes, kinds: tuple[str, ...] = ("attention", "linear")
) -> list[Measurement]:
    """Time attention, forward and backward in one, and matrix products.

    Args:
        device: of this machine; "cpu" or "npu".
        shapes: what to time.
        kinds: "attention", "linear" or both.

    Returns:
        A measurement for each size, its seconds the least of the rounds: what else runs on a machine only adds.
    """
    cases: list[_Case] = []
    if "attention" in kinds:
        cases += [_attention(device, shapes, *rows) for rows in _tiles(shapes.longest)]
    if "linear" in kinds:
        cases += [_linear(device, shapes, tokens) for tokens in _tokens(shapes.longest)]
    for case in cases:  # the first call makes what is made once, the second tells how many fill a block
        case.run()
        case.calls = max(1, int(BLOCK / max(_timed(case, device), 1e-7)))
    return _rounds(cases, device, shapes.seconds)


def _rounds(cases: list[_Case], device: torch.device, seconds: float) -> list[Measurement]:
    taken: list[list[float]] = [[] for _ in cases]
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < LEAST_ROUNDS or time.monotonic() < end:
        for case, times in zip(cases, taken, strict=True):
            times.append(_timed(case, device))
        rounds += 1
    return [
        Measurement(**{**vars(case.measurement), "seconds": min(times)})
        for case, times in zip(cases, taken, strict=True)
    ]


def _timed(case: _Case, device: torch.device) -> float:
    """Seconds of one call; the device is waited for before and after all of them."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(case.calls):
        case.run()
    _wait(device)
    return (time.perf_counter() - start) / case.calls


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def _tiles(longest: int) -> list[tuple[int, int, str]]:
    """(queries, keys, mask): causal squares, and rectangles that are short on one side."""
    squares = [(n, n, "causal") for n in _powers(32, longest)]
    shorts = [n for n in _powers(64, longest // 2) if n < longest][::2]
    wide = [(n, longest, "full") for n in shorts]
    return squares + wide + [(keys, queries, mask) for queries, keys, mask in wide]


def _tokens(longest: int) -> list[int]:
    return _powers(64, max(2048, longest))


def _powers(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


def _attention(device: torch.device, shapes: Shapes, queries: int, keys: int, mask: str) -> _Case:
    """Forward and backward of one tile, timed together: plans are made for the two."""
    config = AttentionConfig(shapes.heads, shapes.kv_heads, shapes.head_dim, mask=mask)
    runner: Any = backend_named(device.type)
    runner.check(config, shapes.dtype)
    documents, key_documents = Documents([queries]), Documents([keys])
    tiles = tiles_between(_span(queries), _span(keys), documents, config, *([] if queries == keys else [key_documents]))
    pairs = int(pairs_of(tiles, config).sum())
    heads, kv, dim = shapes.heads, shapes.kv_heads, shapes.head_dim

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float32).to(shapes.dtype).to(device)

    q, k, v, dout = (
        random(queries, heads, dim),
        random(keys, kv, dim),
        random(keys, kv, dim),
        random(queries, heads, dim),
    )
    out = torch.zeros(queries, heads, dim, device=device)
    lse = torch.full((queries, heads), float("-inf"), device=device)
    state = ForwardState(q, out, lse, Heads.all(config))
    forward = runner.lower_forward(tiles, queries, config, shapes.dtype)[0, 0]
    runner.forward(forward, config, state, k, v)
    dq, dk, dv = (torch.zeros(x.shape, device=device) for x in (q, k, v))
    back = BackwardState(q, out.to(shapes.dtype), lse.clone(), dout, dq, state.heads, kept=state.kept)
    backward = runner.lower_backward(tiles, queries, config, shapes.dtype)[0, 0]
    flops = 4.0 * pairs * heads * dim * (1.0 + ATTENTION_BACKWARD)

    def run() -> None:
        runner.forward(forward, config, state, k, v)
        runner.backward(backward, config, back, k, v, dk, dv)

    return _Case(Measurement("attention", 1.0, flops=flops, short_side=float(min(queries, keys)), calls=2.0), run)


def _span(rows: int) -> np.ndarray:
    span = np.zeros(1, SPAN)
    span["stop"] = rows
    return span


def _linear(device: torch.device, shapes: Shapes, tokens: int) -> _Case:
    hidden = shapes.hidden_size
    x = torch.randn(tokens, hidden).to(shapes.dtype).to(device)
    weight = torch.randn(hidden, hidden).to(shapes.dtype).to(device)
    out = torch.empty(tokens, hidden, dtype=shapes.dtype, device=device)

    def run() -> None:
        torch.mm(x, weight, out=out)

    return _Case(Measurement("linear", 1.0, flops=2.0 * tokens * hidden * hidden), run)
