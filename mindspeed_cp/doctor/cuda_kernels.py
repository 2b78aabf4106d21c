"""Kernels of the cuda backend, by cell of the table of capabilities."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from mindspeed_cp.config import capabilities
from mindspeed_cp.config.capabilities import FEATURES, Cell
from mindspeed_cp.doctor.operator import DTYPES
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.ops.attention.cuda.flash_operator import flash_attention_3
from mindspeed_cp.plan import AttentionConfig

#: Features on which a kernel may depend.
_ATTENTION_FEATURES = tuple(name for name in FEATURES if name not in ("algorithm", "backend"))

_TILES = "mindspeed_cp.ascend_kernels.tile_attention (Triton)"


def kernel_table() -> list[dict[str, Any]]:
    """Return {"dtype", "where", "kernel"} for every type and every value of the features on which its kernels depend.
    Features that make no difference in any cell are left out."""
    rows = []
    for dtype in DTYPES:
        kernels = {cell: _kernel(cell, dtype) for cell in _cells()}
        relevant = [name for name in _ATTENTION_FEATURES if _matters(name, kernels)]
        for values in product(*(FEATURES[name] for name in relevant)):
            where = dict(zip(relevant, values, strict=True))
            (kernel,) = {k for cell, k in kernels.items() if all(getattr(cell, name) == where[name] for name in where)}
            rows.append({"dtype": dtype, "where": [f"{n}: {v}" for n, v in where.items()], "kernel": kernel})
    return rows


def _cells() -> list[Cell]:
    """Return the cells of one algorithm that are supported, or refused only by the backend."""
    cells = []
    for cell in capabilities.all_cells():
        row = capabilities.refusal(cell)
        if cell.backend == "cuda" and cell.algorithm == "ring" and (row is None or "backend" in row.where):
            cells.append(cell)
    return cells


def _matters(name: str, kernels: dict[Cell, str]) -> bool:
    """Return True if two cells that differ only in this feature have different kernels."""
    return any(
        kernels.get(replace(cell, **{name: value}), kernel) != kernel
        for cell, kernel in kernels.items()
        for value in FEATURES[name]
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
    name = "torch.ops.aten._flash_attention_forward"
    if attention.dropout or not torch.cuda.is_available():
        return name
    module, reason = flash_attention_3(torch.device("cuda", 0))
    return (
        f"{name} (FlashAttention 3: {reason})" if module is None else f"FlashAttention 3; in deterministic mode {name}"
    )
