"""Flash attention over tiles: whole plans against the dense attention in fp64, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.isolated_rank import attend_virtually
from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan
from mindspeed_cp.ascend_kernels.tile_attention import (
    BLOCK_ROWS,
    TileSchedule,
    block_rows,
    schedule_block_rows,
    tile_attention_,
)
from mindspeed_cp.layout import TOKEN_SPAN
from mindspeed_cp.ops.attention.cuda.tile_attention import CudaTileAttention
from mindspeed_cp.ops.attention.reference import dense_packed_attention
from mindspeed_cp.plan.records import CAUSAL, TILE
from mindspeed_cp.plan.tiles import tiles_between

#: By name: attention, lengths, algorithm, ranks, options. Interpreted kernels are slow: small heads, short documents.
CASES: dict[str, tuple[AttentionConfig, list[int], str, int, dict[str, Any]]] = {
    "causal": (AttentionConfig(2, 2, 16), [70, 1, 40], "ring", 3, {}),
    "grouped": (AttentionConfig(4, 2, 24), [90, 0, 33], "ring", 2, {}),
    "full": (AttentionConfig(2, 1, 16, mask="full"), [50, 31], "all_gather", 3, {}),
    "window": (AttentionConfig(2, 2, 16, window=(20, 0)), [100, 12], "direct", 3, {}),
    "window both ways": (AttentionConfig(2, 2, 16, mask="full", window=(9, 4)), [80], "ring", 2, {}),
    "alibi": (AttentionConfig(4, 2, 16, alibi=True), [75, 20], "ring", 3, {}),
    "alibi in a window": (AttentionConfig(4, 4, 16, alibi=True, window=(33, 0)), [120], "direct", 2, {}),
    "values narrower than keys": (AttentionConfig(2, 2, 48, head_dim_v=20), [64, 9], "ring", 2, {}),
    "heads split unevenly": (AttentionConfig(5, 1, 16), [60, 30], "ulysses", 2, {}),
    "documents of a few tokens": (
        AttentionConfig(2, 2, 16),
        [3, 1, 2, 5, 4, 1, 40],
        "direct",
        2,
        {"layout": "balanced"},
    ),
    "nothing": (AttentionConfig(2, 2, 16), [0, 0], "ring", 2, {}),
}


#: 16-bit types run by default in the cases that differ most.
HALF_CASES = ("grouped", "alibi in a window", "values narrower than keys")
DTYPE_CASES = [
    pytest.param(
        name, dtype, id=f"{name}-{str(dtype)[6:]}",
        marks=() if dtype == torch.float32 or name in HALF_CASES else pytest.mark.thorough,
    )
    for name in CASES
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), DTYPE_CASES)
def test_every_plan_agrees_with_fp64(implementation, name, dtype) -> None:
    if implementation == "triton" and dtype == torch.bfloat16:
        pytest.skip(
            "an interpreter of Triton whose tl.dot takes bf16 is missing (this one multiplies the bits); torch alone has it"
        )
    attention, lengths, algorithm, ranks, options = CASES[name]
    documents = Documents(lengths)
    plan = build_plan(documents, Topology(1, ranks), attention, algorithm, **options)
    generator = torch.Generator().manual_seed(len(name))
    shapes = [(attention.heads, attention.head_dim), (attention.kv_heads, attention.head_dim)]
    shapes += [(attention.kv_heads, attention.head_dim_v), (attention.heads, attention.head_dim_v)]
    q, k, v, dout = (torch.randn(documents.tokens, *shape, generator=generator).to(dtype) for shape in shapes)
    actual = attend_virtually(plan, q, k, v, dout, CudaTileAttention("cpu", implementation))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_packed_attention(attention, *leaves, documents)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout.double())] if documents.tokens else [out, *leaves]
    for label, own, want in zip(
        ("out", "dq", "dk", "dv"), (actual.out, actual.dq, actual.dk, actual.dv), wanted, strict=True
    ):
        size = float(want.abs().max()) if want.numel() else 1.0
        error = float((own.double() - want).abs().max()) if want.numel() else 0.0
        assert error <= {torch.float32: 1e-5, torch.float16: 4e-3}.get(dtype, 3e-2) * max(1.0, size), label
    assert torch.allclose(actual.lse.double(), lse.detach(), atol=1e-5 if dtype == torch.float32 else 1e-3)


def test_two_parts_of_the_keys_add_up_and_other_rows_keep_what_they_have(implementation) -> None:
    attention = AttentionConfig(2, 2, 16)
    q, k, v = (torch.randn(n, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (50, 90, 91))
    v = v[:90].contiguous()
    tiles = np.zeros(3, TILE)
    names = ["q_row", "q_rows", "k_row", "k_rows", "mask"]
    for tile, values in zip(tiles, [(5, 40, 0, 33, 0), (5, 40, 40, 40, CAUSAL), (7, 1, 85, 5, 0)], strict=True):
        for name, value in zip(names, values, strict=True):
            tile[name] = value
    together, apart = ([torch.full((50, 2, 16), 7.0), torch.full((50, 2), float("-inf"))] for _ in range(2))
    tile_attention_(q, k, v, *together, TileSchedule.of(tiles, attention, 32), 0.25, None, implementation)
    for index in range(3):
        tile_attention_(
            q, k, v, *apart, TileSchedule.of(tiles[index : index + 1], attention, 32), 0.25, None, implementation
        )
    for row in range(50):
        inside = 5 <= row < 45
        assert bool((together[1][row] == float("-inf")).all()) != inside
    rows = slice(5, 45)
    assert torch.allclose(together[0][rows], apart[0][rows], atol=1e-6)
    assert torch.allclose(together[1][rows], apart[1][rows], atol=1e-6)
    keys = [*range(33), *range(40, 43), *range(85, 90)]
    weights = (torch.einsum("hd,khd->hk", q[7], k[keys]) * 0.25).softmax(-1)
    assert torch.allclose(together[0][7], torch.einsum("hk,khd->hd", weights, v[keys]), atol=1e-5)


def test_schedules_visit_every_tile_once_for_each_block() -> None:
    tiles = np.zeros(4, TILE)
    tiles["q_row"], tiles["q_rows"] = [0, 30, 30, 100], [30, 70, 70, 3]
    tiles["k_row"], tiles["k_rows"] = [0, 10, 90, 3], [30, 20, 64, 1]
    attention = AttentionConfig(2, 2, 16, mask="full")
    for side, row, rows in (("q", "q_row", "q_rows"), ("k", "k_row", "k_rows")):
        schedule = TileSchedule.of(tiles, attention, 32, side)
        blocks, visits = schedule.blocks.numpy(), schedule.visits.numpy()
        seen = []
        for first, start, stop, _ in blocks:
            assert first % 32 == 0
            seen += [(first // 32, tuple(visit[:4])) for visit in visits[start:stop]]
        wanted = [
            (block, tuple(int(tile[name]) for name in ("q_row", "q_rows", "k_row", "k_rows")))
            for tile in tiles
            for block in range(int(tile[row]) // 32, (int(tile[row] + tile[rows]) - 1) // 32 + 1)
        ]
        assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("side", ["q", "k"])
def test_blocks_with_most_to_do_come_first(side: str) -> None:
    """One causal document with a window, and a block's visible pairs counted one by one."""
    attention = AttentionConfig(1, 1, 16, window=(90, 0))
    spans = np.zeros(2, TOKEN_SPAN)
    spans["doc"], spans["start"], spans["stop"] = [0, 1], [0, 200], [200, 230]
    tiles = tiles_between(spans, spans, Documents([200, 30]), attention)
    seen = np.zeros((230, 230), bool)
    for start, stop in ((0, 200), (200, 230)):
        for i in range(start, stop):
            seen[i, max(start, i - 90) : i + 1] = True
    schedule = TileSchedule.of(tiles, attention, 32, side)
    others = [(seen if side == "q" else seen.T)[first : first + 32] for first in schedule.blocks[:, 0].tolist()]
    met = [int(block.any(0).sum()) for block in others]  # rows of the other side that any row of the block meets
    assert met == sorted(met, reverse=True) and len(set(met)) > 2


@pytest.mark.parametrize("device", BLOCK_ROWS)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_heads_have_small_blocks(device, kernel, dtype) -> None:
    rows = [block_rows(kernel, dtype, width, device) for width in (16, 128, 129, 256, 512)]
    assert rows[0] == rows[1] and rows[2] == rows[3] and min(map(min, rows)) >= 16
    for row, width in zip(rows[2:], (256, 256, 512), strict=True):
        assert max(row) * width * dtype.itemsize <= 2**15


def test_schedules_are_by_each_kernels_own_rows() -> None:
    for device in (*BLOCK_ROWS, "cpu"):
        own = {name: block_rows(name, torch.bfloat16, 128, device)[0] for name in ("forward", "dq", "dkdv")}
        assert schedule_block_rows(torch.bfloat16, False, 128, device)[0] == own["forward"]
        assert schedule_block_rows(torch.bfloat16, True, 128, device) == (own["dq"], own["dkdv"])


def test_heads_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim is 520; valid for the tile kernel: up to 512"):
        CudaTileAttention("cpu").check(AttentionConfig(2, head_dim=520), torch.bfloat16)


def test_what_it_cannot_do_is_refused() -> None:
    backend = CudaTileAttention("cpu", "torch")
    with pytest.raises(
        ConfigError, match=r"attention\.dropout is 0.1; the tile kernel has no dropout; valid: 0, or backend"
    ):
        backend.check(replace(CASES["causal"][0], dropout=0.1), torch.float32)
    with pytest.raises(
        ConfigError, match=r"dtype is torch.float64; the tile kernel supports float32, bfloat16, float16"
    ):
        backend.check(CASES["causal"][0], torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 40, 16).transpose(0, 1)}, "q is of strides"),
        ({"v": torch.zeros(40, 2, 16, device="meta")}, "v is of strides .* on meta; valid: contiguous, on cpu"),
        ({"lse": torch.zeros(2, 40).T}, r"lse is of strides \[1, 40\]"),
        ({"slopes": torch.zeros(4)[::2]}, r"slopes is of strides \[2\]"),
        ({"device": "meta"}, "schedule is of strides .* on meta"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else None,
)  # fmt: skip
def test_memory_that_kernels_would_misread_is_refused(implementation, change, message) -> None:
    x = {name: torch.zeros(40, 2, 16) for name in ("q", "k", "v", "out")} | {"lse": torch.zeros(40, 2)} | change
    tiles = np.zeros(1, TILE)
    tiles["q_rows"] = tiles["k_rows"] = 40
    schedule = TileSchedule.of(tiles, AttentionConfig(2, 2, 16), 32, "q", x.pop("device", "cpu"))
    with pytest.raises(ConfigError, match=message):
        tile_attention_(**x, schedule=schedule, scale=1.0, implementation=implementation)
