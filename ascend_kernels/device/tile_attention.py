"""Flash attention over the tiles of a plan: forward, and backward by the statistics of the whole attention.

A tile is q rows against k rows of one document, of which row i (counted in the tile) sees the keys i + low to i + high.
A block of rows of either side visits the tiles that it lies in, one after the other; nothing is summed by two programs,
so that the same call gives the same bits.

VISIT has eight int32: q_row, q_rows, k_row, k_rows of the tile, low, high, distance from key 0 to query 0 in positions,
and a spare. BLOCKS have four: first row of the block, first and last-plus-one visit, and a spare. `count` is how
many blocks there are; a program takes one (block, head) after the other while any are left.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1.0e30)  # instead of -inf, whose difference from itself is no number


@triton.jit
def _tile(visits, visit):
    """What of a VISIT is used."""
    at = visits + 8 * visit
    q_row, q_rows, k_row, k_rows = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return q_row, q_rows, k_row, k_rows, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)


@triton.jit
def _rows(x, at, here, channels, DIM: tl.constexpr):
    """Rows of x, [rows, channels]; 0 where they or channels are none."""
    mask = here[:, None] & (channels < DIM)[None, :]
    return tl.load(x + at[:, None] * DIM + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _scores(
    q, k, i, j, low, high, keys, distance, slope, inside,
    SCALE: tl.constexpr, ALIBI: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Scores by log2, [rows, keys], and which of them are visible."""
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
    """For each (block, head) a program adds what BM rows see in this call to out and lse.

    q: [rows, HEADS, DIM]; k: [keys, HEADS // GROUP, DIM]; v: [keys, HEADS // GROUP, DIM_V].
    out: fp32 [rows, HEADS, DIM_V], lse: fp32 [rows, HEADS], read and written; rows of lse -inf may have any out.
    slopes: fp32 [HEADS].
    """
    for program in range(tl.program_id(0), count * HEADS, tl.num_programs(0)):
        block, head = program % count, program // count
        row0 = tl.load(blocks + 4 * block)
        first, last = tl.load(blocks + 4 * block + 1), tl.load(blocks + 4 * block + 2)
        r = row0 + tl.arange(0, BM)
        here = r < rows
        d, e = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
        at = r.to(tl.int64) * HEADS + head
        qt = tl.load(q + at[:, None] * DIM + d[None, :], mask=here[:, None] & (d < DIM)[None, :], other=0.0)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
        before = tl.load(lse + at, mask=here, other=float("-inf"))
        total = tl.where(before == float("-inf"), 0.0, 1.0)
        top = tl.where(total > 0.0, before * LOG2E, NOTHING)
        both = here[:, None] & (e < DIM_V)[None, :]
        acc = tl.load(out + at[:, None] * DIM_V + e[None, :], mask=both, other=0.0)
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
                most = tl.maximum(top, tl.max(x, 1))
                p = tl.where(visible, tl.exp2(x - most[:, None]), 0.0)
                decay = tl.exp2(top - most)
                total = total * decay + tl.sum(p, 1)
                acc = acc * decay[:, None] + tl.dot(p.to(vt.dtype), vt, input_precision=DOT)
                top = most
        whole = tl.where(total > 0.0, total, 1.0)
        tl.store(out + at[:, None] * DIM_V + e[None, :], acc / whole[:, None], mask=both)
        tl.store(lse + at, tl.where(total > 0.0, top * LN2 + tl.log(whole), float("-inf")), mask=here)


@triton.jit
def _weights(x, visible, lse, dp, delta, SCALE: tl.constexpr):
    """Attention weights and gradients of the scores before SCALE, [rows, keys]; lse is by log2."""
    p = tl.where(visible, tl.exp2(x - lse[:, None]), 0.0)
    return p, p * (dp - delta[:, None]) * SCALE


@triton.jit(do_not_specialize=["rows", "count"])
def queries_kernel(
    q, k, v, dout, lse, delta, dq, visits, blocks, slopes, rows, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIBI: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """For each (block, head) a program adds to dq, fp32 [rows, HEADS, DIM]. lse and delta: fp32 [rows, HEADS], of the
    whole attention; delta is the sum of dout * out over channels."""
    for program in range(tl.program_id(0), count * HEADS, tl.num_programs(0)):
        block, head = program % count, program // count
        row0 = tl.load(blocks + 4 * block)
        first, last = tl.load(blocks + 4 * block + 1), tl.load(blocks + 4 * block + 2)
        r = row0 + tl.arange(0, BM)
        here = r < rows
        d, e = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
        at = r.to(tl.int64) * HEADS + head
        wide = here[:, None] & (d < DIM)[None, :]
        qt = tl.load(q + at[:, None] * DIM + d[None, :], mask=wide, other=0.0)
        dot = tl.load(dout + at[:, None] * DIM_V + e[None, :], mask=here[:, None] & (e < DIM_V)[None, :], other=0.0)
        high_lse = tl.load(lse + at, mask=here, other=0.0) * LOG2E
        sums = tl.load(delta + at, mask=here, other=0.0)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
        acc = tl.load(dq + at[:, None] * DIM + d[None, :], mask=wide, other=0.0)
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
        tl.store(dq + at[:, None] * DIM + d[None, :], acc, mask=wide)


@triton.jit(do_not_specialize=["keys", "count"])
def keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, visits, blocks, slopes, keys, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIBI: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """For each (block of BN keys, key head) a program adds to dk and dv, fp32 [keys, HEADS // GROUP, DIM and DIM_V];
    the heads of the group follow each other."""
    for program in range(tl.program_id(0), count * (HEADS // GROUP), tl.num_programs(0)):
        block, kv_head = program % count, program // count
        row0 = tl.load(blocks + 4 * block)
        first, last = tl.load(blocks + 4 * block + 1), tl.load(blocks + 4 * block + 2)
        s = row0 + tl.arange(0, BN)
        here = s < keys
        d, e = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
        at = (s.to(tl.int64) * (HEADS // GROUP) + kv_head)[:, None]
        wide, wide_v = here[:, None] & (d < DIM)[None, :], here[:, None] & (e < DIM_V)[None, :]
        kt = tl.load(k + at * DIM + d[None, :], mask=wide, other=0.0)
        vt = tl.load(v + at * DIM_V + e[None, :], mask=wide_v, other=0.0)
        acc = tl.load(dk + at * DIM + d[None, :], mask=wide, other=0.0)
        acc_v = tl.load(dv + at * DIM_V + e[None, :], mask=wide_v, other=0.0)
        for visit in range(first, last):
            q_row, q_rows, k_row, k_rows, low, high, distance = _tile(visits, visit)
            j = s - k_row
            known = tl.where(j >= 0, j, k_rows)  # keys before the tile count as behind it: not visible
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
        tl.store(dk + at * DIM + d[None, :], acc, mask=wide)
        tl.store(dv + at * DIM_V + e[None, :], acc_v, mask=wide_v)


@triton.jit(do_not_specialize=["rows", "blocks"])
def delta_kernel(out, dout, delta, rows, blocks, DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK: tl.constexpr):
    """delta: fp32 [rows], the sum of out * dout over channels; out, dout: [rows, DIM_V]."""
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)
        e = tl.arange(0, WIDTH_V)
        here = r < rows
        mask = here[:, None] & (e < DIM_V)[None, :]
        at = r.to(tl.int64)[:, None] * DIM_V + e[None, :]
        product = tl.load(out + at, mask=mask, other=0.0).to(tl.float32) * tl.load(dout + at, mask=mask, other=0.0).to(
            tl.float32
        )
        tl.store(delta + r, tl.sum(product, 1), mask=here)
