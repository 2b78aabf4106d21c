"""Calls that must be refused, and the words that say why: for the oracle alone and through the real torch_npu.

A call is a sound one with something changed. Where torch_npu's own code on the host refuses first, `host` is part of its
words; where neither looks, the call is no part of the operator's rules and not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.host_cann.oracle_cases import compressed


@dataclass(frozen=True)
class Wrong:
    """A call that must be refused.

    Attributes:
        name: of the test.
        says: a pattern in the oracle's refusal.
        change: arguments that replace or join those of the sound call; "query" for all of query, key and value.
        layout: of the sound call, "TND" or "BSND".
        host: a pattern in torch_npu's own refusal, where that comes first.
    """

    name: str
    says: str
    change: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "TND"
    host: str | None = None

    def __str__(self) -> str:
        return f"{self.layout}, {self.name}"


def sound(layout: str) -> dict[str, Any]:
    """Arguments of a call that is accepted: 32 queries and keys, 4 heads of size 32; in TND sequences of 20 and 12."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*((32, 4, 32) if layout == "TND" else (1, 32, 4, 32)), generator=g)
    ends = dict(actual_seq_qlen=[20, 32], actual_seq_kvlen=[20, 32]) if layout == "TND" else {}
    return dict(query=x, key=x, value=x, head_num=4, input_layout=layout, **ends)


def arguments(wrong: Wrong) -> dict[str, Any]:
    """All arguments of the wrong call."""
    change = dict(wrong.change)
    everywhere = {name: change["query"] for name in ("key", "value") if "query" in change and name not in change}
    return sound(wrong.layout) | everywhere | change


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


SLOPES = torch.full((4,), 0.5)
NAN = torch.full((4,), torch.nan)
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
    Wrong("padding mask", "not modelled: padding_mask", dict(padding_mask=rows(32, 32))),
    Wrong("inner_precise", "not modelled: inner_precise", dict(inner_precise=2)),
    Wrong("pse_type without slopes", "not modelled: pse_type", dict(pse_type=2)),
    Wrong("slopes in bf16", "not modelled: pse of bfloat16", dict(pse=SLOPES.bfloat16(), pse_type=2)),
    Wrong("one start of two", "not modelled: q_start_idx and kv_start_idx", ALIBI | dict(q_start_idx=[3])),
    Wrong("negative start", "not modelled: q_start_idx and kv_start_idx", ALIBI | dict(q_start_idx=[-3], kv_start_idx=[0])),
    Wrong("lengths in BSND", "not modelled: actual_seq", dict(actual_seq_qlen=[32], actual_seq_kvlen=[32]), "BSND"),
    Wrong("rows behind the last end", "rows of no sequence", dict(actual_seq_qlen=[0, 20], actual_seq_kvlen=[0, 20])),
    Wrong("head size 769", "valid: 1 to 768", dict(query=rows(32, 4, 769))),
    Wrong("mode 3, another pattern", "must be 1 above the diagonal", dict(sparse_mode=3, atten_mask=~compressed())),
    Wrong("mode 1, a row of ones", "inner_precise 2", dict(sparse_mode=1, atten_mask=torch.ones(32, 32, dtype=torch.bool)), "BSND"),
    Wrong("slopes that are no numbers", "not finite", dict(pse=NAN, pse_type=2)),
]  # fmt: skip
