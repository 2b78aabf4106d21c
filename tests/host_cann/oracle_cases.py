"""Calls of the fused attention operator and what they must give, by dense fp64 attention under autograd.

Shared by the tests of the oracle (CPU tensors) and of the operators behind the real torch_npu. Nothing here uses the
oracle's own arithmetic: who sees whom is written down for each case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

#: what(index, Sq, Skv, row i, column j) -> bool: query i of that sequence sees key j.
Sees = Callable[[int, int, int, Tensor, Tensor], Tensor]

LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # as for the other backends


def everything(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    return (i >= 0) & (j >= 0)


def top_left(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def bottom_right(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    return sk - j >= sq - i


def band(pre: int, following: int) -> Sees:
    """Window with its origin bottom right."""
    return lambda s, sq, sk, i, j: (i - j + sk - sq <= pre) & (j - i - sk + sq <= following)


def window(pre: int, following: int) -> Sees:
    """Window with its origin top left."""
    return lambda s, sq, sk, i, j: (i - j <= pre) & (j - i <= following)


def prefixed(prefix: Sequence[int]) -> Sees:
    return lambda s, sq, sk, i, j: (sk - j >= sq - i) | (j < prefix[s])


def speckled(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    """A full mask with no shape: column 0, and every other column in a pattern."""
    return (j == 0) | ((3 * i + 5 * j) % 7 < 3)


def one_is(index: int, this: Sees, others: Sees) -> Sees:
    return lambda s, sq, sk, i, j: (this if s == index else others)(s, sq, sk, i, j)


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        name: of the test.
        sizes: (Sq, Skv) of each sequence; of equal lengths where the layout is not TND.
        sees: who sees whom.
        mask: "none", "upper" (compressed), "prefix" (compressed), "full" [Sq, Skv] or "batch" [B, 1, Sq, Skv].
        pse: "none"; "slopes" [N] or "batch slopes" [B, N]; external: "each" [B, N, Sq, Skv], "shared" [1, N, Sq, Skv],
            "row" [B, N, 1, Skv].
        heads: query heads, key heads.
        dims: Dq = Dk, Dv.
        options: further keyword arguments of the operator.
    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    sees: Sees
    layout: str = "TND"
    mask: str = "none"
    pse: str = "none"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 8)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


UNEVEN = ((5, 8), (17, 20), (1, 9), (9, 9))
SQUARE = ((5, 5), (17, 17), (9, 9))
GAPS = ((0, 4), (5, 8), (0, 3), (9, 9), (3, 3), (0, 7))

PACKED = [
    Case("no mask", ((5, 8), (17, 3), (1, 9)), everything),
    Case("no mask, sequences without queries", GAPS, everything),
    Case("no mask, entries of no part", ((5, 8), (17, 3), (0, 0), (0, 0)), everything),
    Case("mode 0, causal", SQUARE, top_left, mask="full", options=dict(sparse_mode=0, next_tokens=0)),
    Case("mode 0, window", SQUARE, window(4, 2), mask="full", options=dict(sparse_mode=0, pre_tokens=4, next_tokens=2)),
    Case("mode 1", UNEVEN, speckled, mask="full", options=dict(sparse_mode=1)),
    Case("mode 2", ((5, 8), (17, 9), (4, 4)), top_left, mask="upper", options=dict(sparse_mode=2)),
    Case("mode 3", UNEVEN, bottom_right, mask="upper", options=dict(sparse_mode=3)),
    Case("mode 3, sequences without queries", GAPS, bottom_right, mask="upper", heads=(6, 1), options=dict(sparse_mode=3)),
    Case("mode 3, past 512 columns", ((40, 600),), bottom_right, mask="upper", heads=(1, 1), options=dict(sparse_mode=3)),
    Case("mode 3, past 2048 rows", ((2060, 2100),), bottom_right, mask="upper", heads=(1, 1), dims=(8, 8), options=dict(sparse_mode=3)),
    Case("mode 4, left window", UNEVEN, band(6, 0), mask="upper", options=dict(sparse_mode=4, pre_tokens=6, next_tokens=0)),
    Case("mode 4, both sides", SQUARE, band(3, 2), mask="upper", options=dict(sparse_mode=4, pre_tokens=3, next_tokens=2)),
    Case("mode 4, keys behind", ((4, 9), (6, 12)), band(8, -3), mask="upper", options=dict(sparse_mode=4, pre_tokens=8, next_tokens=-3)),
    Case("mode 6", UNEVEN, prefixed((4, 6, 8, 0)), mask="prefix", options=dict(sparse_mode=6, prefix=[4, 6, 8, 0])),
    Case("mode 7", ((5, 8), (17, 17), (9, 12)), one_is(2, band(12, -2), bottom_right), mask="upper", options=dict(sparse_mode=7, pre_tokens=12, next_tokens=-2)),
    Case("mode 7, one sequence", ((9, 12),), band(12, -1), mask="upper", options=dict(sparse_mode=7, pre_tokens=12, next_tokens=-1)),
    Case("mode 7, keys of no query at the end", ((5, 8), (9, 12), (0, 3)), one_is(1, band(12, -2), bottom_right), mask="upper", options=dict(sparse_mode=7, pre_tokens=12, next_tokens=-2)),
    Case("mode 8", ((5, 3), (17, 17), (9, 11)), one_is(0, band(7, 2), top_left), mask="upper", options=dict(sparse_mode=8, pre_tokens=7, next_tokens=2)),
    Case("mode 8, starts without pse", ((5, 3), (17, 17)), one_is(0, band(7, 2), top_left), mask="upper", options=dict(sparse_mode=8, pre_tokens=7, next_tokens=2, q_start_idx=[6], kv_start_idx=[0])),
    Case("mode 8, slopes", SQUARE, one_is(0, band(7, 0), top_left), mask="upper", pse="slopes", options=dict(sparse_mode=8, pre_tokens=7, next_tokens=0, pse_type=2)),
    Case("slopes, mode 3", SQUARE, bottom_right, mask="upper", pse="slopes", heads=(4, 1), options=dict(sparse_mode=3, pse_type=2, q_start_idx=[0], kv_start_idx=[0])),
    Case("slopes, no mask, keys before", SQUARE, everything, pse="slopes", options=dict(pse_type=2, q_start_idx=[40], kv_start_idx=[3])),
    Case("slopes, no mask, keys after", SQUARE, everything, pse="batch slopes", options=dict(pse_type=2, q_start_idx=[2], kv_start_idx=[31])),
    Case("slopes, no start", SQUARE, everything, pse="slopes", options=dict(pse_type=2)),
    Case("slopes of roots, mode 3", SQUARE, bottom_right, mask="upper", pse="batch slopes", options=dict(sparse_mode=3, pse_type=3, q_start_idx=[11], kv_start_idx=[4])),
    Case("slopes, mode 4", SQUARE, band(3, 0), mask="upper", pse="slopes", options=dict(sparse_mode=4, pre_tokens=3, next_tokens=0, pse_type=2)),
    Case("dropout, mode 3", UNEVEN, bottom_right, mask="upper", options=dict(sparse_mode=3, keep_prob=0.7)),
    Case("dropout, sequences without queries", GAPS, everything, heads=(3, 3), options=dict(keep_prob=0.9)),
    Case("dropout, slopes", SQUARE, everything, pse="slopes", options=dict(keep_prob=0.5, pse_type=2, q_start_idx=[40], kv_start_idx=[3])),
    Case("equal head sizes", SQUARE, bottom_right, mask="upper", heads=(2, 2), dims=(64, 64), options=dict(sparse_mode=3)),
]  # fmt: skip

TWO = ((12, 20),) * 2
EVEN = ((12, 12),) * 2
MODES = [
    Case("no mask", TWO, everything),
    Case("mode 0, causal", EVEN, top_left, mask="full", options=dict(sparse_mode=0, next_tokens=0)),
    Case("mode 0, one mask for each entry", EVEN, window(5, 1), mask="batch", options=dict(sparse_mode=0, pre_tokens=5, next_tokens=1)),
    Case("mode 1", TWO, speckled, mask="full", options=dict(sparse_mode=1)),
    Case("mode 2", TWO, top_left, mask="upper", options=dict(sparse_mode=2)),
    Case("mode 3", TWO, bottom_right, mask="upper", options=dict(sparse_mode=3)),
    Case("mode 3, fewer keys", ((20, 12),) * 2, bottom_right, mask="upper", options=dict(sparse_mode=3)),
    Case("mode 4", TWO, band(6, 1), mask="upper", options=dict(sparse_mode=4, pre_tokens=6, next_tokens=1)),
    Case("mode 4, rows that see nothing", TWO, band(14, -12), mask="upper", options=dict(sparse_mode=4, pre_tokens=14, next_tokens=-12, inner_precise=2)),
    Case("mode 5", TWO, prefixed((8, 15)), mask="batch", options=dict(sparse_mode=5, prefix=[8, 15])),
    Case("mode 6", TWO, prefixed((8, 15)), mask="prefix", options=dict(sparse_mode=6, prefix=[8, 15])),
    Case("slopes, mode 3", EVEN, bottom_right, mask="upper", pse="slopes", options=dict(sparse_mode=3, pse_type=2, q_start_idx=[37], kv_start_idx=[5])),
    Case("slopes of roots", EVEN, everything, pse="batch slopes", options=dict(pse_type=3, q_start_idx=[0], kv_start_idx=[9])),
    Case("bias, type 0", TWO, bottom_right, mask="upper", pse="each", options=dict(sparse_mode=3, pse_type=0)),
    Case("bias, type 1, shared", TWO, everything, pse="shared", options=dict(pse_type=1)),
    Case("bias, type 1, one row", TWO, everything, pse="row", options=dict(pse_type=1)),
    Case("dropout, mode 3", TWO, bottom_right, mask="upper", options=dict(sparse_mode=3, keep_prob=0.8)),
]  # fmt: skip


@cache
def compressed(rows: int) -> Tensor:
    """2048x2048, or for prefixes 3072x2048, as the vendor's documentation draws it."""
    i, j = torch.arange(rows)[:, None], torch.arange(2048)[None]
    return torch.where(i < 2048, j > i, j >= 1024)


def pack(parts: Sequence[Tensor], layout: str) -> Tensor:
    """Tensors [heads, S_i, dim] of the sequences in that layout."""
    if layout == "TND":
        return torch.cat([x.transpose(0, 1) for x in parts]).contiguous()
    x = torch.stack(list(parts))  # B N S D
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}[layout]
    x = x.permute(order).contiguous()
    return x.flatten(2) if layout in ("BSH", "SBH") else x


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q, k, v and dout in its layout; keyword arguments; and fp64 parts for the reference."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]
    parts: list[list[Tensor]]
    bias: Callable[[int, Tensor, Tensor], Tensor]
    scale: float


def inputs_of(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random tensors of the case, of that type."""
    g = torch.Generator().manual_seed(seed)
    (n, kv), (d, dv) = case.heads, case.dims

    def random(heads: int, axis: int, dim: int) -> list[Tensor]:
        return [torch.randn(heads, s[axis], dim, generator=g).to(dtype) for s in case.sizes]

    parts = [random(n, 0, d), random(kv, 1, d), random(kv, 1, dv), random(n, 0, dv)]
    q, k, v, dy = (pack(x, case.layout) for x in parts)
    options = dict(case.options)
    b, sq, sk = len(case.sizes), max(s[0] for s in case.sizes), max(s[1] for s in case.sizes)
    i, j = torch.arange(sq)[:, None], torch.arange(sk)[None]
    if case.mask in ("upper", "prefix"):
        options["atten_mask"] = compressed(2048 if case.mask == "upper" else 3072)
    elif case.mask != "none":
        hides = torch.stack([~case.sees(s, sq, sk, i, j) for s in range(b)])[:, None]
        options["atten_mask"] = hides[0, 0] if case.mask == "full" else hides
    if case.layout == "TND":
        for axis, name in ((0, "actual_seq_qlen"), (1, "actual_seq_kvlen")):
            options[name] = list(accumulate(s[axis] for s in case.sizes))
            last = len(options[name]) - 1
            while last > 0 and case.sizes[last] == (0, 0):  # entries that take no part are written as zeros
                options[name][last] = 0
                last -= 1
    if case.pse in ("slopes", "batch slopes"):
        options["pse"] = torch.rand(*([b] if case.pse == "batch slopes" else []), n, generator=g) + 0.05
    elif case.pse != "none":
        shape = {"each": (b, n, sq, sk), "shared": (1, n, sq, sk), "row": (b, n, 1, sk)}[case.pse]
        options["pse"] = torch.randn(*shape, generator=g).to(dtype)
    scale = d**-0.5
    return Inputs((q, k, v, dy), options, parts, bias_of(case, options, scale), scale)


def bias_of(case: Case, options: Mapping[str, Any], scale: float) -> Callable[[int, Tensor, Tensor], Tensor]:
    """What is added to the scaled scores of a sequence: fp64 [N, Sq, Skv], or 0."""
    if case.pse == "none":
        return lambda s, i, j: torch.zeros((), dtype=torch.float64)
    pse, kind = options["pse"].double(), options["pse_type"]
    if kind in (0, 1):
        return lambda s, i, j: pse[min(s, len(pse) - 1)] * (scale if kind == 1 else 1)
    start = options.get("q_start_idx", [0])[0] - options.get("kv_start_idx", [0])[0]

    def alibi(s: int, i: Tensor, j: Tensor) -> Tensor:
        far = (j - i - start).abs().double()
        return -(pse if pse.dim() == 1 else pse[s])[:, None, None] * (far if kind == 2 else far.sqrt())

    return alibi


def keep_of(bits: Tensor, case: Case) -> list[Tensor]:
    """The dropout mask of each sequence, fp64 [N, Sq, Skv], from the operator's bytes."""
    flat = torch.stack([(bits >> b) & 1 for b in range(8)], 1).flatten().double()
    counts = [case.heads[0] * sq * sk for sq, sk in case.sizes]
    cuts = list(accumulate(counts, initial=0))
    return [flat[a : a + c].view(case.heads[0], *s) for a, c, s in zip(cuts, counts, case.sizes, strict=False)]


def reference(case: Case, inputs: Inputs, bits: Tensor | None = None) -> dict[str, Tensor]:
    """out, dq, dk, dv in the case's layout, and lse in the operator's order of memory; all fp64.

    A row that sees nothing has out 0 and lse 0 (max -FLT_MAX and sum FLT_MAX are compared by their own test).
    """
    q, k, v, dy = ([x.double().requires_grad_() for x in part] for part in inputs.parts)
    keep_prob = case.options.get("keep_prob", 1.0)
    keep = keep_of(bits, case) if bits is not None else [torch.ones(()).double()] * len(case.sizes)
    outs, lses = [], []
    for s, (sq, sk) in enumerate(case.sizes):
        group = case.heads[0] // case.heads[1]
        kk, vv = (torch.stack([x[h // group] for h in range(case.heads[0])]) for x in (k[s], v[s]))
        i, j = torch.arange(sq)[:, None], torch.arange(sk)[None]
        sees = case.sees(s, sq, sk, i, j).expand(sq, sk)
        scores = q[s] @ kk.transpose(1, 2) * inputs.scale + inputs.bias(s, i, j)
        none = ~sees.any(-1, keepdim=True)
        scores = scores.masked_fill(~sees, -torch.inf).masked_fill(none, 0)
        weights = scores.softmax(-1).masked_fill(none, 0)
        outs.append(weights * keep[s] / keep_prob @ vv)
        lses.append(scores.detach().logsumexp(-1).masked_fill(none[:, 0], 0).flatten())
    torch.autograd.backward(outs, [x.detach() for x in dy])
    zero = [torch.zeros_like(x) if x.grad is None else x.grad for part in (q, k, v) for x in part]
    count = len(case.sizes)
    grads = [pack(zero[a : a + count], case.layout) for a in (0, count, 2 * count)]
    named = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return {"out": pack([x.detach() for x in outs], case.layout), "lse": torch.cat(lses), **named}


def bias_gradient(case: Case, inputs: Inputs) -> Tensor:
    """Gradient of the external bias of a case in BNSD whose queries see everything; fp64, of the bias's shape."""
    q, k, v, dy = (torch.stack(part).double() for part in inputs.parts)
    pse, group = inputs.options["pse"].double().requires_grad_(), case.heads[0] // case.heads[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * inputs.scale + pse * (inputs.scale if inputs.options["pse_type"] == 1 else 1)
    return torch.autograd.grad(scores.softmax(-1) @ v, pse, dy)[0]


def lse_of(largest: Tensor, total: Tensor) -> Tensor:
    """max + log(sum) of the operator's statistics, fp64, one number each, in the order of memory; rows that see nothing
    give 0."""
    m, x = (t.cpu().reshape(-1, 8).double() for t in (largest, total))
    assert torch.equal(m, m[:, :1].expand(-1, 8)) and torch.equal(x, x[:, :1].expand(-1, 8)), "not 8 times the same"
    nothing = m[:, 0] == torch.finfo(torch.float32).min
    return (m + x.log())[:, 0].masked_fill(nothing, 0)


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Each within the limit of the type, relative to the largest value of the reference or to 1; lse as for fp32."""
    assert set(got) == set(want)
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, f"{name}: {list(x.shape)} and {list(y.shape)}"
        if y.numel():
            error = float((x.detach().cpu().double() - y).abs().max()) / max(1.0, float(y.abs().max()))
            assert error <= LIMITS[torch.float32 if name == "lse" else dtype], f"{name}: {error:.2e}"
