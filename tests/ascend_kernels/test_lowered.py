"""What triton-ascend made of `merge` and of attention over tiles runs on this CPU and agrees with the torch side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import AttentionConfig, Documents
from mindspeed_cp.ascend_kernels import launch
from mindspeed_cp.ascend_kernels.merge import merge_parts, sum_parts
from mindspeed_cp.ascend_kernels.tile_attention import (
    BLOCK_ROWS,
    TileSchedule,
    schedule_block_rows,
    tile_attention_,
    tile_attention_backward_,
)
from mindspeed_cp.layout import TOKEN_SPAN
from mindspeed_cp.plan.tiles import tiles_between
from tests.ascend_kernels.has import triton_runs
from tests.ascend_kernels.lowered import Lowered, compiled, tools
from tests.ascend_kernels.test_compile import ARCHITECTURES, DIM, lowered  # noqa: F401  a fixture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS, KV_HEADS = 4, 2

Kernels = Callable[..., list[Lowered]]


@pytest.fixture
def kernels(lowered: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:  # noqa: F811
    """Puts the lowered variants of some names in the place of their kernels, and an NPU's blocks in the place of a CPU's.
    Few programs are launched, so that each has several blocks to do."""
    if tools() is None:
        pytest.skip(
            "mlir-opt of LLVM 19 or gcc is not here (Debian: mlir-19-tools, llvm-19; MLIR_PREFIX for another place)"
        )
    if not triton_runs():
        pytest.skip(
            "the package triton and TRITON_INTERPRET=1 are needed for the launches; `make test-triton` has them"
        )

    monkeypatch.setitem(BLOCK_ROWS, "cpu", BLOCK_ROWS["npu"])
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 3)

    def put(dtype: str, *names: str) -> list[Lowered]:
        from mindspeed_cp.ascend_kernels.device import merge, tile_attention
        from tests.ascend_kernels.launches import variants

        modules = {"merge": merge, "tile_attention": tile_attention}
        made = []
        for variant in (candidate for candidate in variants(dtype, DIM, "npu") if candidate.name in names):
            (kernel,) = [
                candidate for candidate in lowered
                if (candidate["arch"], candidate["dtype"], candidate["name"]) == (ARCHITECTURES["A2"], dtype, variant.name)
            ]  # fmt: skip
            text = Path(kernel["file"])
            library = text.parent / "libraries" / f"{text.stem}.so"
            made.append(Lowered(variant, library if library.exists() else compiled(text, library.parent)))
            monkeypatch.setattr(modules[variant.module], variant.kernel, made[-1])
        assert len(made) == len(names)
        return made

    yield put


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_and_sum(kernels: Kernels, dtype: str) -> None:
    """Four parts, three of them runs, as the variants were compiled."""
    merge, add = kernels(dtype, "merge", "sum")
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(75, HEADS, DIM, generator=generator)
    parts = [torch.randn(n, HEADS, DIM, generator=generator).to(DTYPES[dtype]) for n in (75, 60, 37, 18)]
    lse, *lses = (torch.randn(n, HEADS, generator=generator) for n in (75, 75, 60, 37, 18))
    lse[::3], lses[0][::2], lses[1][::5] = (-torch.inf,) * 3
    out[::3] = torch.nan  # where nothing was seen
    table = torch.full((75,), -1, dtype=torch.int32)
    table[torch.randperm(75, generator=generator)[:60]] = torch.arange(60, dtype=torch.int32)
    rows = [None, table, None, None], [0, 0, 38, 5]
    results, sums = [], []
    for implementation in ("triton", "torch"):
        results.append((out.clone(), lse.clone()))
        merge_parts(results[-1], parts, lses, *rows, results[-1], implementation)
        sums.append(out.nan_to_num())
        sum_parts(sums[-1], parts, *rows, sums[-1], implementation)
    assert merge.launches == add.launches == 1
    for actual, wanted in zip((*results[0], sums[0]), (*results[1], sums[1]), strict=True):
        assert torch.allclose(actual, wanted, atol=1e-5)


def problem(dtype: str, alibi: bool) -> tuple[AttentionConfig, np.ndarray, list[torch.Tensor]]:
    """Documents that fill no block, two of them longer than one."""
    attention = AttentionConfig(HEADS, KV_HEADS, DIM, window=(50, 0), alibi=alibi)
    documents = Documents([70, 3, 0, 90, 17])
    spans = np.zeros(5, TOKEN_SPAN)
    spans["doc"], spans["start"], spans["stop"] = np.arange(5), documents.offsets[:-1], documents.offsets[1:]
    tiles = tiles_between(spans, spans, documents, attention)
    generator = torch.Generator().manual_seed(3)
    shapes = [(180, HEADS, DIM), *[(180, KV_HEADS, DIM)] * 2, (180, HEADS, DIM)]
    return attention, tiles, [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in shapes]


def slopes_of(attention: AttentionConfig) -> torch.Tensor | None:
    return None if attention.slopes is None else torch.from_numpy(attention.slopes.astype(np.float32))


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(kernels: Kernels, dtype: str, alibi: bool) -> None:
    (kernel,) = kernels(dtype, "forward_alibi" if alibi else "forward")
    attention, tiles, (q, k, v, _) = problem(dtype, alibi)
    schedule = TileSchedule.of(tiles, attention, schedule_block_rows(q.dtype, backward=False, device="npu")[0])
    results = []
    for implementation in ("triton", "torch"):
        out, lse = torch.full((180, HEADS, DIM), torch.nan), torch.full((180, HEADS), -torch.inf)
        tile_attention_(
            q, k, v, out, lse, schedule, attention.softmax_scale, slopes_of(attention), implementation=implementation
        )
        results.append((out, lse))
    assert kernel.launches == 1
    limit = 1e-5 if dtype == "fp32" else 2e-2
    for got, wanted in zip(*results, strict=True):
        assert torch.isfinite(got).all() and float((got - wanted).abs().max()) <= limit


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(kernels: Kernels, dtype: str, alibi: bool) -> None:
    also = "_alibi" if alibi else ""
    made = kernels(dtype, f"dq{also}", f"dkdv{also}", "delta")
    attention, tiles, (q, k, v, dout) = problem(dtype, alibi)
    scale, slopes = attention.softmax_scale, slopes_of(attention)
    out, lse = torch.zeros(180, HEADS, DIM), torch.full((180, HEADS), -torch.inf)
    first = TileSchedule.of(tiles, attention, schedule_block_rows(q.dtype, backward=False, device="npu")[0])
    tile_attention_(q, k, v, out, lse, first, scale, slopes, implementation="torch")
    out = out.to(q.dtype)
    bm, bn = schedule_block_rows(q.dtype, backward=True, device="npu")
    by = TileSchedule.of(tiles, attention, bm), TileSchedule.of(tiles, attention, bn, side="k")
    results = []
    for implementation in ("triton", "torch"):
        grads = [torch.zeros(x.shape) for x in (q, k, v)]
        tile_attention_backward_(q, k, v, out, lse, dout, *grads, *by, scale, slopes, implementation=implementation)
        results.append(grads)
    assert [kernel.launches for kernel in made] == [1, 1, 1]
    limit = 1e-5 if dtype == "fp32" else 2e-2
    for got, wanted in zip(*results, strict=True):
        assert float((got - wanted).abs().max()) <= limit * float(wanted.abs().max())
