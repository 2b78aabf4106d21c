"""CANN's rules: each is broken by a call that breaks nothing else, and sound calls break none."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from tests.host_cann import cann_rules
from tests.host_cann.cann_calls import AttentionCall, BatchCall, Item, Shaped, UpdateCall
from tests.host_cann.cann_rule import IGNORED, SOURCES

UPPER = Shaped((2048, 2048), "bool")
PREFIXES = Shaped((3072, 2048), "bool")
SLOPES = Shaped((4,), "float32")


def rows(*shape: int, dtype: str = "float32") -> Shaped:
    return Shaped(shape, dtype)


def packed(*sizes: tuple[int, int], **change: Any) -> AttentionCall:
    """A call in TND of 4 query heads, 2 key heads and width 16, sound but for what is changed."""
    ends_q, ends_k = (tuple(accumulate(x)) for x in zip(*sizes, strict=True))
    key = rows(ends_k[-1], 2, 16)
    return replace(AttentionCall(rows(ends_q[-1], 4, 16), key, key, 4, "TND", ends_q=ends_q, ends_k=ends_k), **change)


def gradient(*sizes: tuple[int, int], **change: Any) -> AttentionCall:
    """Its gradient."""
    call = packed(*sizes)
    statistics = rows(call.query.shape[0], 4, 8)
    given = dict(dy=call.query, attention_in=call.query, softmax_max=statistics, softmax_sum=statistics, gradient=True)
    return replace(call, **given | change)


def padded(**change: Any) -> AttentionCall:
    """A call in BNSD, 2 entries of 12 queries and 20 keys, sound but for what is changed."""
    key = rows(2, 2, 20, 16)
    return replace(AttentionCall(rows(2, 4, 12, 16), key, key, 4, "BNSD"), **change)


def update(layout: str, /, **change: Any) -> UpdateCall:
    """A sound update of 6 rows and 2 heads, but for what is changed."""
    parts = (rows(6, 2, 64), *(rows(6, 2, 8),) * 2) if layout == "TND" else (rows(6, 1, 128), *(rows(1, 2, 6, 8),) * 2)
    lengths = dict(lengths=Shaped((3,), "int64"), ends=(0, 2, 6)) if layout == "TND" else {}
    return replace(UpdateCall(parts, parts, layout, **lengths), **change)  # type: ignore[arg-type]


def batch(*items: tuple[Any, ...], **change: Any) -> BatchCall:
    """A list of rank 1 of 4, sound but for what is changed."""
    return replace(BatchCall([Item(*x, *(8, 4)[len(x) - 2 :]) for x in items], 1, 4), **change)


TWO, BAND = ((20, 20), (12, 12)), dict(sparse_mode=4, atten_mask=UPPER)
WIDE = rows(32, 4, 776)
TALL = rows(1_000_001, 4, 16)
ONES = tuple(range(1, 2050))

#: Rule -> a call that breaks it alone.
BROKEN = {
    "layout": packed(*TWO, layout="NTD"),
    "dtype": packed(*TWO, key=rows(32, 2, 16, dtype="bfloat16")),
    "head-num": packed(*TWO, head_num=0),
    "heads": packed(*TWO, query=rows(32, 257, 16), head_num=257),
    "padding-mask": packed(*TWO, padding_mask=rows(20, 20)),
    "dimensions": packed(*TWO, query=rows(1, 32, 4, 16)),
    "head-split": AttentionCall(rows(12, 2, 66), rows(12, 2, 64), rows(12, 2, 64), 4, "SBH"),
    "head-count": packed(*TWO, head_num=8),
    "rows": packed((1_000_001, 20), query=TALL, ends_q=(1_000_001,)),
    "group": packed(*TWO, query=rows(32, 3, 16), head_num=3),
    "key-value": packed(*TWO, value=rows(32, 4, 16)),
    "batch": padded(key=rows(3, 2, 20, 16), value=rows(3, 2, 20, 16)),
    "width": packed(*TWO, value=rows(32, 2, 32)),
    "widest": packed(*TWO, query=WIDE, key=WIDE, value=WIDE),
    "inner-precise": packed(*TWO, inner_precise=3),
    "softmax-layout": padded(softmax_layout="TND"),
    "keep-prob": packed(*TWO, keep_prob=1.5, drop_mask=rows(272, dtype="uint8")),
    "drop-mask": gradient(*TWO, keep_prob=0.5),
    "drop-mask-bits": packed(*TWO, keep_prob=0.5, drop_mask=rows(271, dtype="uint8")),
    "tokens-32-bits": packed(*TWO, next_tokens=2**31),
    "statistics": gradient(*TWO, softmax_sum=None),
    "statistics-shape": gradient(*TWO, softmax_max=rows(32, 2, 8)),
    "output-gradient": gradient(*TWO, dy=rows(31, 4, 16)),
    "lengths": packed(*TWO, ends_q=(32,)),
    "cumulative": packed(*TWO, ends_q=(20, 12), ends_k=(20, 12)),
    "total": packed(*TWO, ends_q=(20, 33)),
    "sequences": packed(*TWO, query=rows(2049, 4, 16), ends_q=ONES, ends_k=(*range(1, 32), *(32,) * 2018), key=rows(2049, 2, 16), value=rows(2049, 2, 16)),
    "queries-without-keys": packed((20, 20), (12, 0)),
    "prefix-count": packed(*TWO, sparse_mode=6, atten_mask=PREFIXES),
    "prefix-range": packed(*TWO, sparse_mode=6, atten_mask=PREFIXES, prefix=(5, 13)),
    "prefix-unused": packed(*TWO, prefix=(5, 12)),
    "full-mask-tokens": packed(*TWO, atten_mask=rows(20, 20, dtype="bool"), pre_tokens=5, next_tokens=-1),
    "full-mask-gradient": gradient(*TWO, atten_mask=rows(20, 20, dtype="bool"), pre_tokens=0, next_tokens=0),
    "right-down": packed((20, 20), (12, 11), sparse_mode=3, atten_mask=UPPER),
    "band-tokens": packed((5, 9), (5, 9), pre_tokens=2, next_tokens=-3, **BAND),
    "band-rows": packed((20, 20), (12, 13), pre_tokens=9, next_tokens=-1, **BAND),
    "band-gradient": gradient(*TWO, pre_tokens=0, next_tokens=0, **BAND),
    "outer-band": packed(*TWO, sparse_mode=7, atten_mask=UPPER, pre_tokens=11, next_tokens=0),
    "outer-band-gradient": gradient(*TWO, sparse_mode=8, atten_mask=UPPER, pre_tokens=0, next_tokens=0),
    "padded-tokens": padded(sparse_mode=4, atten_mask=UPPER, pre_tokens=3, next_tokens=-4),
    "sparse-mode": padded(sparse_mode=7, atten_mask=UPPER, next_tokens=0),
    "mask-missing": packed(*TWO, sparse_mode=3),
    "mask-dtype": packed(*TWO, sparse_mode=1, atten_mask=rows(20, 20)),
    "mask-shape": gradient(*TWO, sparse_mode=1, atten_mask=rows(32, 32, dtype="bool")),
    "pse-type": packed(*TWO, pse=rows(1, 4, 1024, 20), pse_type=4),
    "pse-missing": packed(*TWO, pse_type=2),
    "pse-dtype": packed(*TWO, pse=rows(4, dtype="bfloat16"), pse_type=2),
    "pse-shape": padded(pse=rows(1, 4, 1, 20)),
    "slopes-shape": packed(*TWO, pse=rows(2), pse_type=2),
    "pse-empty": packed((0, 0), *TWO, pse=SLOPES, pse_type=2),
    "slopes-square": packed((20, 20), (12, 13), pse=SLOPES, pse_type=2),
    "pse-mode-7": packed(*TWO, sparse_mode=7, atten_mask=UPPER, next_tokens=0, pse=SLOPES, pse_type=2),
    "slopes-mode-8": packed(*TWO, sparse_mode=8, atten_mask=UPPER, pse=SLOPES, pse_type=2, q_start=(3,), kv_start=(0,)),
    "starts-both": packed(*TWO, pse=SLOPES, pse_type=2, q_start=(3,)),
    "starts-first": packed(*TWO, pse=SLOPES, pse_type=2, q_start=(3, 4), kv_start=(0, 0)),
    "starts-unused": packed(*TWO, q_start=(3,), kv_start=(0,)),
    "update-layout": update("TND", layout="BSH"),
    "update-dtype": update("SBH", cur=(rows(6, 1, 128, dtype="bfloat16"), *(rows(1, 2, 6, 8),) * 2)),
    "update-statistics-dtype": update("SBH", cur=(rows(6, 1, 128), *(rows(1, 2, 6, 8, dtype="float16"),) * 2)),
    "update-shape": update("SBH", cur=(rows(5, 1, 128), *(rows(1, 2, 6, 8),) * 2)),
    "update-statistics-shape": update("SBH", prev=(rows(6, 1, 128), rows(1, 2, 6, 1), rows(1, 2, 6, 8))),
    "update-width": update("TND", prev=(rows(6, 2, 32), *(rows(6, 2, 8),) * 2), cur=(rows(6, 2, 32), *(rows(6, 2, 8),) * 2)),
    "update-heads": update("TND", prev=(rows(6, 257, 64), *(rows(6, 257, 8),) * 2), cur=(rows(6, 257, 64), *(rows(6, 257, 8),) * 2)),
    "update-lengths": update("TND", lengths=Shaped((3,), "int32")),
    "update-leading-0": update("TND", ends=(2, 6), lengths=Shaped((2,), "int64")),
    "update-total": update("TND", ends=(0, 2, 5)),
    "batch-peer": batch(("send", 4)),
    "batch-direction": batch(("scatter", 2)),
    "batch-dtype": batch(("send", 2, 8, 17)),
    "batch-duplicate": batch(("send", 2), ("recv", 2), ("send", 2)),
    "batch-self": batch(("send", 1, 8), ("recv", 1, 9)),
    "batch-virtual-pipeline": batch(("send", 2), virtual_stages=2),
    "batch-at-once": batch(("send", 2), ranks=501, in_flight=4),
}  # fmt: skip

#: Calls at the edge of a rule, on its inner side.
SOUND = {
    "packed": packed(*TWO),
    "padded": padded(),
    "gradient": gradient(*TWO),
    "dropout": gradient(*TWO, keep_prob=0.5, drop_mask=rows(272, dtype="uint8")),
    "2048 sequences": packed(*((1, 2),) * 2048),
    "1M rows": packed((1_000_000, 1_000_000)),
    "zeros at the end": packed(*TWO, ends_q=(20, 32, 0), ends_k=(20, 32, 0)),
    "keys of no query": packed((0, 4), (20, 20), (0, 3)),
    "mode 3": packed((20, 20), (12, 13), sparse_mode=3, atten_mask=UPPER),
    "mode 3, padded, fewer keys": padded(query=rows(2, 4, 30, 16), sparse_mode=3, atten_mask=UPPER),
    "band of one key, forward": packed(*TWO, pre_tokens=0, next_tokens=0, **BAND),
    "band, gradient": gradient(*TWO, pre_tokens=1, next_tokens=0, **BAND),
    "band behind": gradient((4, 9), (6, 12), pre_tokens=8, next_tokens=-3, **BAND),
    "mode 7": packed((5, 8), (9, 12), sparse_mode=7, atten_mask=UPPER, pre_tokens=12, next_tokens=-3),
    "mode 8, slopes": packed((5, 8), (9, 9), sparse_mode=8, atten_mask=UPPER, pse=SLOPES, pse_type=2, q_start=(3,), kv_start=(0,)),
    "bias": padded(pse=rows(2, 4, 1, 20)),
    "update, SBH": update("SBH"),
    "update, TND": update("TND"),
    "list": batch(("send", 2), ("recv", 2), ("send", 0), ("send", 1), ("recv", 1)),
    "three at once": batch(("send", 2), ranks=501, in_flight=3),
    "four at once, A3": batch(("send", 2), ranks=501, in_flight=4, chip="Ascend910_9391"),
}  # fmt: skip

RULES = {rule.name: rule for several in cann_rules.OPERATORS.values() for rules in several for rule in rules}


@pytest.fixture(autouse=True)
def ignored():
    cann_rules.ignored.clear()
    yield cann_rules.ignored
    cann_rules.ignored.clear()


def test_every_rule_has_its_call_and_its_source():
    assert set(BROKEN) == set(RULES)
    assert {rule.file for rule in RULES.values()} == set(SOURCES)
    assert sum(len(list(rules)) for several in cann_rules.OPERATORS.values() for rules in several) == len(RULES)


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_breaks_one_rule_is_told_by_its_name(name, ignored):
    rule, call = RULES[name], BROKEN[name]
    assert [breach.rule.name for breach in cann_rules.breaches(call)] == [name]
    if rule.effect == IGNORED:
        cann_rules.check(call)
        assert [breach.rule.name for breach in ignored] == [name]
        return
    with pytest.raises(cann_rules.Refused) as caught:
        cann_rules.check(call)
    assert f"(rule {name}; " in str(caught.value) and rule.source in str(caught.value) and not ignored
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_call_breaks_no_rule(name):
    assert cann_rules.breaches(SOUND[name]) == []


def test_start_indices_without_slopes_pass_in_mode_8(ignored):
    """CANN reads them and uses them for slopes alone."""
    call = packed((5, 8), (9, 9), sparse_mode=8, atten_mask=UPPER, q_start=(3,), kv_start=(0,))
    cann_rules.check(call)
    assert [breach.rule.name for breach in ignored] == ["starts-unused"]
