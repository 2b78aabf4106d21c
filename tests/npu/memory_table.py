"""Bytes of masks and biases on one rank of 8, for benchmarks/results/ascend.md: `python -m tests.npu.memory_table`.

What this project's paths hand to the operator is counted from the tensors that its calls receive: whole plans run on tensors
without memory (device meta), and the operator's double writes down what it was given. The two rows of what others build, a full
mask and a bias matrix, are products of sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from benchmarks.isolated_rank import IsolatedRank
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from tests.host_cann.oracle_calls import Call, calls
from tests.ops.npu_oracle import OracleOperator

RANKS, HEADS, KV_HEADS, WIDTH = 8, 32, 8, 128
SIZES = {"32K": 32 << 10, "256K": 256 << 10, "1M": 1_000_000}  # the operator takes a million tokens at most


@dataclass(frozen=True)
class Row:
    """A way of telling the operator what is visible, or how far away; bytes by size of the context."""

    name: str
    counted: bool
    bytes: dict[str, int]


def documents(tokens: int) -> Documents:
    """One long document and many short ones: lengths in a geometric row, the last takes the rest."""
    lengths = [int(tokens * 0.5 ** (i / 4) * (1 - 0.5 ** (1 / 4))) for i in range(40)]
    return Documents([*lengths, tokens - sum(lengths)])


def received(
    tokens: int, attention: AttentionConfig, lowering: str = "tnd", ranks: Sequence[int] = range(RANKS)
) -> list[list[Call]]:
    """The calls of some ranks of a ring, forward and backward."""
    plan = build_plan(documents(tokens), Topology(1, RANKS), attention, "ring")
    shapes = ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, WIDTH), (HEADS, WIDTH))
    q, k, v, dout = (torch.empty(tokens, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (k, v))
    backend, by_rank = NpuAttention(lowering, operator=OracleOperator()), []
    for rank in ranks:
        calls.clear()
        isolated = IsolatedRank(plan, rank, backend, q, k, v, dout, None)
        isolated.forward()
        isolated.backward(dk, dv)
        assert len(calls) == sum(isolated.calls)
        by_rank.append(list(calls))
    return by_rank


@lru_cache
def rows(sizes: tuple[str, ...] = tuple(SIZES), biased_ranks: Sequence[int] = range(RANKS)) -> list[Row]:
    """The table, with columns for some of SIZES. ALiBi, whose squares are a call each, may be counted on some ranks alone."""
    tokens_of = {name: SIZES[name] for name in sizes}
    causal = AttentionConfig(HEADS, KV_HEADS, WIDTH)
    alibi = AttentionConfig(HEADS, KV_HEADS, WIDTH, alibi=True)
    table: dict[str, dict[str, int]] = {"masks": {}, "tnd": {}, "alibi mask": {}, "alibi": {}}
    for name, tokens in tokens_of.items():
        ours = received(tokens, causal)
        table["tnd"][name] = max(
            call.mask_bytes for calls in ours for call in calls
        )  # one tensor, given again and again
        with_bias = received(tokens, alibi, ranks=biased_ranks)
        table["alibi mask"][name] = max(call.mask_bytes for calls in with_bias for call in calls)
        table["alibi"][name] = max(call.pse_bytes for calls in with_bias for call in calls)
        by_ids = received(tokens, causal, "masks")
        table["masks"][name] = max(call.mask_bytes for calls in by_ids for call in calls)
    own = {name: tokens // RANKS for name, tokens in tokens_of.items()}
    return [
        Row("full mask of a rank's queries, bool", False, {n: own[n] * tokens for n, tokens in tokens_of.items()}),
        Row("mask by document ids, largest step (npu_lowering: masks)", True, table["masks"]),
        Row("compressed mask (npu_lowering: tnd)", True, table["tnd"]),
        Row("ALiBi as a bias matrix, bf16", False, {n: 2 * HEADS * own[n] * tokens for n, tokens in tokens_of.items()}),
        Row("ALiBi by slopes and offsets", True, table["alibi"]),
        Row("... and its compressed mask", True, table["alibi mask"]),
    ]


def size(number: int) -> str:
    """Bytes as people read them."""
    if not number:
        return "0"
    power = min(int(math.log2(number)) // 10, 4)
    return f"{number / (1 << 10 * power):,.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def cells(row: Row) -> str:
    """A row of the table, up to its last column of bytes."""
    return f"| {row.name} | {' | '.join(map(size, row.bytes.values()))} |"


def main() -> None:
    """Print the table in Markdown."""
    print(f"| bytes on one rank of {RANKS}, {HEADS} heads | {' | '.join(SIZES)} | |\n|---|---|---|---|---|")
    for row in rows():
        print(f"{cells(row)} {'counted' if row.counted else 'computed'} |")


if __name__ == "__main__":
    main()
