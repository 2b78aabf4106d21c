"""The arguments of a call of the fused attention operator, put into one form.

Whatever the layout, a call is packed rows [T, heads, dim] cut into sequences; the layouts of equal lengths (BSH, SBH,
BSND, BNSD) are packed rows whose sequences are equally long. What CANN takes is decided by cann_rules.py, before. Here
a call is refused that this model does not reproduce ("not modelled"): nothing is computed that a device might compute
differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tests.host_cann.cann_calls import AttentionCall
from tests.host_cann.cann_rule import need


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
        layout: BSH, SBH, BSND, BNSD or TND.
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


def rows_of_sequences(call: AttentionCall) -> tuple[Rows, ...]:
    """The rows of each sequence, or batch entry.

    Raises:
        Refused: rows that belong to no sequence, lengths with a layout other than TND.
    """
    if not call.packed:
        need(
            not call.ends_q and not call.ends_k, f"not modelled: actual_seq_qlen or actual_seq_kvlen with {call.layout}"
        )
        s = call.sizes
        return tuple(Rows(i * s.s1, (i + 1) * s.s1, i * s.s2, (i + 1) * s.s2) for i in range(s.batch))
    used = len(call.sequences)
    both = [(ends or ())[:used] for ends in (call.ends_q, call.ends_k)]
    for name, ends, x in (("qlen", both[0], call.query), ("kvlen", both[1], call.key)):
        need(
            ends[-1] == x.shape[0],
            f"actual_seq_{name} ends at {ends[-1]}, the tensor has {x.shape[0]} rows; not modelled: rows of no sequence",
        )
    starts = ((0, *ends) for ends in both)
    q, k = (zip(first, ends, strict=False) for first, ends in zip(starts, both, strict=True))
    return tuple(Rows(*of_q, *of_k) for of_q, of_k in zip(q, k, strict=True))


def start_numbers(call: AttentionCall) -> tuple[int, int]:
    """Positions of the first query and key: the first number of each list, where both are given.

    Raises:
        Refused: a negative one.
    """
    if not call.q_start or not call.kv_start:
        return 0, 0
    need(call.q_start[0] >= 0 and call.kv_start[0] >= 0, "not modelled: negative start index")
    return call.q_start[0], call.kv_start[0]


def check_model(call: AttentionCall) -> None:
    """Raise Refused for what CANN takes and this model does not reproduce."""
    if call.pse is not None and call.pse_type in (0, 1):
        need(not call.packed, "not modelled: external pse in TND")
        compressed = call.sizes.s1 > 1024 and call.pse.shape[2] == 1024
        need(not compressed, "not modelled: compressed pse (the last 1024 rows)")
    if call.pse is not None and call.sparse_mode == 8:
        uneven = call.sequences[0][0] != call.sequences[0][1]
        need(not uneven, "not modelled: slopes in sparse_mode 8 where queries of the first sequence are cut off")
    if call.atten_mask is not None and call.packed and call.sparse_mode in (0, 1):
        whole = [call.sizes.s1, call.sizes.s2]
        need(list(call.atten_mask.shape) == whole, f"not modelled: atten_mask in TND other than {whole}")
    need(call.keep_prob < 1 or call.drop_mask is None, "not modelled: a dropout mask with keep_prob 1")
    if call.drop_mask is not None:
        need(len(call.drop_mask.shape) == 1, "not modelled: a dropout mask of several dimensions")
