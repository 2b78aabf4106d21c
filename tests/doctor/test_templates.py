"""Which template a call takes, at the borders that CANN's sources have, and that the doctor's rows reach all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_cp.doctor.cann_templates import (
    SOURCES,
    CallShape,
    describe_templates,
    forward_template,
    gradient_template,
)
from mindspeed_cp.doctor.habit_cases import HABIT_CASES, HabitCase
from mindspeed_cp.doctor.habits import habit_calls
from mindspeed_cp.doctor.operator import DTYPES
from tests.doctor.habit_calls import calls_of

BASIC, NEWER = SOURCES
CAUSAL = CallShape("bf16", "TND", 2, 1, 64, 64, (1100, 1000), (1100, 1000), sparse_mode=3, has_mask=True)


@pytest.mark.parametrize(
    ("change", "template"),
    [
        ({}, ("basic", "SameAB")),
        ({"q_lengths": (1047, 1000), "kv_lengths": (1047, 1000)}, ("basic", "Bn2gs1s2")),  # a mean of 1023
        ({"q_lengths": (1047, 1000)}, ("unpadded", "Bn2gs1s2")),
        ({"q_lengths": (1048, 1000)}, ("SameAB", "SameAB")),
        ({"q_lengths": (2100, 0), "kv_lengths": (2100, 100)}, ("SameAB", "SameAB")),  # the last has no queries
        ({"sparse_mode": 4}, ("SameAB", "SameAB")),
        ({"dtype": "fp32"}, ("Bn2gs1s2", "Bn2gs1s2")),
        ({"dtype": "fp32", "q_lengths": (900, 100)}, ("unpadded", "Bn2gs1s2")),
        ({"has_bias": True}, ("SameAB", "SameAB")),
        ({"head_dim": 72, "head_dim_v": 72}, ("SameAB", "SameAB")),
        ({"head_dim": 192, "head_dim_v": 128}, ("SameAB", "SameAB")),
        ({"heads": 4, "head_dim": 128, "head_dim_v": 128}, ("basic", "Bn2gs1s2")),
        ({"heads": 3, "head_dim": 128, "head_dim_v": 128}, ("basic", "SameAB")),
        ({"heads": 4, "head_dim": 128, "head_dim_v": 128, "q_lengths": (1050, 1050)}, ("SameAB", "SameAB")),
        ({"q_lengths": (300, 300), "kv_lengths": (300, 300), "sparse_mode": 4, "kv_heads": 2}, ("BSH: Bn2", "BSH: Bn2")),
        ({"q_lengths": (300, 300), "kv_lengths": (300, 300), "sparse_mode": 4}, ("BSH: Bn2gs1s2", "BSH: Bn2gs1s2")),
        ({"layout": "BSND", "q_lengths": (29,), "kv_lengths": (29,)}, ("B", "B")),
        ({"layout": "BSND", "q_lengths": (1,), "kv_lengths": (1024,), "heads": 1}, ("BN", "BN")),
        ({"layout": "BSND", "q_lengths": (300,) * 9, "kv_lengths": (300,) * 9, "heads": 5, "kv_heads": 5}, ("Bn2", "Bn2")),
        ({"layout": "BSND", "q_lengths": (1024,), "kv_lengths": (300,)}, ("SameAB", "SameAB")),
        ({"deterministic": True}, ("SameAB deterministic", "basic deterministic")),
        ({"deterministic": True, "sparse_mode": 4}, ("SameAB deterministic", "SameAB deterministic")),
        ({"deterministic": True, "dtype": "fp32"}, ("Bn2 deterministic", "Bn2 deterministic")),
        ({"deterministic": True, "q_lengths": (1023,), "kv_lengths": (1023,)}, ("Bn2 deterministic", "Bn2 deterministic")),
    ],
)  # fmt: skip
def test_gradient(change: dict, template: tuple[str, str]) -> None:
    call = replace(CAUSAL, **change)
    assert (gradient_template(call, BASIC), gradient_template(call, NEWER)) == template


EQUAL = {"q_lengths": (300, 300), "kv_lengths": (300, 300), "head_dim": 128, "head_dim_v": 128}
ROWS = (520, *(1920,) * 4)


@pytest.mark.parametrize(
    ("change", "template"),
    [
        ({}, ("varlen", "varlen")),
        (EQUAL, ("varlen", "BSH: S1Bn2gs1")),
        (EQUAL | {"q_lengths": (300, 299)}, ("varlen", "varlen")),
        (EQUAL | {"head_dim_v": 64}, ("varlen", "varlen")),
        (EQUAL | {"has_bias": True}, ("varlen", "varlen")),
        (EQUAL | {"q_lengths": (1025,), "kv_lengths": (1025,)}, ("varlen", "BSH: S1s2Bn2gs1")),
        ({"q_lengths": ROWS, "kv_lengths": ROWS}, ("varlen SameAB", "varlen SameAB")),
        ({"q_lengths": ROWS, "kv_lengths": ROWS, "dtype": "fp32"}, ("varlen", "varlen")),
        ({"q_lengths": ROWS, "kv_lengths": ROWS, "heads": 1}, ("varlen", "varlen")),
        ({"q_lengths": ROWS[1:], "kv_lengths": ROWS[1:]}, ("varlen", "varlen")),  # 7,680 rows
        ({"q_lengths": (5121,), "kv_lengths": (5121,)}, ("varlen SameAB", "varlen SameAB")),
        ({"layout": "BSND", "head_dim": 96, "q_lengths": (9,), "kv_lengths": (512,)}, ("SameAB", "SameAB")),
        ({"layout": "BSND", "head_dim": 192, "q_lengths": (9,), "kv_lengths": (1025,)}, ("SameAB", "SameAB")),
        ({"layout": "BSND", "q_lengths": (9,), "kv_lengths": (1024,)}, ("S1Bn2gs1", "S1Bn2gs1")),
    ],
)  # fmt: skip
def test_forward(change: dict, template: tuple[str, str]) -> None:
    call = replace(CAUSAL, **change)
    assert (forward_template(call, BASIC), forward_template(call, NEWER)) == template


def test_where_the_sources_differ_both_are_named() -> None:
    assert describe_templates([CAUSAL, CAUSAL]) == ["forward varlen", "gradient basic or SameAB"]


def reached(cases: tuple[HabitCase, ...], dtype: str, source: str) -> set[str]:
    calls = [call for case in cases for call in calls_of(case, dtype)]
    return {f"forward {forward_template(call, source)}" for call in calls} | {
        f"gradient {gradient_template(call, source)}" for call in calls
    }


def test_rows_reach_every_template() -> None:
    """Those that calls of the backend can reach; the names are those of the table in cann_templates.py."""
    names = {
        *("varlen", "varlen SameAB", "SameAB", "S1s2Bn2gs1", "S1Bn2gs1", "BSH: S1Bn2gs1"),
    }
    gradients = {
        *("Bn2 deterministic", "basic", "basic deterministic", "SameAB deterministic", "unpadded", "B", "SameAB"),
        *("Bn2gs1s2", "BSH: Bn2"),
    }
    wanted = {f"forward {name}" for name in names} | {f"gradient {name}" for name in gradients}
    for dtype in ("bf16", "fp16"):
        assert wanted <= reached(HABIT_CASES, dtype, BASIC) | reached(HABIT_CASES, dtype, NEWER)
    fp32 = {
        "gradient Bn2 deterministic",
        "gradient unpadded",
        "gradient Bn2gs1s2",
        "gradient BSH: Bn2",
        "forward varlen",
    }
    assert fp32 <= reached(HABIT_CASES, "fp32", BASIC)


def named(words: str) -> tuple[HabitCase, ...]:
    cases = tuple(case for case in HABIT_CASES if words in case.case.name)
    assert cases, words
    return cases


@pytest.mark.parametrize(
    ("words", "template", "source"),
    [
        ("equal lengths, D 128", "forward BSH: S1Bn2gs1", NEWER),
        ("other keys than queries, mean below 1,024", "gradient unpadded", BASIC),
        ("other keys than queries, mean from 1,024", "gradient SameAB", BASIC),
        ("window, mean below 1,024", "gradient unpadded", BASIC),
        ("window, mean from 1,024", "gradient SameAB", BASIC),
        ("window, equal lengths", "gradient BSH: Bn2", BASIC),
        ("heads of 192 and 128, mean from 1,024", "gradient SameAB", BASIC),
        ("group of 4, D 128, mean from 1,024", "gradient Bn2gs1s2", NEWER),
        ("more than 8,192 rows", "forward varlen SameAB", BASIC),
        ("ALiBi, squares from 1,024", "gradient SameAB", BASIC),
        ("deterministic, rows below 1,024", "gradient Bn2 deterministic", BASIC),
        ("deterministic, rows from 1,024", "gradient basic deterministic", NEWER),
        ("masks, from 1,024, D 96", "forward SameAB", BASIC),
    ],
)
def test_a_row_reaches_what_its_name_says(words: str, template: str, source: str) -> None:
    for case in named(words):
        if case.case.name.startswith(words):
            assert template in reached((case,), "bf16", source)


def test_rows_of_a_variant_have_the_calls_that_it_is_about() -> None:
    for case in HABIT_CASES:
        calls = calls_of(case, "bf16")
        assert all((call.layout == "BSND") == (case.lowering == "masks") for call in calls)
        assert all(call.deterministic == case.condition.deterministic for call in calls)
        has_gaps = any(0 in call.q_lengths for call in calls)
        assert has_gaps == (case.option == "key_gaps" and case.variant == "skipped"), case.case.name
        assert any(call.has_bias for call in calls) == (case.option == "alibi") == case.condition.alibi
        if case.condition.widths is not None:
            widths = {(call.head_dim, call.head_dim_v) for call in calls}
            assert widths == {tuple(case.condition.widths)}
        if case.variant == "shared":
            assert any(len(call.q_lengths) > 1 for call in calls)
        assert all(call.heads // call.kv_heads >= case.condition.min_group for call in calls)
        if case.condition.window:
            assert case.case.attention.window is not None


def test_every_variant_has_rows_in_every_type_and_every_name_is_one_row() -> None:
    rows = [(case.option, case.variant, case.lowering, dtype) for case, dtype, _ in habit_calls()]
    variants = {
        *(("lowering", name, name) for name in ("tnd", "masks")),
        *(("alibi", name, "tnd") for name in ("split", "shared")),
        *(("statistics", name, lowering) for name in ("max_sum", "lse") for lowering in ("tnd", "masks")),
        *(("key_gaps", name, "tnd") for name in ("copied", "skipped")),
    }
    assert {row[:3] for row in rows} == variants
    assert all((*variant, dtype) in rows for variant in variants for dtype in DTYPES)
    names, counts = np.unique([case.case.name for case in HABIT_CASES], return_counts=True)
    assert (counts == 1).all(), names[counts > 1]
