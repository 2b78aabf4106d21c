"""Test doubles of flash attention of packed sequences, torch's and flash-attn-4's, on CPU tensors: their documented meaning
in dense arithmetic, and their rules. Dropped weights are drawn from a seed that counts up."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mindspeed_cp.ops.attention.cuda.flash4 import HEAD_DIMS
from mindspeed_cp.ops.attention.cuda.flash_attention import FlashArguments, RngState


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
        return gradients(q, k, v, dout, out, lse, arguments, rng_state)


class DoubleFlash4(ModuleType):
    """The module flash_attn.cute.interface of flash-attn-4 4.0.0b36: what is called of it, in dense arithmetic of fp64.

    Attributes:
        calls: shapes and keywords of every call.
        deterministic: what the last backward was asked for.
    """

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[tuple[tuple[int, ...], dict[str, object]]] = []
        self.deterministic = False

    def _flash_attn_fwd(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, *, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        arguments = self._arguments(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size_left, window_size_right,
        )  # fmt: skip
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
        lse = torch.full((q.shape[1], len(q)), -torch.inf)
        for (rows, keys), x, seen, _ in parts(q, k, arguments, ()):
            lse[:, rows] = torch.where(seen.any(-1), x.logsumexp(-1), -torch.inf).float()
            p = (x - x.logsumexp(-1, keepdim=True)).exp().nan_to_num(0)
            out[rows] = torch.einsum("hij,jhd->ihd", p, grouped(v[keys], q))
        return out.to(q.dtype), lse if return_lse else None, None, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False,
    ):  # fmt: skip
        arguments = self._arguments(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size_left, window_size_right,
        )  # fmt: skip
        self.deterministic = deterministic
        assert out.shape == dout.shape == (*q.shape[:2], v.shape[2]) and out.dtype == dout.dtype == q.dtype
        assert lse.shape == (q.shape[1], len(q)) and lse.dtype == torch.float32
        return gradients(q, k, v, dout, out, lse, arguments, ())

    def _arguments(self, q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal, left, right) -> FlashArguments:
        """Check what the package checks, and that the widths are those at which its gradients are right."""
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
        assert (q.shape[2], v.shape[2]) in HEAD_DIMS and k.shape[2] == q.shape[2]
        assert k.shape[:2] == v.shape[:2] and q.shape[1] % k.shape[1] == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q[-1] == len(q) and cu_k[-1] == len(k)
        assert cu_q.diff().max() <= longest_q and cu_k.diff().max() <= longest_k
        assert not (causal and right is not None), "causal is a window to the right of 0"
        self.calls.append((tuple(q.shape), {"causal": causal, "window": (left, right)}))
        limits = (-1 if left is None else left, 0 if causal else -1 if right is None else right)
        return Flash4Arguments(cu_q, cu_k, longest_q, longest_k, limits, scale, 0.0)


class Flash4Arguments(FlashArguments):
    """Arguments whose window means what it says, whatever the lengths."""


def gradients(q, k, v, dout, out, lse, arguments: FlashArguments, rng_state: RngState) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in dense arithmetic, from the global out and lse."""
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
    left, right = arguments.window if isinstance(arguments, Flash4Arguments) else as_torch_reads(arguments)
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
