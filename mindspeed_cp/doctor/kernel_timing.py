"""Seconds of attention and of matrix products on this machine, over sizes.

Attention is that of the engine's backend, called as by the engine: tiles are lowered once, and only the kernels are
timed. Every round times all sizes, so that a slow period of the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mindspeed_cp.cluster.calibration import Measurement
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD
from mindspeed_cp.doctor.machine import synchronize
from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.ops.attention import (
    BackwardState,
    ForwardState,
    GradientAccumulator,
    Heads,
    OutputAccumulator,
    get_backend,
)
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import count_pairs, tiles_between

BLOCK_SECONDS = 0.01  # duration of the repeated calls of one size in a round
MIN_ROUNDS = 3


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of the kernels.

    Attributes:
        attention: attention of one rank; its mask is that of each tile.
        longest: rows of the largest tile.
        hidden_size: hidden size of the matrix products [tokens, hidden] x [hidden, hidden].
        dtype: type of all tensors.
        seconds: approximate duration of all measurements.
    """

    attention: AttentionConfig
    longest: int
    hidden_size: int
    dtype: torch.dtype
    seconds: float


@dataclass
class TimedCall:
    """A call to time, the measurement that its least time completes, and how often it is made in a round."""

    measurement: Measurement
    run: Callable[[], None]
    calls: int = 1
    seconds: float = float("inf")


def measure_kernels(device: torch.device, sizes: KernelSizes) -> list[Measurement]:
    """Time attention, forward and backward together, and matrix products.

    Args:
        device: a device of this machine.
        sizes: sizes of the kernels.

    Returns:
        A measurement for each size, with the minimum over all rounds: other processes only add time.
    """
    cases = [attention_call(device, sizes, *rows) for rows in _tiles(sizes.longest)]
    cases += [_linear(device, sizes, tokens) for tokens in _powers(64, max(2048, sizes.longest))]
    for case in cases:  # the first call allocates and compiles; the second is timed to choose the number of calls
        case.run()
        case.calls = max(1, int(BLOCK_SECONDS / max(_timed(case, device), 1e-7)))
    end, rounds = time.monotonic() + sizes.seconds, 0
    while rounds < MIN_ROUNDS or time.monotonic() < end:
        for case in cases:
            case.seconds = min(case.seconds, _timed(case, device))
        rounds += 1
    return [replace(case.measurement, seconds=case.seconds) for case in cases]


def _timed(case: TimedCall, device: torch.device) -> float:
    """Return the seconds of one call, with the device synchronized before and after all calls."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(case.calls):
        case.run()
    synchronize(device)
    return (time.perf_counter() - start) / case.calls


def _tiles(longest: int) -> list[tuple[int, int, str]]:
    """Return (queries, keys, mask) of causal squares, and of full rectangles that are short on one side."""
    squares = [(n, n, "causal") for n in _powers(32, longest)]
    wide = [(n, longest, "full") for n in _powers(64, longest // 2)[::2]]
    return squares + wide + [(keys, queries, mask) for queries, keys, mask in wide]


def _powers(first: int, last: int) -> list[int]:
    """Return first, 2 * first, 4 * first .. up to last; at least first."""
    return [first << power for power in range(64) if not power or first << power <= last]


def attention_call(device: torch.device, sizes: KernelSizes, queries: int, keys: int, mask: str) -> TimedCall:
    """Return the forward and backward of one tile as one call, since cluster models cover both together."""
    config = replace(sizes.attention, mask=mask)
    runner: Any = get_backend(device.type)
    runner.check(config, sizes.dtype)
    documents, key_documents = Documents([queries]), Documents([keys])
    tiles = tiles_between(_span(queries), _span(keys), documents, config, *([] if queries == keys else [key_documents]))
    pairs = int(count_pairs(tiles, config).sum())
    heads, kv, dim = config.heads, config.kv_heads, config.head_dim

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float32).to(sizes.dtype).to(device)

    q, dout = random(queries, heads, dim), random(queries, heads, dim)
    k, v = random(keys, kv, dim), random(keys, kv, dim)
    forward = runner.lower_forward(tiles, queries, config, sizes.dtype)[0, 0]
    backward = runner.lower_backward(tiles, queries, config, sizes.dtype)[0, 0]
    flops = 4.0 * pairs * heads * dim * (1.0 + ATTENTION_BACKWARD)

    def run() -> None:
        state = ForwardState(q, OutputAccumulator(q, dim), Heads.all(config))
        runner.forward(forward, config, state, k, v)
        dq, dk, dv = (GradientAccumulator(x) for x in (q, k, v))
        back = BackwardState(q, *state.output.result(sizes.dtype), dout, dq, state.heads, saved=state.saved)
        runner.backward(backward, config, back, k, v, dk, dv)

    return TimedCall(Measurement("attention", 1.0, flops=flops, short_side=float(min(queries, keys)), calls=2.0), run)


def _span(rows: int) -> np.ndarray:
    span = np.zeros(1, TOKEN_SPAN)
    span["stop"] = rows
    return span


def _linear(device: torch.device, sizes: KernelSizes, tokens: int) -> TimedCall:
    hidden = sizes.hidden_size
    x = torch.randn(tokens, hidden).to(sizes.dtype).to(device)
    weight = torch.randn(hidden, hidden).to(sizes.dtype).to(device)
    out = torch.empty(tokens, hidden, dtype=sizes.dtype, device=device)

    def run() -> None:
        torch.mm(x, weight, out=out)

    return TimedCall(Measurement("linear", 1.0, flops=2.0 * tokens * hidden * hidden), run)
