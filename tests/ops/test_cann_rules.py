"""CANN's rules: each is broken by a call that breaks nothing else, and sound calls break none."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from tests.host_cann import cann_rules
from tests.host_cann.cann_calls import AttentionCall, BatchCall, Item, Shaped, UpdateCall
from tests.host_cann.cann_rule import SOURCES

UPPER = Shaped((2048, 2048), "bool")
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
    """A call in BSND, 2 entries of 12 queries and 20 keys, sound but for what is changed."""
    key = rows(2, 20, 2, 16)
    return replace(AttentionCall(rows(2, 12, 4, 16), key, key, 4, "BSND"), **change)


def update(**change: Any) -> UpdateCall:
    """A sound update of 6 rows and 2 heads, but for what is changed."""
    parts = (rows(6, 1, 128), *(rows(1, 2, 6, 8),) * 2)
    return replace(UpdateCall(parts, parts), **change)


def batch(*items: tuple[Any, ...], **change: Any) -> BatchCall:
    """A list of rank 1 of 4, sound but for what is changed."""
    return replace(BatchCall([Item(*x, *(8, 4)[len(x) - 2 :]) for x in items], 1, 4), **change)


TWO, BAND = ((20, 20), (12, 12)), dict(sparse_mode=4, atten_mask=UPPER)
WIDE = rows(32, 4, 776)
TALL = rows(1_000_001, 4, 16)
ONES = tuple(range(1, 2050))

#: Rule -> a call that breaks it alone.
BROKEN = {
    "dtype": packed(*TWO, key=rows(32, 2, 16, dtype="bfloat16")),
    "heads": packed(*TWO, query=rows(32, 257, 16), head_num=257),
    "dimensions": packed(*TWO, query=rows(1, 32, 4, 16)),
    "head-count": packed(*TWO, head_num=8),
    "rows": packed((1_000_001, 20), query=TALL, ends_q=(1_000_001,)),
    "group": packed(*TWO, query=rows(32, 3, 16), head_num=3),
    "key-value": packed(*TWO, value=rows(32, 4, 16)),
    "batch": padded(key=rows(3, 20, 2, 16), value=rows(3, 20, 2, 16)),
    "width": packed(*TWO, value=rows(32, 2, 32)),
    "widest": packed(*TWO, query=WIDE, key=WIDE, value=WIDE),
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
    "right-down": packed((20, 20), (12, 11), sparse_mode=3, atten_mask=UPPER),
    "band-tokens": packed((5, 9), (5, 9), pre_tokens=2, next_tokens=-3, **BAND),
    "band-rows": packed((20, 20), (12, 13), pre_tokens=9, next_tokens=-1, **BAND),
    "band-gradient": gradient(*TWO, pre_tokens=0, next_tokens=0, **BAND),
    "mask-dtype": padded(sparse_mode=1, atten_mask=rows(12, 20)),
    "mask-shape": padded(sparse_mode=1, atten_mask=rows(20, 12, dtype="bool")),
    "slopes-shape": packed(*TWO, pse=rows(2), pse_type=2),
    "pse-empty": packed((0, 0), *TWO, pse=SLOPES, pse_type=2),
    "slopes-square": packed((20, 20), (12, 13), pse=SLOPES, pse_type=2),
    "update-dtype": update(cur=(rows(6, 1, 128, dtype="bfloat16"), *(rows(1, 2, 6, 8),) * 2)),
    "update-statistics-dtype": update(cur=(rows(6, 1, 128), *(rows(1, 2, 6, 8, dtype="float16"),) * 2)),
    "update-shape": update(cur=(rows(5, 1, 128), *(rows(1, 2, 6, 8),) * 2)),
    "update-statistics-shape": update(prev=(rows(6, 1, 128), rows(1, 2, 6, 1), rows(1, 2, 6, 8))),
    "batch-dtype": batch(("send", 2, 8, 17)),
    "batch-duplicate": batch(("send", 2), ("recv", 2), ("send", 2)),
    "batch-self": batch(("send", 1, 8), ("recv", 1, 9)),
    "batch-virtual-pipeline": batch(("send", 2), virtual_stages=2),
}  # fmt: skip

#: Calls at the edge of a rule, on its inner side.
SOUND = {
    "packed": packed(*TWO),
    "padded": padded(),
    "mode 1": padded(sparse_mode=1, atten_mask=rows(12, 20, dtype="bool")),
    "gradient": gradient(*TWO),
    "dropout": gradient(*TWO, keep_prob=0.5, drop_mask=rows(272, dtype="uint8")),
    "2048 sequences": packed(*((1, 2),) * 2048),
    "1M rows": packed((1_000_000, 1_000_000)),
    "keys of no query": packed((0, 4), (20, 20), (0, 3)),
    "mode 3": packed((20, 20), (12, 13), sparse_mode=3, atten_mask=UPPER),
    "band of one key, forward": packed(*TWO, pre_tokens=0, next_tokens=0, **BAND),
    "band, gradient": gradient(*TWO, pre_tokens=1, next_tokens=0, **BAND),
    "band behind": gradient((4, 9), (6, 12), pre_tokens=8, next_tokens=-3, **BAND),
    "update": update(),
    "list": batch(("send", 2), ("recv", 2), ("send", 0), ("send", 1), ("recv", 1)),
}  # fmt: skip

SOURCE_OF = {name: source for rules in cann_rules.RULES.values() for name, source in rules}


def test_every_rule_has_its_call_and_its_source():
    assert set(BROKEN) == set(SOURCE_OF)
    assert {source.partition(": ")[0] for source in SOURCE_OF.values()} == set(SOURCES)
    assert sum(len(list(rules)) for rules in cann_rules.RULES.values()) == len(SOURCE_OF)


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_breaks_one_rule_is_told_by_its_name(name):
    call = BROKEN[name]
    assert [breach.rule for breach in cann_rules.breaches(call)] == [name]
    with pytest.raises(cann_rules.Refused) as caught:
        cann_rules.check(call)
    assert f"(rule {name}; " in str(caught.value) and SOURCE_OF[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_call_breaks_no_rule(name):
    cann_rules.check(SOUND[name])
