"""Rows copied by runs, up to three tensors in one launch."""

import triton
import triton.language as tl


@triton.jit
def _copy(
    source, target, runs, run, block,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    first, to, count = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1), tl.load(runs + 3 * run + 2)
    r = tl.arange(0, ROWS)
    c = block * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < count)[:, None] & (c < WIDTH)[None, :]
    # 64 bits: a context of a million rows of 8,192 channels has more elements than 32 count
    x = tl.load(source + (first + r).to(tl.int64)[:, None] * WIDTH + c[None, :], mask=mask, other=0.0)
    there = target + (to + r).to(tl.int64)[:, None] * WIDTH + c[None, :]
    if ADD:
        x = x.to(tl.float32) + tl.load(there, mask=mask, other=0.0).to(tl.float32)
    tl.store(there, x.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def copy_spans_kernel(
    x0, x1, x2, y0, y1, y2, runs, count,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A program copies up to ROWS rows of a run, COLUMNS of their elements, of the tensor that these lie in, and again
    while any are left.

    runs: int32 [count, 3]: first row of the source, first row of the target, rows (at most ROWS).
    WIDTH0, WIDTH1, WIDTH2: elements of a row; 0 where there are fewer tensors, so behind a 0 is no other number.
    """
    before1: tl.constexpr = (WIDTH0 + COLUMNS - 1) // COLUMNS
    before2: tl.constexpr = before1 + (WIDTH1 + COLUMNS - 1) // COLUMNS
    every: tl.constexpr = before2 + (WIDTH2 + COLUMNS - 1) // COLUMNS
    for piece in range(tl.program_id(0), count * every, tl.num_programs(0)):
        run, block = piece % count, piece // count
        if WIDTH1 == 0 or block < before1:
            _copy(x0, y0, runs, run, block, WIDTH0, ROWS, COLUMNS, ADD)
        elif WIDTH2 == 0 or block < before2:
            _copy(x1, y1, runs, run, block - before1, WIDTH1, ROWS, COLUMNS, ADD)
        else:
            _copy(x2, y2, runs, run, block - before2, WIDTH2, ROWS, COLUMNS, ADD)
