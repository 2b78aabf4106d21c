"""The CPU backend's kernels, tile by tile: why small backward tiles are grouped, and up to which size.

    python -m benchmarks.kernels_cpu [--heads 8] [--dim 64] [--tiles 32] [--repeat 7]

Microseconds for one causal n x n tile, bf16, one thread, medians. "one call each" is the flash backward for every tile;
"grouped" is the cpu backend with all tiles small.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.timing import median_us
from mindspeed_cp.ops.attention import BackwardState, attention, backend_named
from mindspeed_cp.ops.attention.cpu_lowering import lower
from mindspeed_cp.plan import CAUSAL, TILE, AttentionConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tiles", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu, config = backend_named("cpu"), AttentionConfig(args.heads, args.heads, args.dim)
    print("   n  forward  backward, one call each  backward, grouped")
    for n in (8, 16, 32, 64, 128, 256):
        rows = n * args.tiles
        q, k, v, dout = (torch.randn(rows, args.heads, args.dim, dtype=torch.bfloat16) for _ in range(4))
        cu = np.arange(args.tiles + 1) * n
        out, lse = attention(q, k, v, cu, cu)
        tiles = np.zeros(args.tiles, TILE)
        tiles["q_row"] = tiles["k_row"] = cu[:-1]
        tiles["q_rows"] = tiles["k_rows"] = n
        tiles["mask"] = CAUSAL
        dq, dk, dv = (torch.zeros(rows, args.heads, args.dim) for _ in range(3))
        state = BackwardState(q, out, lse, dout, dq)
        each, grouped = (lower(tiles, rows, small)[0, 0] for small in (0, n))
        forward = median_us(lambda: attention(q, k, v, cu, cu), args.repeat)  # noqa: B023  # called at once
        alone = median_us(lambda: cpu.backward(each, config, state, k, v, dk, dv), args.repeat)  # noqa: B023
        together = median_us(lambda: cpu.backward(grouped, config, state, k, v, dk, dv), args.repeat)  # noqa: B023
        print(f"{n:4} {forward / args.tiles:8.0f} {alone / args.tiles:24.0f} {together / args.tiles:18.0f}", flush=True)


if __name__ == "__main__":
    main()
