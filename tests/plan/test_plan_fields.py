"""Every field of a plan's objects, changed: refused by a proof that is named here, or without any effect on the result."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Layout, Plan, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms.registry import with_reduce_dtype
from mindspeed_cp.layout import contiguous
from mindspeed_cp.plan import Messages, Program, combine
from tests.plan.parts import mixed_plan

PLAN = build_plan(Documents([40, 3, 21]), Topology(1, 4), AttentionConfig(4, 2), "ring", reduce_dtype="bfloat16")
OTHER = build_plan(Documents([64]), Topology(1, 4), AttentionConfig(4, 2), "direct")
HARMLESS = "harmless"

#: By the path of each field: changed values, and what the error says; HARMLESS where nothing that runs reads the value.
FIELDS: dict[str, list[tuple[Any, str]]] = {
    "algorithm": [("other", HARMLESS), (3, "algorithm is 3; valid: str")],
    "attention": [(None, "attention is None; valid: AttentionConfig"), (AttentionConfig(4), "forward: the program is for")],
    "topology": [(Topology(4, 1), HARMLESS), (Topology(1, 5), "it has 4 ranks, the topology 5"), (4, "topology is 4")],
    "layout": [(OTHER.layout, "q_layout_compute: it is of"), (None, "layout is None; valid: Layout")],
    "kv_layout_in": [(OTHER.layout, "kv_layout_compute: it is of"), ([], "kv_layout_in is ")],
    "q_layout_compute": [(contiguous(PLAN.documents, 4), "laid out in another way"), (None, "q_layout_compute is None")],
    "kv_layout_compute": [(contiguous(PLAN.documents, 4), r"rank \d"), (None, "kv_layout_compute is None")],
    "forward": [(OTHER.forward, "forward: its keys are of"), (None, "forward is None; valid: Program")],
    "backward": [(PLAN.forward, "backward: .* gradient"), (OTHER, "backward is Plan")],
    "parts": [((PLAN,), "forward_order: step 0 of part 0 is missing"), ([], r"parts is \[\]; valid: tuple"), ((1,), "part 0: it is 1")],
    "forward_order": [(((0, 0),), "a plan without parts has none"), ((1,), r"forward_order is \(1,\); valid: pairs"), (((0, 0.0),), "pairs")],
    "backward_order": [(((0, 0),), "a plan without parts has none"), (((0,),), r"backward_order is \(\(0,\),\); valid: pairs")],
    "linear_layout": [(contiguous(PLAN.documents, 4), HARMLESS), (OTHER.layout, "linear_layout: it is of"), (1, "linear_layout is 1")],
    "reduce_dtype": [("float32", HARMLESS), *((name, f"reduce_dtype is '{name}'; valid: float32, bfloat16") for name in ("int8", "bool", "float16"))],
    "forward.steps": [(5, HARMLESS), (3, r"steps go from 0 to 2|does not exist"), (0, "it has 0 steps; valid: 1 to"), (True, "steps is True")],
    "forward.capacity": [(PLAN.forward.capacity + np.array([0, 1, 1]), HARMLESS), (PLAN.forward.capacity[:3], "capacity has shape"), (PLAN.forward.capacity.astype(np.int32), "capacity is an array of int32")],
    "forward.q_layout_compute": [(OTHER.layout, "laid out in another way"), (None, "forward.q_layout_compute is None")],
    "forward.kv_documents": [(Documents([64]), "forward: its keys are of"), (None, "forward.kv_documents is None")],
    "forward.attention": [(AttentionConfig(4, 2, mask="full"), "forward: the program is for"), (0, "forward.attention is 0")],
    "forward.contents": [(PLAN.forward.contents[::-1], "out of order or overlap"), (PLAN.forward.contents[:-1], "does not see key"), (PLAN.forward.spans, "contents is an array of records of rank, doc"), (None, "forward.contents is None")],
    "forward.spans": [(PLAN.forward.spans[::-1], r"rank \d"), (PLAN.forward.spans[:, None], "forward.spans is an array")],
    "forward.fetch": [(Messages.empty(), "messages leave nothing there"), (PLAN.backward.reduce, "rank"), ([], "forward.fetch is")],
    "backward.reduce": [(Messages.empty(), "backward: rank 0, step 4: the gradient of its key"), (None, "backward.reduce is None; valid: Messages")],
    "forward.fetch.items": [(PLAN.forward.fetch.items[::-1], "comes after a message of a later step"), (PLAN.forward.fetch.runs, "items is an array of records of src_row")],
    "forward.fetch.runs": [(PLAN.forward.fetch.runs[:-1], "its runs do not exist"), (PLAN.forward.fetch.runs.tolist(), "runs is ")],
    "layout.documents": [(Documents([64]), "layout"), ([40], r"layout.documents is \[40\]; valid: Documents")],
    "layout.ranks": [(5, r"forward: capacity has shape \(4, 3\)"), (4.0, "layout.ranks is 4.0; valid: int")],
    "layout.spans": [(PLAN.layout.spans[1:], "held by 0 ranks"), (PLAN.layout.spans[::-1], "does not follow the span before"), (None, "layout.spans is None")],
    "layout.heads": [(np.tile([0, 4], (4, 1)), "the caller holds all heads"), (np.zeros((3, 2), np.int64), r"heads has shape \(3, 2\)"), (np.zeros((4, 2)), "heads is an array of float64")],
}  # fmt: skip


def changed(item: Any, path: list[str], value: Any) -> Any:
    """The object with another value at the end of a path of fields."""
    name, *rest = path
    return replace(item, **{name: changed(getattr(item, name), rest, value) if rest else value})


def check(plan: Plan, says: str) -> None:
    if says == HARMLESS:
        verify_plan(plan)
        return
    with pytest.raises(PlanError, match=says) as error:
        verify_plan(plan)
    assert "\n" not in str(error.value)


def test_the_table_names_every_field() -> None:
    objects = {"": Plan, "forward.": Program, "forward.fetch.": Messages, "layout.": Layout}
    named = {f"{where}{field.name}" for where, kind in objects.items() for field in fields(kind)}
    assert {path.replace("backward.reduce", "forward.reduce") for path in FIELDS} == named


@pytest.mark.parametrize("path", FIELDS)
def test_a_changed_field_is_refused_or_harmless(path: str) -> None:
    for value, says in FIELDS[path]:
        check(changed(PLAN, path.split("."), value), says)


@pytest.mark.parametrize("name", [field.name for field in fields(AttentionConfig)])
def test_a_plan_for_an_attention_that_is_none_is_refused(name: str) -> None:
    broken = replace(PLAN.attention)
    object.__setattr__(broken, name, "x")
    check(replace(PLAN, attention=broken), f"attention.{name}|attention.heads|attention.alibi")


def test_parts_send_gradients_in_the_type_of_the_plan() -> None:
    plan = with_reduce_dtype(mixed_plan(Documents([20, 3, 9]), 4, AttentionConfig(4)), "bfloat16")
    verify_plan(plan)
    assert combine("same", plan.parts).reduce_dtype == "bfloat16"
    check(replace(plan, reduce_dtype="float32"), "part 0 has reduce_dtype bfloat16, the plan float32; valid: the same")
