"""The CPU backend's kernels: what masks and biases cost, how tiles are cut, and which calls are computed in fp32.

    python -m benchmarks.kernels_cpu [--heads 8] [--dim 64] [--tokens 4096] [--repeat 5] [--cuts]

One document in bf16, one thread; medians of rounds in which every line has its turn, so that a machine that slows down
slows all of them.

Masks: milliseconds forward and backward, and the time of a visible (query, key) pair as a ratio to a plain causal one:
1.00 is a mask that costs nothing. With --cuts, windows and ALiBi under every cut that is tried
(mindspeed_cp/ops/attention/cpu_costs.py has the measured figures by which one is chosen).

Small tiles: microseconds for the backward of one causal n x n tile, in bf16 and in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mindspeed_cp.layout import SPAN, Documents
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads, backend_named
from mindspeed_cp.ops.attention.cpu_costs import SQUARES, STRIPS, Costs
from mindspeed_cp.ops.attention.cpu_lowering import Call, lower
from mindspeed_cp.ops.attention.regions import Region
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import pairs, tiles_between


@dataclass(frozen=True)
class GivenCut(Costs):
    """Costs by which a given cut is chosen."""

    given: tuple[bool, int] = False, 0

    def cut(self, region: Region, square_rows: int) -> tuple[bool, int]:
        squares, rows = self.given
        return squares, min(rows, square_rows, region.width - 1) if squares else min(rows, region.rows)


class Work:
    """Forward and backward of one attention over documents of the same length."""

    def __init__(
        self, attention: AttentionConfig, length: int, count: int = 1, cut: tuple[bool, int] | None = None
    ) -> None:
        rows = length * count
        documents = Documents([length] * count)
        spans = np.zeros(count, SPAN)
        spans["doc"], spans["start"], spans["stop"] = np.arange(count), documents.offsets[:-1], documents.offsets[1:]
        tiles = tiles_between(spans, spans, documents, attention)
        self.attention, self.pairs = attention, int(pairs(tiles, attention).sum())
        self.calls: dict[str, Sequence[Call]] = {}
        for direction in ("forward", "backward"):
            costs = Costs.of(direction, attention, torch.bfloat16)
            costs = costs if cut is None else GivenCut(direction, costs.half, costs.work, cut)
            (self.calls[direction],) = lower(tiles, rows, attention, costs).values()
        heads, dim = attention.heads, attention.head_dim
        q, self.k, self.v, dout = (torch.randn(rows, heads, dim, dtype=torch.bfloat16) for _ in range(4))
        out, lse = torch.zeros(rows, heads, dim), torch.full((rows, heads), float("-inf"))
        key = (0, 0) if attention.dropout else None
        self.state = ForwardState(q, out, lse, Heads.all(attention), key)
        self.forward()
        dq, self.dk, self.dv = (torch.zeros(rows, heads, dim) for _ in range(3))
        self.back = BackwardState(q, out.bfloat16(), lse.clone(), dout, dq, Heads.all(attention), key)

    def forward(self) -> None:
        """Once over all calls."""
        cpu = backend_named("cpu")
        cpu.forward(self.calls["forward"], self.attention, self.state, self.k, self.v)

    def backward(self) -> None:
        """Once over all calls."""
        cpu = backend_named("cpu")
        cpu.backward(self.calls["backward"], self.attention, self.back, self.k, self.v, self.dk, self.dv)


def medians(runs: Sequence[Callable[[], None]], repeat: int) -> list[float]:
    """Median seconds of each, all of them in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(repeat + 1):
        for run, mine in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if round_:
                mine.append(time.perf_counter() - start)
    return [statistics.median(mine) for mine in times]


def cases(plain: AttentionConfig, tokens: int, cuts: bool) -> Iterator[tuple[str, Work]]:
    """Name and work of every line."""
    tried = [(False, rows) for rows in STRIPS] + [(True, rows) for rows in SQUARES]
    yield "causal", Work(plain, tokens)
    yield "full", Work(replace(plain, mask="full"), tokens)
    banded = {"ALiBi": replace(plain, alibi=True)}
    banded |= {f"window {n}": replace(plain, window=(n - 1, 0)) for n in (64, 256, 1024, 2048) if n < tokens}
    banded |= {"window 1024, ALiBi": replace(plain, window=(1023, 0), alibi=True)}
    for name, attention in banded.items():
        yield name, Work(attention, tokens)
        for squares, rows in tried if cuts else ():
            if rows <= tokens:
                shape = "squares" if squares else "strips"
                yield f"  {shape} of {rows}", Work(attention, tokens, cut=(squares, rows))
    yield "full, ALiBi", Work(replace(plain, mask="full", alibi=True), tokens)
    if not cuts:
        yield "dropout", Work(replace(plain, dropout=0.1), tokens)


def masks(plain: AttentionConfig, tokens: int, repeat: int, cuts: bool) -> None:
    """The first table."""
    lines = list(cases(plain, tokens, cuts))
    forward = medians([work.forward for _, work in lines], repeat)
    backward = medians([work.backward for _, work in lines], repeat)
    print(f"{tokens} tokens            calls      forward ms   a pair     backward ms   a pair")
    causal = [time / lines[0][1].pairs for time in (forward[0], backward[0])]
    for (name, work), *both in zip(lines, forward, backward, strict=True):
        calls = "/".join(str(len(work.calls[direction])) for direction in ("forward", "backward"))
        a, b = (time / work.pairs / one for time, one in zip(both, causal, strict=True))
        print(f"{name:22} {calls:>9} {both[0] * 1e3:13.1f} {a:8.2f} {both[1] * 1e3:15.1f} {b:8.2f}")


def small_tiles(plain: AttentionConfig, repeat: int) -> None:
    """The second table."""
    print("\nbackward, n x n         bf16      fp32   microseconds")
    for n in (8, 16, 32, 64, 128, 192, 256, 384, 512):
        count = max(1, 1024 // n)
        runs = []
        for upcast in (False, True):
            work = Work(plain, n, count)
            work.calls["backward"] = [replace(call, upcast=upcast) for call in work.calls["backward"]]
            runs.append(work.backward)
        print(f"{n:15}  " + "".join(f"{time / count * 1e6:10.0f}" for time in medians(runs, repeat)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cuts", action="store_true", help="all cuts, and nothing of small tiles")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain = AttentionConfig(args.heads, args.heads, args.dim)
    masks(plain, args.tokens, args.repeat, args.cuts)
    if not args.cuts:
        small_tiles(plain, args.repeat)


if __name__ == "__main__":
    main()
