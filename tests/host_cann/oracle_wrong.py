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
        layout: of the sound call, "TND" or "BNSD".
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
    x = torch.randn(*((32, 4, 32) if layout == "TND" else (1, 4, 32, 32)), generator=g)
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
CAUSAL = torch.ones(32, 32, dtype=torch.bool).triu(1)
NAN = torch.full((4,), torch.nan)
UPPER = dict(sparse_mode=3, atten_mask=compressed(2048))
ALIBI = dict(pse=SLOPES, pse_type=2)
SHORT_KEYS = dict(key=rows(28, 4, 32), value=rows(28, 4, 32), actual_seq_kvlen=[16, 28])  # 16 and 12 keys

WRONG = [
    # types, heads, sizes
    Wrong("types differ", "share one type", dict(key=rows(32, 4, 32, dtype=torch.bfloat16))),
    Wrong("fp64", "share one type", dict(query=rows(32, 4, 32, dtype=torch.float64))),
    Wrong("4 dimensions", "TND takes tensors of 3", dict(query=rows(1, 32, 4, 32))),
    Wrong("3 dimensions", "BNSD takes tensors of 4", dict(query=rows(4, 32, 32)), "BNSD", host="Dimension out of range"),
    Wrong("another head_num", "head_num is 8", dict(head_num=8)),
    Wrong("no heads", "head_num is 0", dict(head_num=0), host="head_num must > 0"),
    Wrong("257 heads", "valid: 1 to 256", dict(query=rows(32, 257, 8), head_num=257)),
    Wrong("3 key heads for 4", "no multiple of key heads 3", dict(key=rows(32, 3, 32), value=rows(32, 3, 32))),
    Wrong("key and value heads", "key has 2 heads, value 4", dict(key=rows(32, 2, 32))),
    Wrong("Dk is not Dq", "Dq == Dk >= Dv", dict(key=rows(32, 4, 16))),
    Wrong("Dv above Dk", "Dq == Dk >= Dv", dict(value=rows(32, 4, 64))),
    Wrong("head size 769", "valid: 1 to 768", dict(query=rows(32, 4, 769))),
    Wrong("layout", "input_layout is 'NBSD'", dict(input_layout="NBSD"), "BNSD", host="input_layout should be"),
    Wrong("key and value rows", "key has 30 rows, value 32", dict(key=rows(30, 4, 32), actual_seq_kvlen=[20, 30])),
    Wrong("padding mask", "padding_mask is not supported", dict(padding_mask=rows(32, 32))),
    Wrong("inner_precise", "inner_precise is 5", dict(inner_precise=5)),
    # lengths
    Wrong("no lengths", "must have the same length and not be empty", dict(actual_seq_qlen=None), host="cannot be empty"),
    Wrong("fewer query lengths", "must have the same length", dict(actual_seq_qlen=[32]), host="must be the same"),
    Wrong("lengths, not ends", "cumulative ends", dict(actual_seq_qlen=[20, 12], actual_seq_kvlen=[20, 12])),
    Wrong("a leading 0, no end", "rows of no sequence", dict(actual_seq_qlen=[0, 20], actual_seq_kvlen=[0, 20])),
    Wrong("queries without keys", "has 20 queries but no keys", dict(actual_seq_kvlen=[0, 32])),
    Wrong("2049 sequences", "at most 2048", dict(query=rows(2049, 1, 8), head_num=1, actual_seq_qlen=[*range(1, 2050)], actual_seq_kvlen=[*range(1, 2050)])),
    Wrong("lengths in BNSD", "not modelled: actual_seq", dict(actual_seq_qlen=[32], actual_seq_kvlen=[32]), "BNSD"),
    # masks and sparse modes
    Wrong("mode 9", "sparse_mode is 9", dict(sparse_mode=9), host="sparse_mode value must be in range"),
    Wrong("mode 5", "sparse_mode is 5", dict(sparse_mode=5), host="sparse_mode value must be in range"),
    Wrong("mode 7", "sparse_mode is 7", dict(sparse_mode=7), "BNSD", host="sparse_mode value must be in range"),
    Wrong("mode 3, full mask", "atten_mask has shape", dict(sparse_mode=3, atten_mask=CAUSAL)),
    Wrong("mode 3, another pattern", "must be 1 above the diagonal", dict(sparse_mode=3, atten_mask=~compressed(2048))),
    Wrong("mode 3, fewer keys", "Sq <= Skv", UPPER | SHORT_KEYS),
    Wrong("mode 1, mask of the shorter sequence", r"valid: \[\[20, 20\]", dict(sparse_mode=1, atten_mask=CAUSAL[:12, :12])),
    Wrong("mode 1, mask of all rows", "not modelled: atten_mask in TND", dict(sparse_mode=1, atten_mask=CAUSAL)),
    Wrong("mode 1, a row of ones", "every key masked", dict(sparse_mode=1, atten_mask=torch.ones(20, 20, dtype=torch.bool))),
    Wrong("mode 1, a row of ones", "inner_precise 2", dict(sparse_mode=1, atten_mask=torch.ones(32, 32, dtype=torch.bool)), "BNSD"),
    Wrong("mode 0, mask against next_tokens", "outside pre_tokens", dict(atten_mask=torch.zeros(20, 20, dtype=torch.bool), next_tokens=0)),
    Wrong("fp32 mask", "must be bool or uint8", dict(sparse_mode=1, atten_mask=rows(20, 20))),
    Wrong("mode 4, no overlap", "must overlap", UPPER | dict(sparse_mode=4, pre_tokens=3, next_tokens=-4)),
    Wrong("mode 4, blind rows", "every key masked", UPPER | dict(sparse_mode=4, pre_tokens=9, next_tokens=-1)),
    Wrong("mode 6, prefix out of range", "prefix is 30", dict(sparse_mode=6, atten_mask=compressed(3072), prefix=[5, 30])),
    Wrong("mode 6, prefix missing", "one number for each", dict(sparse_mode=6, atten_mask=compressed(3072))),
    Wrong("mode 7, tokens", "pre_tokens is 5", UPPER | dict(sparse_mode=7, pre_tokens=5, next_tokens=0)),
    Wrong("mode 7, keys ahead", "next_tokens is 3", UPPER | dict(sparse_mode=7, pre_tokens=40, next_tokens=3)),
    Wrong("mode 7, fewer keys", "needs Sq <= Skv", UPPER | dict(sparse_mode=7, pre_tokens=40, next_tokens=0, actual_seq_qlen=[32, 32])),
    Wrong("mode 8, tokens", "pre_tokens is 5", UPPER | dict(sparse_mode=8, pre_tokens=5, next_tokens=0)),
    # pse
    Wrong("pse_type 4", "pse_type is 4", dict(pse=SLOPES, pse_type=4)),
    Wrong("pse_type 2 without slopes", "pse_type 2 needs pse", dict(pse_type=2)),
    Wrong("pse_type 0 without pse", "pse_type 0 needs pse", dict(pse_type=0)),
    Wrong("slopes in bf16", "must be float32", dict(pse=SLOPES.bfloat16(), pse_type=2)),
    Wrong("slopes of other heads", "slopes have shape", dict(pse=SLOPES[:2].clone(), pse_type=2)),
    Wrong("slopes that are no numbers", "not finite", dict(pse=NAN, pse_type=2)),
    Wrong("slopes, Sq is not Skv", "needs Sq == Skv", ALIBI | SHORT_KEYS),
    Wrong("slopes, a sequence without queries", "length 0", ALIBI | dict(actual_seq_qlen=[0, 32], actual_seq_kvlen=[4, 32])),
    Wrong("slopes in mode 7", "takes no pse", UPPER | ALIBI | dict(sparse_mode=7, pre_tokens=40, next_tokens=0)),
    Wrong("slopes in mode 8 with a start", "Sq 20 .* is not Skv 20", UPPER | ALIBI | dict(sparse_mode=8, pre_tokens=40, next_tokens=0, q_start_idx=[3], kv_start_idx=[0])),
    Wrong("negative start", "not modelled: negative", ALIBI | dict(q_start_idx=[-3], kv_start_idx=[0])),
    Wrong("external bias in TND", "not modelled: external pse in TND", dict(pse=rows(1, 4, 1024, 20), pse_type=1)),
    Wrong("bias of another shape", "pse has shape", dict(pse=rows(1, 4, 20, 20), pse_type=1)),
    Wrong("bias of another type", "type of query", dict(pse=rows(1, 4, 32, 32, dtype=torch.bfloat16)), "BNSD"),
    Wrong("bias of another shape", "pse has shape", dict(pse=rows(4, 32, 32)), "BNSD"),
    # dropout
    Wrong("keep_prob 0", "keep_prob is 0", dict(keep_prob=0.0), host="keep_prob value must be in range"),
    Wrong("keep_prob above 1", "keep_prob is 1.5", dict(keep_prob=1.5), host="keep_prob value must be in range"),
    Wrong("softmax_layout", "softmax_layout is 'SBH'", dict(softmax_layout="SBH"), host="only supported softmax_layout=TND"),
    Wrong("softmax_layout in BNSD", "softmax_layout is 'TND'", dict(softmax_layout="TND"), "BNSD", host="softmax_layout=TND only supported"),
]  # fmt: skip
