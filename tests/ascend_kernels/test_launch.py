"""How kernels are launched: never more programs than MAX_PROGRAMS, each of which takes one block after the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_cp import AttentionConfig
from mindspeed_cp.ascend_kernels import launch
from mindspeed_cp.ascend_kernels.merge import merge_parts, sum_parts
from mindspeed_cp.ascend_kernels.tile_attention import (
    TileSchedule,
    schedule_block_rows,
    tile_attention_,
    tile_attention_backward_,
)
from mindspeed_cp.plan.records import CAUSAL, TILE
from tests.ascend_kernels.has import triton_runs
from tests.ascend_kernels.variants import NAMES

#: Programs that triton-ascend launches at most: the product of the grid's sizes is below 65,536.
MOST = 65_535

ROWS, HEADS, DIM = 150, 2, 64


def numbers() -> Callable[..., Tensor]:
    """Random tensors, the same from call to call of this."""
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=generator)


def merged(random: Callable[..., Tensor]) -> list[Tensor]:
    """Merge and add."""
    out, lse = random(ROWS, HEADS, DIM), random(ROWS, HEADS)
    parts, lses, rows = list(random(2, ROWS, HEADS, DIM)), list(random(2, ROWS, HEADS)), ([None, None], [0, 0])
    merge_parts((out, lse), parts, lses, *rows, (out, lse), "triton")
    total = torch.empty(ROWS, HEADS, DIM)
    sum_parts(None, parts, *rows, total, "triton")
    return [out, lse, total]


def attended(random: Callable[..., Tensor]) -> list[Tensor]:
    """Attention over tiles, with gradients."""
    q, k, v, dout = (random(ROWS, n, 16) for n in (4, HEADS, HEADS, 4))
    tiles = np.zeros(1, TILE)
    tiles["q_rows"] = tiles["k_rows"] = ROWS
    tiles["mask"] = CAUSAL
    slopes, attention = torch.tensor([0.5, 0.25, 0.1, 0.0]), AttentionConfig(4, HEADS, 16)
    schedules = [
        TileSchedule.of(tiles, attention, schedule_block_rows(q.dtype, backward)[side == "k"], side)
        for backward, side in ((False, "q"), (True, "q"), (True, "k"))
    ]
    out, lse = torch.zeros(ROWS, 4, 16), torch.full((ROWS, 4), -torch.inf)
    tile_attention_(q, k, v, out, lse, schedules[0], 0.25, slopes, "triton")
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    tile_attention_backward_(q, k, v, out, lse, dout, *grads, *schedules[1:], 0.25, slopes, "triton")
    return [out, lse, *grads]


@pytest.mark.parametrize("run", [merged, attended])
def test_few_programs_do_the_same(monkeypatch, run) -> None:
    if not triton_runs():
        pytest.skip("Triton's interpreter is not here; `make test-triton` has it")
    asked: list[int] = []
    whole = launch.launch_grid

    def counted(blocks: int) -> tuple[int]:
        asked.append(blocks)
        return whole(blocks)

    for module in ("merge", "tile_attention"):
        monkeypatch.setattr(f"mindspeed_cp.ascend_kernels.{module}.launch_grid", counted)
    wanted = run(numbers())
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 2)
    actual = run(numbers())
    assert min(asked) > 2 and whole(min(asked)) == (2,)
    for x, y in zip(actual, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_million_tokens_of_128_heads_ask_for_no_larger_grid(kind) -> None:
    """Not run: the launches are recorded."""
    if not launch.has_triton():
        pytest.skip("the package triton is not installed; `make test-triton` has it")
    from tests.ascend_kernels.launches import launches

    assert launch.MAX_PROGRAMS <= MOST
    recorded_launches = launches("bf16", 128, heads=128, kv_heads=128, tokens=2**20, kind=kind)
    assert set(recorded_launches) == set(NAMES)
    assert {
        name: math.prod(recorded_launch.grid) for name, recorded_launch in recorded_launches.items()
    } == dict.fromkeys(NAMES, launch.MAX_PROGRAMS)


def test_lengths_of_a_batch_compile_nothing_anew() -> None:
    """Numbers of rows and blocks change from batch to batch: Triton's JIT takes them as they come."""
    if not launch.has_triton():
        pytest.skip("the package triton is not installed; `make test-triton` has it")
    from tests.ascend_kernels.launches import variants

    for variant in variants("bf16", 64):
        sizes = {"rows", "keys", "blocks", "count", *(f"{name}{i}" for name in ("first", "count") for i in range(4))}
        assert not sizes & {x for x in variant.divisible if variant.signature[x] == "i32"}, variant
        assert {x for x, kind in variant.signature.items() if kind.startswith("*")} <= set(variant.divisible), variant
