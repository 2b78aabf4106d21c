"""Choice of the kernel that computes a rank's tiles in the least time, from measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.cluster import KernelTime
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import count_pairs


def _of_one_h200(
    rows: int, keys: int, tiles: tuple[float, float], flash4: float | tuple[float, float]
) -> list[KernelTime]:
    """Return times relative to FlashAttention 2, forward and backward."""
    times = {"flash": (1.0, 1.0), "tiles": tiles, "flash4": flash4 if isinstance(flash4, tuple) else (flash4, flash4)}
    return [
        KernelTime(kernel=kernel, rows=rows, keys=keys, forward=forward, backward=backward)  # type: ignore[arg-type]  # a name
        for kernel, (forward, backward) in times.items()
    ]


#: One NVIDIA H200, bf16, heads of 128 channels: times of the engine's calls, with copies and merges, relative to those
#: with FlashAttention 2. The first five: plans of 8 ranks for a row of 73 documents (64K tokens), by the mean tile:
#: ring, all_gather, hybrid, hierarchical, ulysses; only the sum of both directions was measured. The last two:
#: 8 x 8K and one document of 64K. `mindspeed-cp calibrate --device cuda` measures those of another device.
H200_TIMES = (
    *_of_one_h200(56, 84, (0.64, 0.64), 0.90),
    *_of_one_h200(56, 450, (0.53, 0.53), 0.46),
    *_of_one_h200(225, 340, (0.76, 0.76), 0.63),
    *_of_one_h200(450, 450, (0.90, 0.90), 0.53),
    *_of_one_h200(900, 900, (0.76, 0.76), 0.54),
    *_of_one_h200(8192, 8192, (1.27, 1.03), (0.50, 0.47)),
    *_of_one_h200(65536, 65536, (1.09, 0.94), (0.44, 0.45)),
)


def fastest_kernel(
    tiles: np.ndarray, attention: AttentionConfig, direction: str, kernels: Sequence[str], times: Sequence[KernelTime]
) -> str:
    """Return the kernel that takes the least time for a rank's tiles of one direction.

    The time of a tile is its visible pairs times the time per pair of the measured size that is nearest to it: by the
    ratio of rows times the ratio of keys. Sizes at which not all kernels were measured are left out.

    Args:
        tiles: records of dtype TILE.
        attention: configuration of the layer.
        direction: "forward" or "backward".
        kernels: kernels that support the attention, the first of which is returned without tiles, or without a size at
            which all were measured.
        times: measured times.
    """
    measured: dict[tuple[float, float], dict[str, float]] = {}
    for time in times:
        measured.setdefault((time.rows, time.keys), {})[time.kernel] = getattr(time, direction)
    sizes = [size for size, of_kernels in measured.items() if all(kernel in of_kernels for kernel in kernels)]
    if len(kernels) == 1 or not len(tiles) or not sizes:
        return kernels[0]
    rows = np.log([tiles["q_rows"], tiles["k_rows"]])  # [2, tiles]
    distance = np.abs(rows[:, :, None] - np.log(sizes).T[:, None, :]).sum(0)  # [tiles, sizes]
    pairs = np.bincount(distance.argmin(1), weights=count_pairs(tiles, attention), minlength=len(sizes))
    seconds = [pairs @ np.array([measured[size][kernel] for size in sizes]) for kernel in kernels]
    return kernels[int(np.argmin(seconds))]
