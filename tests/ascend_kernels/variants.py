"""What of the kernels is compiled ahead of time: types of arguments and compile-time values. Needs neither torch nor triton,
as triton-ascend and triton compile by it in environments of their own."""

from __future__ import annotations

from dataclasses import dataclass

FP32, INT32 = "*fp32", "*i32"


@dataclass(frozen=True)
class Variant:
    """A kernel for given types and sizes.

    Attributes:
        name: of the variant, a file name.
        module: of `ascend_kernels.device`.
        kernel: of the module.
        signature: (argument, type) of all that are not compile-time values.
        constants: (argument, value).
    """

    name: str
    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]

    def constants_of(self, name: str) -> object:
        """A compile-time value; None: there is no such."""
        return dict(self.constants).get(name)


def _variant(name: str, module: str, kernel: str, signature: dict[str, str], **constants: object) -> Variant:
    return Variant(name, module, kernel, tuple(signature.items()), tuple(constants.items()))


def variants(dtype: str, rows: tuple[int, int] = (64, 64), dim: int = 64) -> list[Variant]:
    """Of all kernels.

    Args:
        dtype: "fp32", "bf16" or "fp16".
        rows: of a block of queries and of one of keys, for tile_attention.
        dim: channels of a head.
    """
    x = f"*{dtype}"
    merge = dict(out=FP32, lse=FP32, parts=x, maxima=FP32, sums=FP32, places=INT32, rows="i32", part_stride="i32", statistic_stride="i32")  # fmt: skip
    spans = dict.fromkeys(("x0", "x1", "x2", "y0", "y1", "y2"), x) | {"runs": INT32}
    rope = dict(x=x, y=x, source_rows=INT32, positions=INT32, frequencies=FP32, rows="i32", factor="fp32")
    tables = dict(visits=INT32, blocks=INT32, slopes=FP32)
    qkv = dict.fromkeys("qkv", x)
    backward = dict(dout=x, lse=FP32, delta=FP32)
    sizes = dict(
        SCALE=dim**-0.5, HEADS=4, GROUP=2, DIM=dim, DIM_V=dim, WIDTH=dim, WIDTH_V=dim, BM=rows[0], BN=rows[1],
        DOT="ieee",
    )  # fmt: skip
    out = [
        _variant("merge", "merge", "merge_kernel", merge, PARTS=2, DIM=dim, WIDTH=dim, BLOCK=2048 // dim, TIMES=1, HAS_SUMS=False, HAS_PLACES=False),
        _variant("merge_statistics", "merge", "merge_kernel", merge, PARTS=2, DIM=dim, WIDTH=dim, BLOCK=2048 // dim, TIMES=8, HAS_SUMS=True, HAS_PLACES=True),
        _variant("spans", "spans", "copy_spans_kernel", spans, WIDTH0=4 * dim, WIDTH1=2 * dim, WIDTH2=2 * dim, ROWS=16, COLUMNS=128, ADD=False),
        _variant("spans_added", "spans", "copy_spans_kernel", spans, WIDTH0=4 * dim, WIDTH1=0, WIDTH2=0, ROWS=16, COLUMNS=128, ADD=True),
        _variant("rope", "rope", "rope_kernel", rope, HEADS=4, DIM=dim, HALF=dim // 2, WIDTH=dim // 2, REST=0, BLOCK=32, GATHER=True, INTERLEAVED=False, SIGN=1),
        _variant("rope_interleaved", "rope", "rope_kernel", rope, HEADS=4, DIM=dim, HALF=dim // 4, WIDTH=dim // 4, REST=dim // 2, BLOCK=32, GATHER=False, INTERLEAVED=True, SIGN=-1),
        _variant("delta", "tile_attention", "delta_kernel", dict(out=x, dout=x, delta=FP32, rows="i32"), DIM_V=dim, WIDTH_V=dim, BLOCK=4096 // dim),
    ]  # fmt: skip
    for alibi in (False, True):
        also = "_alibi" if alibi else ""
        for kernel, more, count in (
            ("forward", dict(out=FP32, lse=FP32), "rows"),
            ("queries", backward | dict(dq=FP32), "rows"),
            ("keys", backward | dict(dk=FP32, dv=FP32), "keys"),
        ):
            signature = {**qkv, **more, **tables, count: "i32"}
            out.append(
                _variant(f"{kernel}{also}", "tile_attention", f"{kernel}_kernel", signature, **sizes, ALIBI=alibi)
            )
    return out
