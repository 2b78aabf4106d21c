"""What the fused attention operator accepts: the arguments of a call, checked and put into one form.

Whatever the layout, a checked call is packed rows [T, heads, dim] cut into sequences; the layouts of equal lengths
(BSH, SBH, BSND, BNSD) are packed rows whose sequences are equally long. A call that the documentation forbids is
refused, and so is one that this model does not reproduce ("not modelled"): nothing is computed that a device might
compute differently.

Sources: the vendor's documentation of npu_fusion_attention(_v2) (in the package itself) and of the operators
aclnnFlashAttentionScoreV2 and aclnnFlashAttentionVarLenScoreV2; where they are silent, CANN's public kernel sources.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
MOST_ROWS = 1_000_000  # of a sequence and, in TND, of all of them
MAX_SEQUENCES = 2048  # in TND
MAX_HEADS = 256
MOST_DIM = int(os.environ.get("HOST_CANN_WIDEST", "768"))  # 512 in older releases of CANN
UNLIMITED = 2**31 - 1  # default of pre_tokens and next_tokens


class Refused(Exception):
    """The operator forbids this call, or the stand-in does not model it; the text says which."""


def need(condition: bool, text: str) -> None:
    """Refuse the call with that text unless the condition holds."""
    if not condition:
        raise Refused(text)


class Rows(NamedTuple):
    """One sequence (or batch entry): its query rows [q0, q1) and key rows [k0, k1) of the packed tensors."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Sq, Skv."""
        return self.q1 - self.q0, self.k1 - self.k0


@dataclass(frozen=True)
class Problem:
    """A call whose arguments are accepted. Contents of tensors are not looked at: on a device they may not be there
    yet when a call is checked.

    Attributes:
        layout: one of LAYOUTS.
        query, key, value: packed, [T, heads, dim], views of what was given.
        sequences: the rows of each sequence.
        heads, kv_heads: Nq and Nkv.
        scale: factor of q·k.
        pse: bias [.., Sq, Skv] (types 0, 1), slopes [N] or [B, N] (types 2, 3), or None.
        starts: positions of the first query and the first key, for types 2 and 3.
        mask: atten_mask as given, or None.
        drop_mask: bits of the dropout mask, uint8, or None where nothing is dropped.
        same_as_input: TND: the statistics are [T, N, 8] in memory, not per sequence [N, S, 8].
    """

    layout: str
    query: Tensor
    key: Tensor
    value: Tensor
    sequences: tuple[Rows, ...]
    heads: int
    kv_heads: int
    scale: float
    pse: Tensor | None
    pse_type: int
    starts: tuple[int, int]
    mask: Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    prefix: tuple[int, ...]
    inner_precise: int
    keep_prob: float
    drop_mask: Tensor | None
    same_as_input: bool

    @property
    def packed(self) -> bool:
        """Sequences of different lengths."""
        return self.layout == "TND"


def to_rows(x: Tensor, layout: str, heads: int) -> Tensor:
    """A tensor of that layout as packed rows [T, heads, dim]."""
    if layout == "TND":
        return x
    if layout in ("BSH", "SBH"):
        x = x.unflatten(2, (heads, -1))
    x = {"BSH": x, "BSND": x, "SBH": x.transpose(0, 1), "BNSD": x.transpose(1, 2)}[layout]
    return x.reshape(-1, *x.shape[2:])


def from_rows(x: Tensor, layout: str, batch: int) -> Tensor:
    """Inverse of to_rows; the result is contiguous."""
    if layout == "TND":
        return x
    x = x.unflatten(0, (batch, -1))
    x = {"BSH": x, "BSND": x, "SBH": x.transpose(0, 1), "BNSD": x.transpose(1, 2)}[layout]
    return (x.flatten(2) if layout in ("BSH", "SBH") else x).contiguous()


def checked_heads(query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> tuple[int, int, int]:
    """Number of kv heads, head_dim of q and k, head_dim of v.

    Raises:
        Refused: types, dimensions, head counts or head sizes that the operator does not take.
    """
    three = (query, key, value)
    names = ", ".join(str(x.dtype).removeprefix("torch.") for x in three)
    need(
        query.dtype in TYPES and key.dtype == value.dtype == query.dtype,
        f"query, key and value must share one type of float16, bfloat16, float32; got {names}",
    )
    dims = 4 if layout in ("BSND", "BNSD") else 3
    need(all(x.dim() == dims for x in three), f"{layout} takes tensors of {dims} dimensions")
    need(0 < head_num <= MAX_HEADS, f"head_num is {head_num}; valid: 1 to {MAX_HEADS}")
    if layout in ("BSH", "SBH"):
        need(query.shape[2] % head_num == 0, f"query's H {query.shape[2]} is no multiple of head_num {head_num}")
        d = query.shape[2] // head_num
        need(d > 0 and key.shape[2] % d == 0 and key.shape[2] > 0, f"key's H {key.shape[2]} is no multiple of D {d}")
        kv_heads = key.shape[2] // d
        need(value.shape[2] % kv_heads == 0, f"value's H {value.shape[2]} is no multiple of key's heads {kv_heads}")
        dk, dv = d, value.shape[2] // kv_heads
    else:
        axis = {"BNSD": 1, "BSND": 2, "TND": 1}[layout]
        kv_heads, d, dk, dv = key.shape[axis], query.shape[-1], key.shape[-1], value.shape[-1]
        need(query.shape[axis] == head_num, f"head_num is {head_num}, query has {query.shape[axis]} heads")
        need(value.shape[axis] == kv_heads, f"key has {kv_heads} heads, value {value.shape[axis]}")
    need(kv_heads > 0 and head_num % kv_heads == 0, f"query heads {head_num} are no multiple of key heads {kv_heads}")
    need(d == dk >= dv >= 1, f"head sizes must be Dq == Dk >= Dv; got {d}, {dk}, {dv}")
    need(d <= MOST_DIM, f"head size {d}; valid: 1 to {MOST_DIM}")
    return kv_heads, d, dv


def checked_lengths(
    query: Tensor, key: Tensor, value: Tensor, layout: str, ends_q: Sequence[int] | None, ends_k: Sequence[int] | None
) -> tuple[Rows, ...]:
    """The sequences. Raises Refused for lengths that the operator does not take."""
    if layout != "TND":
        need(not ends_q and not ends_k, f"not modelled: actual_seq_qlen or actual_seq_kvlen with {layout}")
        b, s = {"SBH": (1, 0), "BSH": (0, 1), "BSND": (0, 1), "BNSD": (0, 2)}[layout]
        batch, sq, sk = query.shape[b], query.shape[s], key.shape[s]
        need(batch == key.shape[b] == value.shape[b], "query, key and value have different batch sizes")
        need(sk == value.shape[s], f"key has {sk} rows, value {value.shape[s]}")
        need(1 <= sq <= MOST_ROWS and 1 <= sk <= MOST_ROWS, f"Sq {sq}, Skv {sk}; valid: 1 to {MOST_ROWS}")
        return tuple(Rows(i * sq, (i + 1) * sq, i * sk, (i + 1) * sk) for i in range(batch))
    need(
        bool(ends_q) and bool(ends_k) and len(ends_q or ()) == len(ends_k or ()),
        "TND: actual_seq_qlen and actual_seq_kvlen must have the same length and not be empty",
    )
    assert ends_q is not None and ends_k is not None
    need(len(ends_q) <= MAX_SEQUENCES, f"TND: {len(ends_q)} sequences; at most {MAX_SEQUENCES}")
    need(key.shape[0] == value.shape[0], f"key has {key.shape[0]} rows, value {value.shape[0]}")
    used = len(ends_q)
    while used > 1 and ends_q[used - 1] == ends_k[used - 1] == 0:
        used -= 1  # zeros at the end: entries that take no part
    for name, ends, rows in (("qlen", ends_q[:used], query.shape[0]), ("kvlen", ends_k[:used], key.shape[0])):
        rising = all(a <= b for a, b in zip((0, *ends), ends, strict=False))
        need(rising, f"actual_seq_{name} must be cumulative ends, without a leading 0; got {list(ends)[:8]}")
        need(
            ends[-1] == rows,
            f"actual_seq_{name} ends at {ends[-1]}, the tensor has {rows} rows; not modelled: rows of no sequence",
        )
        need(1 <= rows <= MOST_ROWS, f"TND: {rows} rows; valid: 1 to {MOST_ROWS}")
    starts = zip((0, *ends_q), ends_q[:used], (0, *ends_k), ends_k[:used], strict=False)
    sequences = tuple(Rows(*four) for four in starts)
    for i, x in enumerate(sequences):
        need(x.sizes[0] == 0 or x.sizes[1] > 0, f"TND: sequence {i} has {x.sizes[0]} queries but no keys")
    return sequences


def checked_pse(problem: Problem, starts_given: bool) -> None:
    """Raise Refused for a bias that the operator does not take."""
    p, pse, kind = problem, problem.pse, problem.pse_type
    need(kind in (0, 1, 2, 3), f"pse_type is {kind}; valid: 0 to 3")
    need(kind > 1 or not starts_given, f"q_start_idx and kv_start_idx mean nothing with pse_type {kind}")
    if pse is None:
        need(kind == 1, f"pse_type {kind} needs pse")
        return
    need(not p.packed or all(x.sizes[0] for x in p.sequences), "TND: no pse where a sequence has length 0")
    need(p.sparse_mode not in (7, 8), f"sparse_mode {p.sparse_mode} takes no pse")  # for 8, aclnn's text: experimental
    if kind in (0, 1):
        need(not p.packed, "not modelled: external pse in TND (the operator takes the compressed form only)")
        need(pse.dtype == p.query.dtype, "pse must have the type of query")
        b, n, (sq, sk) = len(p.sequences), p.heads, p.sequences[0].sizes
        shape = list(pse.shape)
        compressed = sq > 1024 and len(shape) == 4 and shape[2] == 1024
        need(not compressed, "not modelled: compressed pse (the last 1024 rows)")
        valid = [[b, n, sq, sk], [1, n, sq, sk], [b, n, 1, sk]]
        need(shape in valid, f"pse has shape {shape}; valid: {valid}")
        return
    need(pse.dtype == torch.float32, "slopes (pse with pse_type 2 or 3) must be float32")
    valid = [[p.heads], [len(p.sequences), p.heads]]
    need(list(pse.shape) in valid, f"pse_type {kind}: slopes have shape {list(pse.shape)}; valid: {valid}")
    uneven = [i for i, x in enumerate(p.sequences) if x.sizes[0] != x.sizes[1]]
    need(
        not uneven,
        f"pse_type {kind} needs Sq == Skv; sequences {uneven[:4]} have sizes {[p.sequences[i].sizes for i in uneven[:4]]}",
    )


def checked_starts(q_start_idx: Sequence[int] | None, kv_start_idx: Sequence[int] | None) -> tuple[int, int]:
    """Positions of the first query and key. Raises Refused where the operator would ignore what is given."""
    need(
        bool(q_start_idx) == bool(kv_start_idx),
        "q_start_idx and kv_start_idx must be given together: one without the other is ignored by the operator",
    )
    if not q_start_idx or not kv_start_idx:
        return 0, 0
    need(
        len(q_start_idx) == len(kv_start_idx) == 1,
        f"q_start_idx {list(q_start_idx)[:4]}, kv_start_idx {list(kv_start_idx)[:4]}: only the first number is read; give one",
    )
    need(q_start_idx[0] >= 0 and kv_start_idx[0] >= 0, "not modelled: negative start index")
    return q_start_idx[0], kv_start_idx[0]
