"""Rotary positions while rows are gathered."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "blocks"])
def rope_kernel(
    x, y, source_rows, positions, frequencies, rows, blocks, factor,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr, GATHER: tl.constexpr, INTERLEAVED: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """A program rotates BLOCK (row, head) pairs of y, and again while any of the `blocks` blocks are left; row r of y
    comes from row source_rows[r] of x, or from r.

    x, y: [*, HEADS, DIM]. positions: int32 [rows], of the rows of y. frequencies: fp32 [HALF]. The first 2 * HALF
    channels turn by positions * frequencies and are multiplied by `factor`; the others are copied.
    WIDTH, REST: powers of two that HALF and DIM - 2 * HALF fit into (REST 0: there are none). SIGN -1 turns back.
    """
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        pair = block * BLOCK + tl.arange(0, BLOCK)
        here = pair < rows * HEADS
        row, head = pair // HEADS, pair % HEADS
        source = row
        if GATHER:
            source = tl.load(source_rows + row, mask=here, other=0)
        position = tl.load(positions + row, mask=here, other=0).to(tl.float32)
        f = tl.arange(0, WIDTH)
        known = f < HALF
        angle = position[:, None] * tl.load(frequencies + f, mask=known, other=0.0)[None, :]
        cos = tl.cos(angle) * factor
        sin = tl.sin(angle) * factor * SIGN
        mask = here[:, None] & known[None, :]
        step: tl.constexpr = 2 if INTERLEAVED else 1
        apart: tl.constexpr = 1 if INTERLEAVED else HALF
        given = (source.to(tl.int64) * HEADS + head)[:, None] * DIM
        taken = (row.to(tl.int64) * HEADS + head)[:, None] * DIM
        low = tl.load(x + given + (f * step)[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x + given + (f * step + apart)[None, :], mask=mask, other=0.0).to(tl.float32)
        kind = y.dtype.element_ty
        tl.store(y + taken + (f * step)[None, :], (low * cos - high * sin).to(kind), mask=mask)
        tl.store(y + taken + (f * step + apart)[None, :], (high * cos + low * sin).to(kind), mask=mask)
        if REST > 0:
            c = 2 * HALF + tl.arange(0, REST)
            more = here[:, None] & (c < DIM)[None, :]
            tl.store(y + taken + c[None, :], tl.load(x + given + c[None, :], mask=more, other=0.0), mask=more)
