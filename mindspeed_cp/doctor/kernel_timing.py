"""Seconds of attention and of matrix products on this machine, over sizes.

Attention is that of the engine's backend, called as by the engine: tiles are lowered once, and only the kernels are
timed. Every round times all sizes, so that a slow period of the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mindspeed_cp.cluster import KernelTime
from mindspeed_cp.cluster.calibration import Measurement
from mindspeed_cp.cluster.compute import ATTENTION_BACKWARD
from mindspeed_cp.doctor.machine import synchronize
from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.backends import get_backend
from mindspeed_cp.ops.attention.contract import AttentionBackend, BackwardState, ForwardState, Heads
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import count_pairs, tiles_between

BLOCK_SECONDS = 0.01  # duration of the repeated calls of one size in a round
MIN_ROUNDS = 3

#: (queries, keys) of the sequences for which the kernels of a GPU are compared: those of a ring's and of all_gather's
#: steps on packed rows, and whole documents.
KERNEL_SIZES = ((56, 84), (56, 450), (225, 340), (450, 450), (900, 900), (2048, 2048), (8192, 8192), (65536, 65536))


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
    """A call to time, the measurement that its least time completes, how often it is made in a round, and its
    forward alone, if it has one."""

    measurement: Measurement
    run: Callable[[], object]
    calls: int = 1
    seconds: float = float("inf")
    forward: Callable[[], object] | None = None


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
    _time(cases, device, sizes.seconds)
    return [replace(case.measurement, seconds=case.seconds) for case in cases]


def _time(cases: Sequence[TimedCall], device: torch.device, seconds: float = 0.0) -> None:
    """Time the cases, one after the other in every round, for so long."""
    for case in cases:  # the first call allocates and compiles; the second is timed to choose the number of calls
        case.run()
        case.calls = max(1, int(BLOCK_SECONDS / max(_timed(case, device), 1e-7)))
    end, rounds = time.monotonic() + seconds, 0
    while rounds < MIN_ROUNDS or time.monotonic() < end:
        for case in cases:
            case.seconds = min(case.seconds, _timed(case, device))
        rounds += 1


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


def measure_kernel_times(device: torch.device, sizes: KernelSizes) -> list[KernelTime]:
    """Time each kernel of the cuda backend that supports the attention, over sizes of many sequences.

    Returns:
        Seconds per visible pair of the queries' heads; those of the forward are measured, and the backward is the rest.
    """
    times = []
    kernels = CudaAttention().kernels_for(sizes.attention, sizes.dtype)
    for rows, keys, kernel in ((*size, kernel) for size in KERNEL_SIZES for kernel in kernels):
        if max(rows, keys) > sizes.longest:
            continue
        mask, sequences = "causal" if rows == keys else "full", max(1, sizes.longest // keys)
        case = attention_call(device, sizes, rows, keys, mask, sequences, CudaAttention(kernel))
        assert case.forward is not None
        forward = TimedCall(case.measurement, case.forward)
        _time((case, forward), device)
        per_pair = 4.0 * sizes.attention.head_dim * (1.0 + ATTENTION_BACKWARD) / case.measurement.flops
        backward = max(case.seconds - forward.seconds, 0.1 * case.seconds)
        seconds = {"forward": forward.seconds * per_pair, "backward": backward * per_pair}
        times.append(KernelTime(kernel=kernel, rows=rows, keys=keys, **seconds))  # type: ignore[arg-type]  # a name
    return times


def attention_call(
    device: torch.device, sizes: KernelSizes, queries: int, keys: int, mask: str, sequences: int = 1,
    backend: AttentionBackend | None = None,
) -> TimedCall:  # fmt: skip
    """Return the forward and backward of tiles as one call, since cluster models cover both together.

    Args:
        queries, keys: rows of a tile.
        sequences: number of tiles.
        backend: None: that of the device.
    """
    config = replace(sizes.attention, mask=mask)
    runner: Any = backend or get_backend(device.type)
    runner.check(config, sizes.dtype)
    documents, key_documents = Documents([queries] * sequences), Documents([keys] * sequences)
    spans = _spans(queries, sequences), _spans(keys, sequences)
    tiles = tiles_between(*spans, documents, config, *([] if queries == keys else [key_documents]))
    pairs = int(count_pairs(tiles, config).sum())
    heads, kv, dim = config.heads, config.kv_heads, config.head_dim

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float32).to(sizes.dtype).to(device)

    rows, key_rows = queries * sequences, keys * sequences
    q, dout = random(rows, heads, dim), random(rows, heads, dim)
    k, v = random(key_rows, kv, dim), random(key_rows, kv, dim)
    forward, backward = (runner.lower(x, tiles, rows, config, sizes.dtype)[0, 0] for x in ("forward", "backward"))
    flops = 4.0 * pairs * heads * dim * (1.0 + ATTENTION_BACKWARD)

    def run_forward() -> ForwardState:
        state = ForwardState(q, OutputAccumulator(q, dim), Heads.all(config))
        runner.forward(forward, config, state, k, v)
        return state

    def run() -> None:
        state = run_forward()
        dq, dk, dv = (GradientAccumulator(x) for x in (q, k, v))
        back = BackwardState(q, *state.output.result(sizes.dtype), dout, dq, state.heads, saved=state.saved)
        runner.backward(backward, config, back, k, v, dk, dv)

    measurement = Measurement("attention", 1.0, flops=flops, short_side=float(min(queries, keys)), calls=2.0)
    return TimedCall(measurement, run, forward=run_forward)


def _spans(rows: int, sequences: int) -> np.ndarray:
    """Return the tokens of each sequence."""
    spans = np.zeros(sequences, TOKEN_SPAN)
    spans["doc"] = np.arange(sequences)
    spans["start"] = spans["doc"] * rows
    spans["stop"] = spans["start"] + rows
    return spans


def _linear(device: torch.device, sizes: KernelSizes, tokens: int) -> TimedCall:
    hidden = sizes.hidden_size
    x = torch.randn(tokens, hidden).to(sizes.dtype).to(device)
    weight = torch.randn(hidden, hidden).to(sizes.dtype).to(device)
    out = torch.empty(tokens, hidden, dtype=sizes.dtype, device=device)

    def run() -> None:
        torch.mm(x, weight, out=out)

    return TimedCall(Measurement("linear", 1.0, flops=2.0 * tokens * hidden * hidden), run)
