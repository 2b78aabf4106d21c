"""Calls of the fused attention operator and what they must give, by dense fp64 attention under autograd.

Shared by the tests of the oracle (CPU tensors) and of the operators behind the real torch_npu. Nothing here uses the
oracle's own arithmetic: who sees whom is written down for each case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: what(index, Sq, Skv, row i, column j) -> bool: query i of that sequence sees key j.
Sees = Callable[[int, int, int, Tensor, Tensor], Tensor]

LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # as for the other backends


def everything(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    return (i >= 0) & (j >= 0)


def bottom_right(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    return sk - j >= sq - i


def band(pre: int, following: int) -> Sees:
    """Window with its origin bottom right."""
    return lambda s, sq, sk, i, j: (i - j + sk - sq <= pre) & (j - i - sk + sq <= following)


def speckled(s: int, sq: int, sk: int, i: Tensor, j: Tensor) -> Tensor:
    """A full mask with no shape: column 0, and every other column in a pattern."""
    return (j == 0) | ((3 * i + 5 * j) % 7 < 3)


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        name: of the test.
        sizes: (Sq, Skv) of each sequence; of equal lengths where the layout is not TND.
        sees: who sees whom.
        mask: "none", "upper" (compressed) or "full" [Sq, Skv].
        slopes: with ALiBi.
        heads: query heads, key heads.
        dims: Dq = Dk, Dv.
        options: further keyword arguments of the operator.
    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    sees: Sees
    layout: str = "TND"
    mask: str = "none"
    slopes: bool = False
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
    Case("mode 3", UNEVEN, bottom_right, mask="upper", options=dict(sparse_mode=3)),
    Case("mode 3, sequences without queries", GAPS, bottom_right, mask="upper", heads=(6, 1), options=dict(sparse_mode=3)),
    Case("mode 3, past 512 columns", ((40, 600),), bottom_right, mask="upper", heads=(1, 1), options=dict(sparse_mode=3)),
    Case("mode 4, left window", UNEVEN, band(6, 0), mask="upper", options=dict(sparse_mode=4, pre_tokens=6, next_tokens=0)),
    Case("mode 4, both sides", SQUARE, band(3, 2), mask="upper", options=dict(sparse_mode=4, pre_tokens=3, next_tokens=2)),
    Case("mode 4, keys behind", ((4, 9), (6, 12)), band(8, -3), mask="upper", options=dict(sparse_mode=4, pre_tokens=8, next_tokens=-3)),
    Case("slopes, mode 3", SQUARE, bottom_right, mask="upper", slopes=True, heads=(4, 1), options=dict(sparse_mode=3, pse_type=2, q_start_idx=[0], kv_start_idx=[0])),
    Case("slopes, keys before", SQUARE, everything, slopes=True, options=dict(pse_type=2, q_start_idx=[40], kv_start_idx=[3])),
    Case("slopes, keys after", SQUARE, everything, slopes=True, options=dict(pse_type=2, q_start_idx=[2], kv_start_idx=[31])),
    Case("slopes, mode 4", SQUARE, band(3, 0), mask="upper", slopes=True, options=dict(sparse_mode=4, pre_tokens=3, next_tokens=0, pse_type=2)),
    Case("dropout, mode 3", UNEVEN, bottom_right, mask="upper", options=dict(sparse_mode=3, keep_prob=0.7)),
    Case("dropout, slopes", SQUARE, everything, slopes=True, options=dict(keep_prob=0.5, pse_type=2, q_start_idx=[40], kv_start_idx=[3])),
]  # fmt: skip

TWO = ((12, 20),) * 2
EQUAL = [
    Case("no mask", TWO, everything, layout="BSND"),
    Case("mode 1", TWO, speckled, layout="BSND", mask="full", options=dict(sparse_mode=1)),
    Case("slopes", ((12, 12),) * 2, everything, layout="BSND", slopes=True, options=dict(pse_type=2, q_start_idx=[37], kv_start_idx=[5])),
    Case("dropout", TWO, everything, layout="BSND", options=dict(keep_prob=0.8)),
]  # fmt: skip


def case_of(name: str) -> Case:
    """The packed case of that name."""
    return next(case for case in PACKED if case.name == name)


@cache
def compressed() -> Tensor:
    """2048x2048, as the vendor's documentation draws it."""
    i, j = torch.arange(2048)[:, None], torch.arange(2048)[None]
    return j > i


def pack(parts: Sequence[Tensor], layout: str) -> Tensor:
    """Tensors [heads, S_i, dim] of the sequences in that layout."""
    rows = [x.transpose(0, 1) for x in parts]
    return (torch.cat(rows) if layout == "TND" else torch.stack(rows)).contiguous()


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q, k, v and dout in its layout; keyword arguments; and fp64 parts for the reference."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]
    parts: list[list[Tensor]]
    bias: Callable[[Tensor, Tensor], Tensor]
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
    sq, sk = max(s[0] for s in case.sizes), max(s[1] for s in case.sizes)
    i, j = torch.arange(sq)[:, None], torch.arange(sk)[None]
    if case.mask == "upper":
        options["atten_mask"] = compressed()
    elif case.mask == "full":
        options["atten_mask"] = ~case.sees(0, sq, sk, i, j)
    if case.layout == "TND":
        for axis, name in ((0, "actual_seq_qlen"), (1, "actual_seq_kvlen")):
            options[name] = list(accumulate(s[axis] for s in case.sizes))
    if case.slopes:
        options["pse"] = torch.rand(n, generator=g) + 0.05
    scale = d**-0.5
    return Inputs((q, k, v, dy), options, parts, bias_of(case, options), scale)


def bias_of(case: Case, options: Mapping[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """What is added to the scaled scores of a sequence: fp64 [N, Sq, Skv], or 0."""
    if not case.slopes:
        return lambda i, j: torch.zeros((), dtype=torch.float64)
    slopes = options["pse"].double()[:, None, None]
    start = options.get("q_start_idx", [0])[0] - options.get("kv_start_idx", [0])[0]
    return lambda i, j: -slopes * (j - i - start).abs().double()


def keep_of(bits: Tensor, case: Case) -> list[Tensor]:
    """The dropout mask of each sequence, fp64 [N, Sq, Skv], from the operator's bytes."""
    flat = torch.stack([(bits >> b) & 1 for b in range(8)], 1).flatten().double()
    counts = [case.heads[0] * sq * sk for sq, sk in case.sizes]
    cuts = list(accumulate(counts, initial=0))
    return [flat[a : a + c].view(case.heads[0], *s) for a, c, s in zip(cuts, counts, case.sizes, strict=False)]


def reference(case: Case, inputs: Inputs, bits: Tensor | None = None) -> dict[str, Tensor]:
    """out, dq, dk, dv in the case's layout, and lse in the operator's order of memory; all fp64."""
    q, k, v, dy = ([x.double().requires_grad_() for x in part] for part in inputs.parts)
    keep_prob = case.options.get("keep_prob", 1.0)
    keep = keep_of(bits, case) if bits is not None else [torch.ones(()).double()] * len(case.sizes)
    outs, lses = [], []
    for s, (sq, sk) in enumerate(case.sizes):
        group = case.heads[0] // case.heads[1]
        kk, vv = (torch.stack([x[h // group] for h in range(case.heads[0])]) for x in (k[s], v[s]))
        i, j = torch.arange(sq)[:, None], torch.arange(sk)[None]
        sees = case.sees(s, sq, sk, i, j).expand(sq, sk)
        scores = q[s] @ kk.transpose(1, 2) * inputs.scale + inputs.bias(i, j)
        scores = scores.masked_fill(~sees, -torch.inf)
        weights = scores.softmax(-1)
        outs.append(weights * keep[s] / keep_prob @ vv)
        lses.append(scores.detach().logsumexp(-1).flatten())
    torch.autograd.backward(outs, [x.detach() for x in dy])
    zero = [torch.zeros_like(x) if x.grad is None else x.grad for part in (q, k, v) for x in part]
    count = len(case.sizes)
    grads = [pack(zero[a : a + count], case.layout) for a in (0, count, 2 * count)]
    named = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return {"out": pack([x.detach() for x in outs], case.layout), "lse": torch.cat(lses), **named}


def lse_of(largest: Tensor, total: Tensor) -> Tensor:
    """max + log(sum) of the operator's statistics, fp64, one number each, in the order of memory."""
    m, x = (t.cpu().reshape(-1, 8).double() for t in (largest, total))
    assert torch.equal(m, m[:, :1].expand(-1, 8)) and torch.equal(x, x[:, :1].expand(-1, 8)), "not 8 times the same"
    return (m + x.log())[:, 0]


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Each within the limit of the type, relative to the largest value of the reference or to 1; lse as for fp32."""
    assert set(got) == set(want)
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, f"{name}: {list(x.shape)} and {list(y.shape)}"
        if y.numel():
            error = float((x.detach().cpu().double() - y).abs().max()) / max(1.0, float(y.abs().max()))
            assert error <= LIMITS[torch.float32 if name == "lse" else dtype], f"{name}: {error:.2e}"


# calls that must be refused


class Wrong(NamedTuple):
    """A call that must be refused: a sound one with something changed.

    Attributes:
        name: of the test.
        says: a pattern in the oracle's refusal.
        change: arguments that replace or join those of the sound call.
        layout: of the sound call, "TND" or "BSND".
        host: a pattern in the refusal of torch_npu's own code on the host, where that comes first.
    """

    name: str
    says: str
    change: Mapping[str, Any]
    layout: str = "TND"
    host: str | None = None

    def arguments(self) -> dict[str, Any]:
        """All arguments of the call."""
        return sound(self.layout) | self.change


def sound(layout: str) -> dict[str, Any]:
    """Arguments of a call that is accepted: 32 queries and keys, 4 heads of size 32; in TND sequences of 20 and 12."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*((32, 4, 32) if layout == "TND" else (1, 32, 4, 32)), generator=g)
    ends = dict(actual_seq_qlen=[20, 32], actual_seq_kvlen=[20, 32]) if layout == "TND" else {}
    return dict(query=x, key=x, value=x, head_num=4, input_layout=layout, **ends)


SLOPES = torch.full((4,), 0.5)
NAN = torch.full((4,), torch.nan)
WIDE = torch.zeros(32, 4, 769)
UPPER = dict(sparse_mode=3, atten_mask=compressed())
ALIBI = dict(pse=SLOPES, pse_type=2)

#: A call for each kind of refusal: by torch_npu's own checks, by what the stand-in models, by rules, by contents.
#: tests/ops/test_cann_rules.py has a call for each rule.
WRONG = [
    Wrong("no heads", "head_num is 0", dict(head_num=0), host="head_num must > 0"),
    Wrong("layout", "input_layout is 'NBSD'", dict(input_layout="NBSD"), "BSND", host="input_layout should be"),
    Wrong("no lengths", "must have the same length and not be empty", dict(actual_seq_qlen=None), host="cannot be empty"),
    Wrong("mode 9", "sparse_mode is 9", dict(sparse_mode=9), host="sparse_mode value must be in range"),
    Wrong("keep_prob 0", "keep_prob is 0", dict(keep_prob=0.0), host="keep_prob value must be in range"),
    Wrong("mode 3 without a mask", "not modelled: TND without a mask: sparse_mode is 3", dict(sparse_mode=3)),
    Wrong("mode 2", "not modelled: TND with a mask: sparse_mode is 2", UPPER | dict(sparse_mode=2)),
    Wrong("prefix", "not modelled: prefixN", dict(prefix=[5, 12])),
    Wrong("padding mask", "not modelled: padding_mask", dict(padding_mask=torch.zeros(32, 32))),
    Wrong("inner_precise", "not modelled: inner_precise", dict(inner_precise=2)),
    Wrong("pse_type without slopes", "not modelled: pse_type", dict(pse_type=2)),
    Wrong("slopes in bf16", "not modelled: pse of bfloat16", dict(pse=SLOPES.bfloat16(), pse_type=2)),
    Wrong("one start of two", "not modelled: q_start_idx and kv_start_idx", ALIBI | dict(q_start_idx=[3])),
    Wrong("negative start", "not modelled: q_start_idx and kv_start_idx", ALIBI | dict(q_start_idx=[-3], kv_start_idx=[0])),
    Wrong("lengths in BSND", "not modelled: actual_seq", dict(actual_seq_qlen=[32], actual_seq_kvlen=[32]), "BSND"),
    Wrong("rows behind the last end", "rows of no sequence", dict(actual_seq_qlen=[0, 20], actual_seq_kvlen=[0, 20])),
    Wrong("head size 769", "valid: 1 to 768", dict.fromkeys(("query", "key", "value"), WIDE)),
    Wrong("mode 3, another pattern", "must be 1 above the diagonal", dict(sparse_mode=3, atten_mask=~compressed())),
    Wrong("mode 1, a row of ones", "inner_precise 2", dict(sparse_mode=1, atten_mask=torch.ones(32, 32, dtype=torch.bool)), "BSND"),
    Wrong("slopes that are no numbers", "not finite", dict(pse=NAN, pse_type=2)),
]  # fmt: skip
