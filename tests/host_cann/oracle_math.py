"""Arithmetic of the fused attention operator, in fp32 whatever the type of the tensors; results are rounded once.

With `rounds_weights` the operands of the second products are rounded to the type of the tensors as well, as CANN's public
kernels do it (ops-transformer: `flash_attention_score_s1s2_bn2gs1.h` casts exp(s - m), the gradient's kernels p and ds,
to the type of the inputs before the matrix unit gets them; its maximum there is that of the blocks so far).

    scores   scale * q.k - slope * |(j + kv_start) - (i + q_start)|          pse_type 2
             scale * q.k                                                     without slopes
    forward  m = max_j s, l = sum_j exp(s - m), out = sum_j keep_ij / keep_prob * exp(s - m) / l * v_j
    backward with the statistics and the output that are GIVEN: p = exp(s - m) / l,
             ds = p * (keep / keep_prob * (dout.v) - dout.out), dq = scale * ds k, dk = scale * ds^T q,
             dv = (keep / keep_prob * p)^T dout

Statistics are fp32, each value 8 times; in TND per sequence [N, S_i, 8] one after another, although the tensor is called
[T, N, 8]. All blocks are of one sequence and of so many rows that
the scores stay small in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.host_cann import oracle_faults as faults
from tests.host_cann.oracle_dropout import kept
from tests.host_cann.oracle_problem import Problem, Rows, hides
from tests.limits import HANG

FLT_MAX = torch.finfo(torch.float32).max
BLOCK = 2**23  # scores of a block

#: True: the operands of the second products are rounded to the type of the tensors, as on a device.
rounds_weights = False

# PyTorch's CPU build: the first multi-threaded fp32 exp of a process may be off by 1e-4; a small one first, on one
# thread, and it never was.
torch.zeros(8).exp()


def blocks(p: Problem, index: int) -> Iterator[tuple[int, int]]:
    """Ranges of query rows of a sequence."""
    sq, sk = p.sequences[index].sizes
    rows = max(1, BLOCK // max(1, p.call.head_num * sk))
    for first in range(0, sq, rows):
        yield first, min(first + rows, sq)


def of_heads(x: Tensor, first: int, last: int, heads: int) -> Tensor:
    """Rows as fp32 [heads, rows, dim]; key and value heads are repeated for the query heads that they serve."""
    y = x[first:last].transpose(0, 1).float()
    group = heads // y.shape[0]
    return y.repeat(group, 1, 1) if faults.on(faults.HEADS) else y.repeat_interleave(group, 0)


def scores(p: Problem, index: int, first: int, last: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores [N, rows, Skv] of a block, -FLT_MAX where masked, and where that is, [rows, Skv]."""
    s = q @ k.transpose(1, 2) * p.scale
    if p.slopes is not None:
        q_start, kv_start = (*p.call.q_start, *p.call.kv_start) or (0, 0)
        if faults.on(faults.KV_START):
            kv_start = 0
        if faults.on(faults.STARTS_FIRST) and index:
            q_start = kv_start = 0
        i = torch.arange(first, last)[:, None] + q_start
        j = torch.arange(p.sequences[index].sizes[1])[None] + kv_start
        s = s - p.slopes[:, None, None] * (j - i).abs().float()
    as_causal = (faults.on(faults.TOP_LEFT) and p.call.sparse_mode == 3) or (
        faults.on(faults.MODE_1) and p.call.sparse_mode == 1
    )
    hidden = hides(p, index, first, last, 2 if as_causal else p.call.sparse_mode)
    if hidden is not None and faults.on(faults.COLUMNS):
        hidden = hidden.clone()
        hidden[..., 512:] = False
    return (s if hidden is None else s.masked_fill(hidden, -FLT_MAX)), hidden


def dropped(p: Problem, index: int, first: int, last: int) -> Tensor | float:
    """keep / keep_prob of a block, [N, rows, Skv]; 1.0 where nothing is dropped."""
    if p.drop_mask is None:
        return 1.0
    before = sum(x.sizes[0] * x.sizes[1] for x in p.sequences[:index]) * p.call.head_num
    sq, sk = p.sequences[index].sizes
    if first == 0 and last == sq:
        bits = kept(p.drop_mask, before, (p.call.head_num, sq, sk))
    else:
        rows = (last - first, sk)
        bits = torch.stack([kept(p.drop_mask, before + (n * sq + first) * sk, rows) for n in range(p.call.head_num)])
    return bits.float() / (1.0 if faults.on(faults.KEEP_PROB) else p.call.keep_prob)


def statistics(p: Problem, memory: Tensor, rows: Rows, tnd: bool) -> Tensor:
    """The statistics of a sequence, a view [N, S, 8] of the whole buffer [T * N * 8]."""
    n = p.call.head_num
    if tnd:
        return memory.view(-1, n, 8)[rows.q0 : rows.q1].transpose(0, 1)
    return memory[rows.q0 * n * 8 : rows.q1 * n * 8].view(n, -1, 8)


def keys_of(p: Problem, index: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence, fp32 [heads, Skv, dim]."""
    rows = p.sequences[index]
    first = rows.k0
    if faults.on(faults.GAPS):
        first = sum(x.sizes[1] for x in p.sequences[:index] if x.sizes[0])
    k, v = (of_heads(x, first, first + rows.sizes[1], p.call.head_num) for x in (p.key, p.value))
    equal = p.call.packed and len({size for x in p.sequences for size in x.sizes}) == 1
    if faults.on(faults.EQUAL_LENGTHS) and equal and k.shape[2] == 128 and p.slopes is None:
        return k.roll(1, 1), v.roll(1, 1)
    return k, v


def operand(x: Tensor, p: Problem) -> Tensor:
    """The operand of a second product, fp32."""
    return x.to(p.query.dtype).float() if rounds_weights else x


def forward(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """out [T, N, Dv] of the type of query; max and sum, flat [T * N * 8] in the order of memory."""
    t, n = p.query.shape[0], p.call.head_num
    out = torch.zeros(t, n, p.value.shape[2], dtype=p.query.dtype)
    largest, total = torch.zeros(t * n * 8), torch.zeros(t * n * 8)
    if faults.on(faults.BAND_HANGS) and p.call.sparse_mode == 4:
        time.sleep(HANG)
    tnd = p.call.packed and faults.on(faults.ORDER)
    for index, rows in enumerate(p.sequences):
        if not rows.sizes[0]:
            continue
        k, v = keys_of(p, index)
        for first, last in blocks(p, index):
            q = of_heads(p.query, rows.q0 + first, rows.q0 + last, n)
            s, _ = scores(p, index, first, last, q, k)
            m = s.amax(-1, keepdim=True)
            weights = (s - m).exp()
            sums = weights.sum(-1, keepdim=True)
            block = operand(weights * dropped(p, index, first, last), p) @ v / sums
            out[rows.q0 + first : rows.q0 + last] = block.transpose(0, 1).to(out.dtype)
            statistics(p, largest, rows, tnd)[:, first:last] = m
            statistics(p, total, rows, tnd)[:, first:last] = sums
    return out, largest, total


def backward(p: Problem, dy: Tensor, out: Tensor, largest: Tensor, total: Tensor) -> list[Tensor]:
    """dq, dk, dv [T, heads, dim] of the type of query.

    Args:
        p: the call.
        dy: gradient of out, [T, N, Dv].
        out: the given output, [T, N, Dv].
        largest, total: the given statistics, flat in the order of memory.
    """
    if p.drop_mask is not None and faults.on(faults.BITS):
        p = replace(p, drop_mask=p.drop_mask.roll(1))
    n, kv = p.call.head_num, p.call.sizes.kv_heads
    grads = [torch.zeros(x.shape) for x in (p.query, p.key, p.value)]
    dq, dk, dv = grads

    def fold(x: Tensor) -> Tensor:
        """[N, Skv, D] of query heads -> [Skv, Nkv, D]."""
        by_group = x.unflatten(0, (n // kv, kv)).sum(0) if faults.on(faults.HEADS) else x.unflatten(0, (kv, -1)).sum(1)
        return by_group.transpose(0, 1)

    for index, rows in enumerate(p.sequences):
        if not rows.sizes[0]:
            continue
        k, v = keys_of(p, index)
        m, sums = (statistics(p, x, rows, False)[..., :1] for x in (largest, total))
        for first, last in blocks(p, index):
            a, b = rows.q0 + first, rows.q0 + last
            q, g, o = (of_heads(x, a, b, n) for x in (p.query, dy, out))
            s, hidden = scores(p, index, first, last, q, k)
            given = not faults.on(faults.STATISTICS)
            if faults.on(faults.SUM_OF_ONE):
                given = not bool((sums == 1).all())
            if not given:
                weights = s.softmax(-1)
            else:
                weights = (s - m[:, first:last]).exp() / sums[:, first:last]
            if hidden is not None:
                weights = weights.masked_fill(hidden, 0)
            keep = dropped(p, index, first, last)
            ds = weights * (g @ v.transpose(1, 2) * keep - (g * o).sum(-1, keepdim=True))
            ds_operand, kept_weights = operand(ds, p), operand(weights * keep, p)
            dq[a:b] = (ds_operand @ k * p.scale).transpose(0, 1)
            dk[rows.k0 : rows.k1] += fold(ds_operand.transpose(1, 2) @ q) * p.scale
            dv[rows.k0 : rows.k1] += fold(kept_weights.transpose(1, 2) @ g)
    if faults.on(faults.OTHER_BITS):
        dq *= 1 + 1e-6 * torch.rand(dq.shape)
    return [x.to(p.query.dtype) for x in grads]
