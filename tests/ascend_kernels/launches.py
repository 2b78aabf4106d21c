"""Launches recorded instead of done: the package's own functions are called with tensors that have no memory, and what
they would hand to a kernel is kept. So what is compiled is what is launched. Needs torch and triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp import AttentionConfig
from mindspeed_cp.ascend_kernels import merge, tile_attention
from mindspeed_cp.ascend_kernels.tile_attention import (
    TileSchedule,
    schedule_block_rows,
    tile_attention_,
    tile_attention_backward_,
)
from mindspeed_cp.plan.records import CAUSAL, TILE
from tests.ascend_kernels.variants import NAMES, Variant

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = {dtype: name for name, dtype in DTYPES.items()} | {torch.int32: "i32"}
KERNELS = {
    "merge": ["merge_kernel", "sum_kernel"],
    "tile_attention": ["delta_kernel", "forward_kernel", "dq_kernel", "dkdv_kernel"],
}

#: As num_warps and num_stages: options of a launch, not arguments of a kernel.
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """What a kernel would be launched with."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]
    unspecialised: tuple[str, ...]

    def variant(self, name: str, dtype: str) -> Variant:
        """What Triton's JIT would compile for it, with every pointer at a multiple of 16 bytes."""
        divisible = [
            name for name, x in self.arguments.items()
            if isinstance(x, Tensor) or (type(x) is int and x % 16 == 0 and name not in self.unspecialised)
        ]  # fmt: skip
        signature = {name: _type(x) for name, x in self.arguments.items()}
        return Variant(name, dtype, self.module, self.kernel, signature, self.constants, divisible, self.options)


def _type(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"*{SHORT[x.dtype]}"
    return "fp32" if isinstance(x, float) else "i32" if abs(x) < 2**31 else "i64"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within, launches are put on the list."""
    launches: list[Launch] = []
    kept: list[tuple[Any, str, Any]] = []
    for module, names in KERNELS.items():
        for name in names:
            place = importlib.import_module(f"mindspeed_cp.ascend_kernels.device.{module}")
            kept.append((place, name, getattr(place, name)))
            setattr(place, name, _Recorder(launches, module, name, kept[-1][2]))
    try:
        yield launches
    finally:
        for place, name, kernel in kept:
            setattr(place, name, kernel)


class _Recorder:
    def __init__(self, launches: list[Launch], module: str, name: str, kernel: Any) -> None:
        self._launches, self._module, self._name = launches, module, name
        self._arguments = kernel.arg_names
        self._unspecialised: tuple[str, ...] = tuple(
            kernel.kwargs["do_not_specialize"]  # interpreted
            if hasattr(kernel, "kwargs")
            else [param.name for param in kernel.params if param.do_not_specialize]
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            options = {name: constants.pop(name) for name in OPTIONS if name in constants}
            given = dict(zip(self._arguments, arguments, strict=False))
            launch = Launch(self._module, self._name, grid, given, constants, options, self._unspecialised)
            self._launches.append(launch)

        return launch


def launches(
    dtype: str, dim: int, heads: int = 4, kv_heads: int = 2, tokens: int = 4096, kind: str = "cuda"
) -> dict[str, Launch]:
    """Every kernel's launch, by name of NAMES.

    Args:
        dtype: of DTYPES.
        dim: channels of a head.
        heads, kv_heads, tokens: numbers of them.
        kind: of device, whose blocks are taken.
    """
    taken = DTYPES[dtype]

    def like(*shape: int, dtype: torch.dtype = taken) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fp32(*shape: int) -> Tensor:
        return like(*shape, dtype=torch.float32)

    q, k, v, dout = (like(tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads))
    out, lse = fp32(tokens, heads, dim), fp32(tokens, heads)
    parts = [like(n, heads, dim) for n in (tokens, tokens, tokens // 2, tokens // 4)]
    tiles = np.zeros(1, TILE)
    tiles["q_rows"] = tiles["k_rows"] = tokens
    tiles["mask"] = CAUSAL
    attention = AttentionConfig(heads, kv_heads, dim)
    made: dict[str, Launch] = {}
    tile_attention.BLOCK_ROWS["meta"] = tile_attention.BLOCK_ROWS[kind]
    try:
        with recorded() as launches:
            rows: tuple[list[Tensor | None], list[int]] = (
                [None, like(tokens, dtype=torch.int32), None, None], [0, 0, tokens // 2, 0]
            )  # fmt: skip
            lses = [fp32(len(part), heads) for part in parts]
            # Not through torch's operators, which launch nothing for tensors without storage.
            merge._merge_parts(out, lse, parts, lses, *rows, out, lse, None)
            merge._sum_parts(out, parts, *rows, out, None)
            made |= dict(zip(("merge", "sum"), launches, strict=True))
            launches.clear()
            for also, slopes in (("", None), ("_alibi", fp32(heads))):
                blocks = [schedule_block_rows(taken, backward, dim, "meta") for backward in (False, True)]
                by = [
                    TileSchedule.of(tiles, attention, n, side, "meta")
                    for n, side in ((blocks[0][0], "q"), (blocks[1][0], "q"), (blocks[1][1], "k"))
                ]
                scale = attention.softmax_scale
                tile_attention_(q, k, v, out, lse, by[0], scale, slopes)
                grads = (fp32(*x.shape) for x in (q, k, v))
                tile_attention_backward_(q, k, v, dout, lse, dout, *grads, *by[1:], scale, slopes)
                names = (f"forward{also}", "delta", f"dq{also}", f"dkdv{also}")
                made |= dict(zip(names, launches, strict=True))
                launches.clear()
    finally:
        del tile_attention.BLOCK_ROWS["meta"]
    return {name: made[name] for name in NAMES}


def variants(dtype: str, dim: int, kind: str = "cuda") -> list[Variant]:
    """Of every kernel, as it is launched on such a device."""
    return [launch.variant(name, dtype) for name, launch in launches(dtype, dim, kind=kind).items()]
