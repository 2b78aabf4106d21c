"""A test double of flash attention of packed sequences, on CPU tensors: its documented meaning in dense arithmetic, and
its rules. Dropped weights are drawn from a seed that counts up."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.cuda.flash_operator import FlashArguments, RngState


class DoubleFlash:
    """FlashOperator in dense arithmetic of fp64. Also takes fp32, so that what is around it can be compared closely."""

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    max_head_dim = 256

    def __init__(self) -> None:
        self.seed = 0
        self.calls: list[FlashArguments] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> tuple[Tensor, Tensor, RngState]:
        check(q, k, v, arguments)
        self.calls.append(arguments)
        self.seed += 1
        rng_state = (torch.tensor([self.seed]), torch.empty(0))
        out, lse = torch.zeros(*q.shape[:2], v.shape[2]), torch.full((q.shape[1], len(q)), float("inf"))
        for (rows, keys), x, seen, keep in parts(q, k, arguments, rng_state):
            lse[:, rows] = torch.where(seen.any(-1), x.logsumexp(-1), torch.inf).float()  # what it says of blind rows
            p = (x - x.logsumexp(-1, keepdim=True)).exp().nan_to_num(0) * keep
            out[rows] = torch.einsum("hij,jhd->ihd", p, grouped(v[keys], q)).float()
        return out.to(q.dtype), lse, rng_state

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        rng_state: RngState,
        arguments: FlashArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check(q, k, v, arguments)
        assert out.shape == dout.shape == (*q.shape[:2], v.shape[2]) and out.dtype == dout.dtype == q.dtype
        assert lse.shape == (q.shape[1], len(q)) and lse.dtype == torch.float32 and lse.is_contiguous()
        assert arguments.dropout == 0 or len(rng_state) == 2
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
        delta = (out.double() * dout.double()).sum(-1).T  # [heads, rows]
        group = q.shape[1] // k.shape[1]
        for (rows, keys), x, _, keep in parts(q, k, arguments, rng_state):
            p = (x - lse[:, rows, None].double()).exp()
            do = dout[rows].double()
            dp = torch.einsum("ihd,jhd->hij", do, grouped(v[keys], q)) * keep
            ds = p * (dp - delta[:, rows, None]) * arguments.scale
            dq[rows] += torch.einsum("hij,jhd->ihd", ds, grouped(k[keys], q))
            dv[keys] += torch.einsum("hij,ihd->jhd", p * keep, do).unflatten(1, (-1, group)).sum(2)
            dk[keys] += torch.einsum("hij,ihd->jhd", ds, q[rows].double()).unflatten(1, (-1, group)).sum(2)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def check(q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> None:
    """What the operator demands."""
    for x in (q, k, v):
        assert x.dim() == 3 and x.stride(-1) == 1 and x.dtype == q.dtype and x.dtype in DoubleFlash.dtypes
        assert x.shape[2] == q.shape[2] <= DoubleFlash.max_head_dim and x.shape[2] % 8 == 0
    assert len(k) == len(v) and k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    for cu, x, most in (
        (arguments.cu_seqlens_q, q, arguments.max_seqlen_q),
        (arguments.cu_seqlens_k, k, arguments.max_seqlen_k),
    ):
        assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == len(x) and (cu.diff() >= 0).all()
        assert cu.diff().max() <= most
    assert len(arguments.cu_seqlens_q) == len(arguments.cu_seqlens_k) > 1
    assert all(far >= -1 for far in arguments.window) and 0 <= arguments.dropout < 1
    if (
        arguments.max_seqlen_q == 1
        and q.shape[1] > k.shape[1]
        and arguments.window == (-1, -1)
        and not arguments.dropout
    ):
        assert len(q) == len(arguments.cu_seqlens_q) - 1, "torch views queries as [sequences, heads]"


def parts(q: Tensor, k: Tensor, arguments: FlashArguments, rng_state: RngState):
    """For each sequence its rows and keys, scores fp64 [heads, n, m] with -inf where hidden, what is visible, and what
    the weights are multiplied by under dropout."""
    generator = torch.Generator().manual_seed(int(rng_state[0][0])) if arguments.dropout else None
    left, right = as_torch_reads(arguments)
    for a, b, c, d in zip(
        *(cu.tolist()[i:][: len(cu) - 1] for cu in (arguments.cu_seqlens_q, arguments.cu_seqlens_k) for i in (0, 1)),
        strict=True,
    ):
        keep = torch.ones(())
        if generator is not None:
            keep = (torch.rand(q.shape[1], b - a, d - c, generator=generator) >= arguments.dropout) / (
                1 - arguments.dropout
            )
        if a == b or c == d:
            continue
        x = torch.einsum("ihd,jhd->hij", q[a:b].double(), grouped(k[c:d], q)) * arguments.scale
        corner = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        j = torch.arange(d - c)
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if left >= 0:
            seen &= j >= corner - left
        if right >= 0:
            seen &= j <= corner + right
        yield (slice(a, b), slice(c, d)), x.masked_fill(~seen, -torch.inf), seen, keep


def grouped(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values in fp64 for each query head."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def as_torch_reads(arguments: FlashArguments) -> tuple[int, int]:
    """The window as FlashAttention 2's host code hands it to the kernel: a limit of max_seqlen_k is none on either side, and
    where one side alone has a limit the other gets max_seqlen_k."""
    left, right = (-1 if far >= arguments.max_seqlen_k else far for far in arguments.window)
    right = 0 if arguments.causal and arguments.max_seqlen_q > 1 else right
    if left < 0 <= right:
        return arguments.max_seqlen_k, right
    return (left, arguments.max_seqlen_k) if right < 0 <= left else (left, right)
