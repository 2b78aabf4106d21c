"""Kernels of the cpu backend: cost of masks and biases, of strips, and of calls in fp32.

    python -m benchmarks.kernels_cpu [--heads 8] [--dim 64] [--tokens 4096] [--repeat 5] [--cuts]

One document in bf16, one thread; medians of rounds in which all lines are timed in turn.

Masks: milliseconds forward and backward, and the time of a visible (query, key) pair relative to causal attention:
1.00 is a mask without cost. With --cuts, windows and ALiBi in strips of several numbers of rows, among which
mindspeed_cp/ops/attention/cpu/lowering.py chooses.

Small tiles: microseconds for the backward of one causal n x n tile, in bf16 and in fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.attention_work import AttentionWork, document_tiles
from benchmarks.timing import time_in_turn
from mindspeed_cp.layout import Documents
from mindspeed_cp.ops.attention import get_backend
from mindspeed_cp.ops.attention.cpu import lowering
from mindspeed_cp.ops.attention.cpu.lowering import Upcasts, lower_to_kernel_calls
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.tiles import count_pairs

CPU = torch.device("cpu")


class CpuWork(AttentionWork):
    """Attention over documents of equal length by the kernels of the cpu backend, optionally in strips of given rows.

    Attributes:
        pairs: visible (query, key) pairs.
    """

    def __init__(self, attention: AttentionConfig, length: int, count: int = 1, strip_rows: int | None = None) -> None:
        documents = Documents([length] * count)
        tiles = document_tiles(documents, attention)
        self.pairs = int(count_pairs(tiles, attention).sum())
        calls, chosen = [], lowering.STRIP_ROWS
        lowering.STRIP_ROWS = chosen if strip_rows is None else (strip_rows,)
        for direction in ("forward", "backward"):
            upcasts = Upcasts.of(direction, attention, torch.bfloat16)
            calls += lower_to_kernel_calls(tiles, documents.tokens, attention, upcasts).values()
        lowering.STRIP_ROWS = chosen
        super().__init__(get_backend("cpu"), attention, documents, CPU, calls)


def cases(plain: AttentionConfig, tokens: int, cuts: bool) -> Iterator[tuple[str, CpuWork]]:
    """Yield the name and the work of each line."""
    yield "causal", CpuWork(plain, tokens)
    yield "full", CpuWork(replace(plain, mask="full"), tokens)
    banded = {"ALiBi": replace(plain, alibi=True)}
    banded |= {f"window {n}": replace(plain, window=(n - 1, 0)) for n in (64, 256, 1024, 2048) if n < tokens}
    banded |= {"window 1024, ALiBi": replace(plain, window=(1023, 0), alibi=True)}
    for name, attention in banded.items():
        yield name, CpuWork(attention, tokens)
        for rows in (32, 64, 128, 256, 512, 768, 1024, 1536, 2048) if cuts else ():
            if rows <= tokens:
                yield f"  strips of {rows}", CpuWork(attention, tokens, strip_rows=rows)
    yield "full, ALiBi", CpuWork(replace(plain, mask="full", alibi=True), tokens)
    if not cuts:
        yield "dropout", CpuWork(replace(plain, dropout=0.1), tokens)


def masks(plain: AttentionConfig, tokens: int, repeat: int, cuts: bool) -> None:
    """Print the table of masks."""
    works = dict(cases(plain, tokens, cuts))
    forward = time_in_turn({name: work.forward for name, work in works.items()}, CPU, repeat)
    backward = time_in_turn({name: work.backward for name, work in works.items()}, CPU, repeat)
    print(f"{tokens} tokens            calls      forward ms   a pair     backward ms   a pair")
    for name, work in works.items():
        calls = "/".join(str(len(calls)) for calls in work.calls)
        relative = [
            times[name] / work.pairs / (times["causal"] / works["causal"].pairs) for times in (forward, backward)
        ]
        print(
            f"{name:22} {calls:>9} {forward[name]:13.1f} {relative[0]:8.2f} {backward[name]:15.1f} {relative[1]:8.2f}"
        )


def small_tiles(plain: AttentionConfig, repeat: int) -> None:
    """Print the table of small tiles."""
    print("\nbackward, n x n         bf16      fp32   microseconds")
    for n in (8, 16, 32, 64, 128, 192, 256, 384, 512):
        count = max(1, 1024 // n)
        works = {dtype: CpuWork(plain, n, count) for dtype in ("bf16", "fp32")}
        for dtype, work in works.items():
            work.calls[1] = [call._replace(upcast=dtype == "fp32") for call in work.calls[1]]
        times = time_in_turn({dtype: work.backward for dtype, work in works.items()}, CPU, repeat)
        print(f"{n:15}  " + "".join(f"{ms / count * 1e3:10.0f}" for ms in times.values()), flush=True)


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
