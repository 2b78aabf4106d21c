"""Flash attention over the tiles of a plan: forward, and backward from the complete out and lse.

A tile is q rows x k rows of one document; row i (counted in the tile) sees the keys i + low to i + high. A block of
rows of either side visits the tiles that it is in, one after the other. No sum is split over two programs, so that the
same call gives the same bits.

`visits` has eight int32 for each visit: q_row, q_rows, k_row, k_rows of the tile, low, high, distance from key 0 to
query 0 in positions, and the document (not read). `blocks` has four: first row of the block, first and last-plus-one
visit, and 0. `count` is the number of blocks; a program strides over the (block, head) pairs.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1.0e30)  # instead of -inf, because -inf - -inf is NaN


@triton.jit
def _tile(visits, visit):
    """Load the fields of a visit."""
    record = visits + 8 * visit
    q_row, q_rows, k_row, k_rows = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    return q_row, q_rows, k_row, k_rows, tl.load(record + 4), tl.load(record + 5), tl.load(record + 6)


@triton.jit
def _rows(x, rows, in_range, channels, DIM: tl.constexpr):
    """Load rows of x, [rows, channels]; 0 out of range."""
    mask = in_range[:, None] & (channels < DIM)[None, :]
    return tl.load(x + rows[:, None] * DIM + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _scores(
    q, k, i, j, low, high, keys, distance, slope, inside,
    SCALE: tl.constexpr, ALIBI: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return scores in units of log2, [rows, keys], and True where they are visible."""
    x = tl.dot(q, tl.trans(k), input_precision=DOT) * (SCALE * LOG2E)
    if ALIBI:
        x = x - slope * LOG2E * tl.abs(distance + i[:, None] - j[None, :]).to(tl.float32)
    ahead = j[None, :] - i[:, None]
    visible = inside[:, None] & (j < keys)[None, :] & (ahead >= low) & (ahead <= high)
    return x, visible


@triton.jit(do_not_specialize=["rows", "count"])
def forward_kernel(
    q, k, v, out, lse, visits, blocks, slopes, rows, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIBI: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Add the attention of BM rows in this call to out and lse, for each (block, head).

    q: [rows, HEADS, DIM]; k: [keys, HEADS // GROUP, DIM]; v: [keys, HEADS // GROUP, DIM_V].
    out: fp32 [rows, HEADS, DIM_V], lse: fp32 [rows, HEADS], read and written; out is ignored where lse is -inf.
    slopes: fp32 [HEADS].
    """
    for program in range(tl.program_id(0), count * HEADS, tl.num_programs(0)):
        block, head = program % count, program // count
        row0 = tl.load(blocks + 4 * block)
        first, last = tl.load(blocks + 4 * block + 1), tl.load(blocks + 4 * block + 2)
        r = row0 + tl.arange(0, BM)
        row_in_range = r < rows
        d, e = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
        offsets = r.to(tl.int64) * HEADS + head
        qt = tl.load(
            q + offsets[:, None] * DIM + d[None, :], mask=row_in_range[:, None] & (d < DIM)[None, :], other=0.0
        )
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
        before = tl.load(lse + offsets, mask=row_in_range, other=float("-inf"))
        total = tl.where(before == float("-inf"), 0.0, 1.0)
        top = tl.where(total > 0.0, before * LOG2E, NOTHING)
        in_range = row_in_range[:, None] & (e < DIM_V)[None, :]
        acc = tl.load(out + offsets[:, None] * DIM_V + e[None, :], mask=in_range, other=0.0)
        acc = tl.where((total > 0.0)[:, None], acc, 0.0)
        for visit in range(first, last):
            q_row, q_rows, k_row, k_rows, low, high, distance = _tile(visits, visit)
            i = r - q_row
            inside = (i >= 0) & (i < q_rows)
            begin = tl.maximum(0, tl.maximum(row0 - q_row, 0) + low)
            end = tl.minimum(k_rows, tl.minimum(row0 - q_row + BM, q_rows) + high)
            for start in range(begin, end, BN):
                j = start + tl.arange(0, BN)
                key = (k_row + j).to(tl.int64) * (HEADS // GROUP) + head // GROUP
                kt, vt = _rows(k, key, j < k_rows, d, DIM), _rows(v, key, j < k_rows, e, DIM_V)
                x, visible = _scores(qt, kt, i, j, low, high, k_rows, distance, slope, inside, SCALE, ALIBI, DOT)
                x = tl.where(visible, x, NOTHING)
                new_top = tl.maximum(top, tl.max(x, 1))
                p = tl.where(visible, tl.exp2(x - new_top[:, None]), 0.0)
                decay = tl.exp2(top - new_top)
                total = total * decay + tl.sum(p, 1)
                acc = acc * decay[:, None] + tl.dot(p.to(vt.dtype), vt, input_precision=DOT)
                top = new_top
        divisor = tl.where(total > 0.0, total, 1.0)
        tl.store(out + offsets[:, None] * DIM_V + e[None, :], acc / divisor[:, None], mask=in_range)
        tl.store(lse + offsets, tl.where(total > 0.0, top * LN2 + tl.log(divisor), float("-inf")), mask=row_in_range)


@triton.jit
def _weights(x, visible, lse, dp, delta, SCALE: tl.constexpr):
    """Return attention weights and gradients of the scores before SCALE, [rows, keys]; lse is in units of log2."""
    p = tl.where(visible, tl.exp2(x - lse[:, None]), 0.0)
    return p, p * (dp - delta[:, None]) * SCALE


@triton.jit(do_not_specialize=["rows", "count"])
def dq_kernel(
    q, k, v, dout, lse, delta, dq, visits, blocks, slopes, rows, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIBI: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Add to dq, fp32 [rows, HEADS, DIM], for each (block, head). lse and delta: fp32 [rows, HEADS], of the complete
    attention; delta is the sum of dout * out over channels."""
    for program in range(tl.program_id(0), count * HEADS, tl.num_programs(0)):
        block, head = program % count, program // count
        row0 = tl.load(blocks + 4 * block)
        first, last = tl.load(blocks + 4 * block + 1), tl.load(blocks + 4 * block + 2)
        r = row0 + tl.arange(0, BM)
        row_in_range = r < rows
        d, e = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
        offsets = r.to(tl.int64) * HEADS + head
        wide = row_in_range[:, None] & (d < DIM)[None, :]
        qt = tl.load(q + offsets[:, None] * DIM + d[None, :], mask=wide, other=0.0)
        dot = tl.load(
            dout + offsets[:, None] * DIM_V + e[None, :], mask=row_in_range[:, None] & (e < DIM_V)[None, :], other=0.0
        )
        high_lse = tl.load(lse + offsets, mask=row_in_range, other=0.0) * LOG2E
        sums = tl.load(delta + offsets, mask=row_in_range, other=0.0)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
        acc = tl.load(dq + offsets[:, None] * DIM + d[None, :], mask=wide, other=0.0)
        for visit in range(first, last):
            q_row, q_rows, k_row, k_rows, low, high, distance = _tile(visits, visit)
            i = r - q_row
            inside = (i >= 0) & (i < q_rows)
            begin = tl.maximum(0, tl.maximum(row0 - q_row, 0) + low)
            end = tl.minimum(k_rows, tl.minimum(row0 - q_row + BM, q_rows) + high)
            for start in range(begin, end, BN):
                j = start + tl.arange(0, BN)
                key = (k_row + j).to(tl.int64) * (HEADS // GROUP) + head // GROUP
                kt, vt = _rows(k, key, j < k_rows, d, DIM), _rows(v, key, j < k_rows, e, DIM_V)
                x, visible = _scores(qt, kt, i, j, low, high, k_rows, distance, slope, inside, SCALE, ALIBI, DOT)
                dp = tl.dot(dot, tl.trans(vt), input_precision=DOT)
                _, ds = _weights(x, visible, high_lse, dp, sums, SCALE)
                acc += tl.dot(ds.to(kt.dtype), kt, input_precision=DOT)
        tl.store(dq + offsets[:, None] * DIM + d[None, :], acc, mask=wide)


@triton.jit(do_not_specialize=["keys", "count"])
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, visits, blocks, slopes, keys, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIBI: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv, fp32 [keys, HEADS // GROUP, DIM and DIM_V], for each (block of BN keys, key head); the query
    heads of a group are adjacent."""
    for program in range(tl.program_id(0), count * (HEADS // GROUP), tl.num_programs(0)):
        block, kv_head = program % count, program // count
        row0 = tl.load(blocks + 4 * block)
        first, last = tl.load(blocks + 4 * block + 1), tl.load(blocks + 4 * block + 2)
        s = row0 + tl.arange(0, BN)
        row_in_range = s < keys
        d, e = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
        offsets = (s.to(tl.int64) * (HEADS // GROUP) + kv_head)[:, None]
        wide, wide_v = row_in_range[:, None] & (d < DIM)[None, :], row_in_range[:, None] & (e < DIM_V)[None, :]
        kt = tl.load(k + offsets * DIM + d[None, :], mask=wide, other=0.0)
        vt = tl.load(v + offsets * DIM_V + e[None, :], mask=wide_v, other=0.0)
        acc = tl.load(dk + offsets * DIM + d[None, :], mask=wide, other=0.0)
        acc_v = tl.load(dv + offsets * DIM_V + e[None, :], mask=wide_v, other=0.0)
        for visit in range(first, last):
            q_row, q_rows, k_row, k_rows, low, high, distance = _tile(visits, visit)
            j = s - k_row
            known = tl.where(j >= 0, j, k_rows)  # keys before the tile are moved behind it, where nothing is visible
            begin = tl.maximum(0, tl.maximum(row0 - k_row, 0) - high)
            end = tl.minimum(q_rows, tl.minimum(row0 - k_row + BN, k_rows) - low)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                slope = 0.0
                if ALIBI:
                    slope = tl.load(slopes + head)
                for start in range(begin, end, BM):
                    i = start + tl.arange(0, BM)
                    inside = i < q_rows
                    row = (q_row + i).to(tl.int64) * HEADS + head
                    qt = tl.load(
                        q + row[:, None] * DIM + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0
                    )
                    dot = tl.load(
                        dout + row[:, None] * DIM_V + e[None, :], mask=inside[:, None] & (e < DIM_V)[None, :], other=0.0
                    )
                    high_lse = tl.load(lse + row, mask=inside, other=0.0) * LOG2E
                    sums = tl.load(delta + row, mask=inside, other=0.0)
                    x, visible = _scores(
                        qt, kt, i, known, low, high, k_rows, distance, slope, inside, SCALE, ALIBI, DOT
                    )
                    dp = tl.dot(dot, tl.trans(vt), input_precision=DOT)
                    p, ds = _weights(x, visible, high_lse, dp, sums, SCALE)
                    acc_v += tl.dot(tl.trans(p).to(dot.dtype), dot, input_precision=DOT)
                    acc += tl.dot(tl.trans(ds).to(qt.dtype), qt, input_precision=DOT)
        tl.store(dk + offsets * DIM + d[None, :], acc, mask=wide)
        tl.store(dv + offsets * DIM_V + e[None, :], acc_v, mask=wide_v)


@triton.jit(do_not_specialize=["rows", "blocks"])
def delta_kernel(out, dout, delta, rows, blocks, DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK: tl.constexpr):
    """Set delta, fp32 [rows], to the sum of out * dout over channels; out, dout: [rows, DIM_V]."""
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)
        e = tl.arange(0, WIDTH_V)
        row_in_range = r < rows
        mask = row_in_range[:, None] & (e < DIM_V)[None, :]
        offsets = r.to(tl.int64)[:, None] * DIM_V + e[None, :]
        product = tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(
            dout + offsets, mask=mask, other=0.0
        ).to(tl.float32)
        tl.store(delta + r, tl.sum(product, 1), mask=row_in_range)
