"""Online-softmax merge of partial results into fp32 accumulators."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "blocks"])
def merge_kernel(
    out, lse, parts, part_lse, rows, blocks, part_stride, lse_stride,
    PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge all parts into BLOCK rows at a time; a program strides over the `blocks` blocks of rows.

    out: fp32 [rows, DIM], lse: fp32 [rows], both read and written.
    parts: [PARTS, rows, DIM], part_stride elements from part to part.
    part_lse: fp32 [PARTS, rows], lse_stride elements from part to part.
    WIDTH: DIM rounded up to a power of two.
    """
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)
        row_in_range = r < rows
        d = tl.arange(0, WIDTH)
        in_range = row_in_range[:, None] & (d < DIM)[None, :]
        offsets = r.to(tl.int64)[:, None] * DIM + d[None, :]  # 32 bits end at 524,288 tokens of 32 heads x 128
        top = tl.load(lse + r, mask=row_in_range, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)  # of exp(score - top)
        acc = tl.load(out + offsets, mask=in_range, other=0.0)
        acc = tl.where((total > 0.0)[:, None], acc, 0.0)  # out of a row that nothing was written to may hold anything
        for p in tl.static_range(PARTS):
            number = tl.full((), p, tl.int64)
            part_top = tl.load(part_lse + number * lse_stride + r.to(tl.int64), mask=row_in_range, other=float("-inf"))
            high = tl.maximum(top, part_top)
            safe = tl.where(high == float("-inf"), 0.0, high)
            keep = total * tl.exp(top - safe)
            part_weight = tl.where(part_top == float("-inf"), 0.0, 1.0) * tl.exp(part_top - safe)
            new_total = keep + part_weight
            divisor = tl.where(new_total > 0.0, new_total, 1.0)
            part = tl.load(parts + number * part_stride + offsets, mask=in_range, other=0.0).to(tl.float32)
            part = tl.where((part_weight > 0.0)[:, None], part, 0.0)
            acc = acc * (keep / divisor)[:, None] + part * (part_weight / divisor)[:, None]
            top = tl.where(new_total > 0.0, safe + tl.log(divisor), float("-inf"))
            total = tl.where(new_total > 0.0, 1.0, 0.0)
        tl.store(out + offsets, acc, mask=in_range)
        tl.store(lse + r, top, mask=row_in_range)
