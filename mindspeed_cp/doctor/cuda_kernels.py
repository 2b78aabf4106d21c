"""Which kernel of the cuda backend serves which cell of the table of capabilities."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from mindspeed_cp import capabilities
from mindspeed_cp.capabilities import FEATURES, Cell
from mindspeed_cp.doctor.operator import DTYPES
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.cuda import CudaAttention
from mindspeed_cp.ops.attention.flash_operator import flash_3
from mindspeed_cp.plan import AttentionConfig

#: Features of attention, on which a kernel may depend.
_OF_ATTENTION = tuple(name for name in FEATURES if name not in ("algorithm", "backend"))

_TILES = "mindspeed_cp.ascend_kernels.tile_attention (Triton)"


def kernels() -> list[dict[str, Any]]:
    """{"dtype", "where", "kernel"} for every type and the values of those features that its kernels depend on.

    All cells are asked, and features that make no difference to any answer are left out.
    """
    rows = []
    for dtype in DTYPES:
        answers = {cell: _kernel(cell, dtype) for cell in _cells()}
        matter = [name for name in _OF_ATTENTION if _matters(name, answers)]
        for values in product(*(FEATURES[name] for name in matter)):
            where = dict(zip(matter, values, strict=True))
            (kernel,) = {found for cell, found in answers.items() if all(getattr(cell, n) == where[n] for n in where)}
            rows.append({"dtype": dtype, "where": [f"{n}: {v}" for n, v in where.items()], "kernel": kernel})
    return rows


def _cells() -> list[Cell]:
    """Cells of one algorithm that plans are refused for by no other reason than the backend."""
    found = []
    for cell in capabilities.cells():
        row = capabilities.refusal(cell)
        if cell.backend == "cuda" and cell.algorithm == "ring" and (row is None or "backend" in row.where):
            found.append(cell)
    return found


def _matters(name: str, answers: dict[Cell, str]) -> bool:
    """Whether two cells that differ in this feature alone have different answers."""
    return any(
        answers.get(replace(cell, **{name: other}), found) != found
        for cell, found in answers.items()
        for other in FEATURES[name]
    )


def _kernel(cell: Cell, dtype: str) -> str:
    window = {"causal": (37, 0), "full": (37, 21)}[cell.mask] if cell.window == "sliding" else None
    attention = AttentionConfig(
        8, 2 if cell.kv_heads == "grouped" else 8, 192 if cell.widths == "unequal" else 128, 128, cell.mask, window,
        cell.bias == "alibi", 0.1 if cell.dropout == "some" else 0.0,
    )  # fmt: skip
    backend = CudaAttention()
    try:
        backend.check(attention, DTYPES[dtype])
    except ConfigError as error:
        return f"refused: {error}"
    if backend.kernel_for(attention, DTYPES[dtype]) == "tiles":
        return _TILES
    return _flash(attention.dropout > 0)


def _flash(drops: bool) -> str:
    """What flash attention is here; of the first GPU, where there is one."""
    name = "torch.ops.aten._flash_attention_forward"
    if drops or not torch.cuda.is_available():
        return name
    third, why = flash_3(torch.device("cuda", 0))
    return f"{name} (FlashAttention 3: {why})" if third is None else f"FlashAttention 3; in deterministic mode {name}"
