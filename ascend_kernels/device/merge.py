"""Online-softmax merge of partial results into fp32 accumulators."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "blocks"])
def merge_kernel(
    out, lse, parts, maxima, sums, places, rows, blocks, part_stride, statistic_stride,
    PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TIMES: tl.constexpr,
    HAS_SUMS: tl.constexpr, HAS_PLACES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A program merges BLOCK rows of all parts, and again while any of the `blocks` blocks of rows are left.

    out: fp32 [rows, DIM], lse: fp32 [rows], both read and written.
    parts: [PARTS, rows, DIM], part_stride elements from part to part.
    maxima: fp32 [PARTS, rows * TIMES]; log-sum-exp, or with HAS_SUMS the maximum beside `sums`; statistic_stride
        elements from part to part. With HAS_PLACES (int32 [rows]) the statistic of row r is number places[r], else r.
    MASKED: a greater maximum is needed, and a positive sum, or a row saw no key of the part.
    WIDTH: the power of two that DIM fits into.
    """
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)
        here = r < rows
        d = tl.arange(0, WIDTH)
        both = here[:, None] & (d < DIM)[None, :]
        at = (
            r.to(tl.int64)[:, None] * DIM + d[None, :]
        )  # 32 bits hold 524,288 tokens of 32 heads of 128 channels, no more
        place = r
        if HAS_PLACES:
            place = tl.load(places + r, mask=here, other=0)
        top = tl.load(lse + r, mask=here, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)  # of exp(score - top)
        acc = tl.load(out + at, mask=both, other=0.0)
        acc = tl.where((total > 0.0)[:, None], acc, 0.0)  # what nothing has touched may hold anything
        for p in tl.static_range(PARTS):
            number = tl.full((), p, tl.int64)
            statistic = number * statistic_stride + place.to(tl.int64) * TIMES
            other = tl.load(maxima + statistic, mask=here, other=float("-inf"))
            weight = tl.where(other == float("-inf"), 0.0, 1.0)
            if HAS_SUMS:
                weight = tl.load(sums + statistic, mask=here, other=0.0)
                other = tl.where((weight > 0.0) & (other > MASKED), other, float("-inf"))
                weight = tl.where(other == float("-inf"), 0.0, weight)  # of a masked row it may be +FLT_MAX
            high = tl.maximum(top, other)
            safe = tl.where(high == float("-inf"), 0.0, high)
            keep = total * tl.exp(top - safe)
            mine = weight * tl.exp(other - safe)
            found = keep + mine
            whole = tl.where(found > 0.0, found, 1.0)
            part = tl.load(parts + number * part_stride + at, mask=both, other=0.0).to(tl.float32)
            part = tl.where((mine > 0.0)[:, None], part, 0.0)
            acc = acc * (keep / whole)[:, None] + part * (mine / whole)[:, None]
            top = tl.where(found > 0.0, safe + tl.log(whole), float("-inf"))
            total = tl.where(found > 0.0, 1.0, 0.0)
        tl.store(out + at, acc, mask=both)
        tl.store(lse + r, top, mask=here)
