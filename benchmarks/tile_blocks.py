"""Times the tile kernels with every choice of blocks, warps and stages on a GPU.

    python -m benchmarks.tile_blocks [--dims 64 128 256 512] [--dtypes bf16 fp32] [--alibi] [--tokens 8192] [--heads 16]
                                     [--processes 8] [--repeat 4] [--show 4] [--json FILE]

Each kernel (forward, dq, dkdv) alone, one causal document, as many kv heads as heads. A choice is (rows of a program's
own block, rows of a block that it visits, warps, stages). All are compiled first, by --processes processes, which fill
Triton's cache; what a GPU has no shared memory for is left out. Printed are the time of the choice that the package
makes and those of the fastest. Memory is random: the times depend on no value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from benchmarks.arguments import Arguments
from benchmarks.timing import machine_name
from mindspeed_cp.ascend_kernels import tile_attention
from mindspeed_cp.ascend_kernels.tile_schedule import BLOCK_BYTES, TileSchedule, block_rows, launch_options
from mindspeed_cp.layout import TOKEN_SPAN, Documents
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import tiles_between

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("forward", "dq", "dkdv")
ROWS, WARPS, STAGES = (16, 32, 64, 128), (4, 8), (2, 3)
#: Compiled for this many tokens; the code is the same for all.
COMPILED_TOKENS = 256


@dataclass(frozen=True)
class Choice:
    """A kernel with its blocks.

    Attributes:
        kernel: one of KERNELS.
        dtype: one of DTYPES.
        dim: channels of a head.
        alibi: True: with ALiBi.
        blocks: rows of the own block and of a visited one.
        options: warps and stages.
    """

    kernel: str
    dtype: str
    dim: int
    alibi: bool
    blocks: tuple[int, int]
    options: tuple[int, int]

    @property
    def is_default(self) -> bool:
        """True for the choice of the package."""
        dtype = DTYPES[self.dtype]
        return self.blocks == block_rows(self.kernel, dtype, self.dim) and self.options == launch_options(
            self.kernel, dtype, self.dim
        )


def choices(dtypes: list[str], dims: list[int], alibi: bool) -> Iterator[Choice]:
    """Yield all choices whose blocks are not beyond twice what the package takes for wide heads."""
    for dtype, dim, kernel in itertools.product(dtypes, dims, KERNELS):
        most = max(16, 2 * BLOCK_BYTES // (dim * DTYPES[dtype].itemsize))
        for own, visited in itertools.product([rows for rows in ROWS if rows <= most], repeat=2):
            for options in itertools.product(WARPS, STAGES):
                yield Choice(kernel, dtype, dim, alibi, (own, visited), options)


class Work:
    """Tensors of one causal document, and launches on them."""

    def __init__(self, dtype: str, dim: int, alibi: bool, tokens: int, heads: int) -> None:
        self.attention = AttentionConfig(heads, heads, dim, alibi=alibi)
        span = np.zeros(1, TOKEN_SPAN)
        span["stop"] = tokens
        self.tiles = tiles_between(span, span, Documents([tokens]), self.attention)
        generator = torch.Generator("cuda").manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(tokens, heads, dim, device="cuda", generator=generator).to(DTYPES[dtype]) for _ in range(4)
        )
        self.sums = [torch.zeros(tokens, heads, dim, device="cuda") for _ in range(2)]
        self.lse = torch.full((tokens, heads), 8.0, device="cuda")
        self.delta = torch.zeros_like(self.lse)
        slopes = self.attention.slopes
        self.slopes = None if slopes is None else torch.from_numpy(slopes.astype(np.float32)).cuda()

    def launch(self, choice: Choice) -> Callable[[], None]:
        """Return a launch of a choice."""
        side = "k" if choice.kernel == "dkdv" else "q"
        schedule = TileSchedule.of(self.tiles, self.attention, choice.blocks[0], side, "cuda")
        outputs = {
            "forward": (self.sums[0], self.lse.clone()),
            "dq": (self.dout, self.lse, self.delta, self.sums[0]),
            "dkdv": (self.dout, self.lse, self.delta, *self.sums),
        }

        def run() -> None:
            tile_attention._launch(
                f"{choice.kernel}_kernel", schedule, self.q, self.k, self.v, outputs[choice.kernel],
                self.attention.softmax_scale, self.slopes, len(self.q), choice.blocks, choice.options,
            )  # fmt: skip

        return run


def compile_choice(choice: Choice) -> str:
    """Compile a choice by a small launch; return the reason if the GPU cannot run it, else ""."""
    try:
        Work(choice.dtype, choice.dim, choice.alibi, COMPILED_TOKENS, 1 if choice.dim > 128 else 2).launch(choice)()
        torch.cuda.synchronize()
    except Exception as error:
        if "OutOfResources" not in type(error).__name__:
            raise
        return str(error)
    return ""


def milliseconds(run: Callable[[], None], repeat: int) -> float:
    """Return the median time of a launch on the GPU, after one that warms up."""
    times = []
    for _ in range(repeat + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def main() -> None:
    """Print the tables."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--alibi", action="store_true")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--show", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all times there")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device; the kernels are timed on a GPU alone")
    print(f"{machine_name(torch.device('cuda'))}: {given.tokens} tokens, {given.heads} heads")
    todo = list(choices(given.dtypes, given.dims, given.alibi))
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        fits = [choice for choice, reason in zip(todo, pool.map(compile_choice, todo), strict=True) if not reason]
    rows = []
    for (dtype, dim), group in itertools.groupby(fits, lambda choice: (choice.dtype, choice.dim)):
        work, times = Work(dtype, dim, given.alibi, given.tokens, given.heads), {}
        for choice in group:
            times[choice] = milliseconds(work.launch(choice), given.repeat)
        rows += [asdict(choice) | {"ms": ms} for choice, ms in times.items()]
        for kernel in KERNELS:
            fastest = sorted(((ms, x) for x, ms in times.items() if x.kernel == kernel), key=lambda pair: pair[0])
            default = [f"{ms:.2f}" for ms, choice in fastest if choice.is_default]
            shown = ", ".join(f"{x.blocks + x.options} {ms:.2f}" for ms, x in fastest[: given.show])
            print(f"{dtype} {dim:4} {kernel:8} ms: default {default[0] if default else 'not run'}; {shown}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine_name(torch.device("cuda")), "rows": rows}))


if __name__ == "__main__":
    main()
