"""Parts with some rows of a tensor, brought together row by row: merged by their lse, or added."""

import triton
import triton.language as tl


@triton.jit
def _source(table, first, count, token, in_range, HAS_TABLE: tl.constexpr):
    """Return the row of a part for each token, int64, and whether there is one."""
    if HAS_TABLE:
        row = tl.load(table + token, mask=in_range, other=-1)
    else:
        row = token - first
    return row.to(tl.int64), in_range & (row >= 0) & (row < count)


@triton.jit
def _merge(acc, top, total, part, part_lse, table, first, count, token, head, in_range, d,
           HAS_TABLE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Merge a part into acc, of rows whose lse is top; total is 1, or 0 where there was no part yet."""
    row, seen = _source(table, first, count, token, in_range, HAS_TABLE)
    row = row * HEADS + head
    part_top = tl.load(part_lse + row, mask=seen, other=float("-inf"))
    high = tl.maximum(top, part_top)
    safe = tl.where(high == float("-inf"), 0.0, high)
    keep = total * tl.exp(top - safe)
    weight = tl.where(part_top == float("-inf"), 0.0, 1.0) * tl.exp(part_top - safe)
    new_total = keep + weight
    divisor = tl.where(new_total > 0.0, new_total, 1.0)
    mask = (weight > 0.0)[:, None] & (d < DIM)[None, :]  # out of a row without keys may hold anything
    x = tl.load(part + row[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    acc = acc * (keep / divisor)[:, None] + x * (weight / divisor)[:, None]
    top = tl.where(new_total > 0.0, safe + tl.log(divisor), float("-inf"))
    return acc, top, tl.where(new_total > 0.0, 1.0, 0.0)


@triton.jit
def _add(acc, part, table, first, count, token, head, in_range, d,
         HAS_TABLE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    row, seen = _source(table, first, count, token, in_range, HAS_TABLE)
    row = row * HEADS + head
    mask = seen[:, None] & (d < DIM)[None, :]
    return acc + tl.load(part + row[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first0", "first1", "first2", "first3", "count0", "count1", "count2", "count3", "rows",
                               "blocks"])  # fmt: skip
def merge_kernel(
    out, lse, result, result_lse, part0, part1, part2, part3, lse0, lse1, lse2, lse3, table0, table1, table2, table3,
    first0, first1, first2, first3, count0, count1, count2, count3, rows, blocks,
    HAS_TOTAL: tl.constexpr, PARTS: tl.constexpr, TABLES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge PARTS parts, and (out, lse) if HAS_TOTAL, into result; a program strides over the blocks of BLOCK rows.

    A row is a head of a token: out, result: [rows, DIM]; lse, result_lse: fp32 [rows]; they may be the same memory.
    part: [count, HEADS, DIM] with lse fp32 [count, HEADS]: its row i is token first + i; or, if the bit of the part in
    TABLES is 1, a token has the row that table, int32 [rows / HEADS], names, or none (-1).
    WIDTH: DIM rounded up to a power of two.
    """
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)
        in_range = r < rows
        token, head = r // HEADS, r % HEADS
        d = tl.arange(0, WIDTH)
        mask = in_range[:, None] & (d < DIM)[None, :]
        offsets = r.to(tl.int64)[:, None] * DIM + d[None, :]  # 32 bits end at 524,288 tokens of 32 heads x 128
        if HAS_TOTAL:
            top = tl.load(lse + r, mask=in_range, other=float("-inf"))
            total = tl.where(top == float("-inf"), 0.0, 1.0)  # of exp(score - top)
            acc = tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
            acc = tl.where((total > 0.0)[:, None], acc, 0.0)  # out of a row without keys may hold anything
        else:
            top = tl.full((BLOCK,), float("-inf"), tl.float32)
            total = tl.full((BLOCK,), 0.0, tl.float32)
            acc = tl.full((BLOCK, WIDTH), 0.0, tl.float32)
        acc, top, total = _merge(acc, top, total, part0, lse0, table0, first0, count0, token, head, in_range, d,
                                 TABLES % 2 == 1, HEADS, DIM)  # fmt: skip
        if PARTS > 1:
            acc, top, total = _merge(acc, top, total, part1, lse1, table1, first1, count1, token, head, in_range, d,
                                     TABLES // 2 % 2 == 1, HEADS, DIM)  # fmt: skip
        if PARTS > 2:
            acc, top, total = _merge(acc, top, total, part2, lse2, table2, first2, count2, token, head, in_range, d,
                                     TABLES // 4 % 2 == 1, HEADS, DIM)  # fmt: skip
        if PARTS > 3:
            acc, top, total = _merge(acc, top, total, part3, lse3, table3, first3, count3, token, head, in_range, d,
                                     TABLES // 8 % 2 == 1, HEADS, DIM)  # fmt: skip
        tl.store(result + offsets, acc, mask=mask)
        tl.store(result_lse + r, top, mask=in_range)


@triton.jit(do_not_specialize=["first0", "first1", "first2", "first3", "count0", "count1", "count2", "count3", "rows",
                               "blocks"])  # fmt: skip
def sum_kernel(
    total, result, part0, part1, part2, part3, table0, table1, table2, table3,
    first0, first1, first2, first3, count0, count1, count2, count3, rows, blocks,
    HAS_TOTAL: tl.constexpr, PARTS: tl.constexpr, TABLES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add PARTS parts, and total if HAS_TOTAL, in this order; arguments as for merge_kernel."""
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)
        in_range = r < rows
        token, head = r // HEADS, r % HEADS
        d = tl.arange(0, WIDTH)
        mask = in_range[:, None] & (d < DIM)[None, :]
        offsets = r.to(tl.int64)[:, None] * DIM + d[None, :]
        if HAS_TOTAL:
            acc = tl.load(total + offsets, mask=mask, other=0.0).to(tl.float32)
        else:
            acc = tl.full((BLOCK, WIDTH), 0.0, tl.float32)
        acc = _add(acc, part0, table0, first0, count0, token, head, in_range, d, TABLES % 2 == 1, HEADS, DIM)
        if PARTS > 1:
            acc = _add(acc, part1, table1, first1, count1, token, head, in_range, d, TABLES // 2 % 2 == 1, HEADS, DIM)
        if PARTS > 2:
            acc = _add(acc, part2, table2, first2, count2, token, head, in_range, d, TABLES // 4 % 2 == 1, HEADS, DIM)
        if PARTS > 3:
            acc = _add(acc, part3, table3, first3, count3, token, head, in_range, d, TABLES // 8 % 2 == 1, HEADS, DIM)
        tl.store(result + offsets, acc, mask=mask)
