"""Each field of a plan has a type and values that the engine can run; documents and attention go together."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import BAND, CAUSAL, FULL, TILE, Messages, Program
from mindspeed_cp.plan.records import sorted_contents
from tests.plan.mutations import replace_everywhere

JUNK: tuple[Any, ...] = (None, 3, 0.5, "x", (), np.zeros(2), {1})
LENGTHS = [50, 3, 64]


def ring(documents: Documents | None = None, attention: AttentionConfig | None = None, **options: Any) -> Plan:
    return build_plan(documents or Documents(LENGTHS), Topology(1, 4), attention or AttentionConfig(4, 2), **options)


def with_field(plan: Plan, owner: type, name: str, value: object) -> Plan:
    if owner is Plan:
        return replace(plan, **{name: value})
    if owner is Program:
        return replace(plan, backward=replace(plan.backward, **{name: value}))
    if owner is Messages:
        return with_field(plan, Program, "reduce", replace(plan.backward.reduce, **{name: value}))
    return replace(plan, layout=replace(plan.layout, **{name: value}))


@pytest.mark.parametrize("value", JUNK, ids=repr)
@pytest.mark.parametrize(
    ("owner", "name"), [(owner, field.name) for owner in (Plan, Program, Messages, Layout) for field in fields(owner)]
)
def test_every_field_has_its_type(owner: type, name: str, value: object) -> None:
    plan = ring()
    may_be = {
        "algorithm": "x",
        "linear_layout": None,
        "parts": (),
        "forward_order": (),
        "backward_order": (),
        "heads": None,
    }
    if (name == "steps" and value is plan.backward.steps) or (name in may_be and value is may_be[name]):
        return
    with pytest.raises(PlanError) as error:
        verify_plan(with_field(plan, owner, name, value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["int8", "bool", "float16", "float64", "", None])
def test_gradients_travel_in_fp32_or_bf16_alone(value: object) -> None:
    verify_plan(replace(ring(), reduce_dtype="bfloat16"))
    with pytest.raises(PlanError, match=r"reduce_dtype is .*; valid: (float32, bfloat16|str)"):
        verify_plan(replace(ring(), reduce_dtype=value))


BLOCKED = Documents(LENGTHS, blocks=[(0, 4)])
TREE = Documents(LENGTHS, parents=[-1, 0, 0])


@pytest.mark.parametrize(
    ("attention", "new", "says"),
    [
        (AttentionConfig(4, 2, alibi=True), BLOCKED, "documents have blocks, with attention.alibi"),
        (AttentionConfig(4, 2, mask="full"), BLOCKED, "documents have blocks, with attention.mask 'full'"),
        (AttentionConfig(4, 2, mask="full"), TREE, "documents have parents, with attention.mask 'full'"),
    ],
)
def test_documents_that_an_attention_does_not_take_are_refused_as_by_build_plan(
    attention: AttentionConfig, new: Documents, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ring(new, attention)
    plan = ring(attention=attention)
    with pytest.raises(PlanError, match=says):
        verify_plan(replace_everywhere(plan, plan.documents, new))


@pytest.mark.parametrize(
    ("keys", "mask", "says"),
    [
        (Documents([50, 4, 64]), "causal", "attention.mask is 'causal' with keys of other lengths"),
        (TREE, "full", "documents have parents, with keys of other parents"),
    ],
)
def test_keys_that_an_attention_does_not_take_are_refused_as_by_build_plan(
    keys: Documents, mask: str, says: str
) -> None:
    attention = AttentionConfig(4, 2, mask="full")
    plan = ring(attention=attention, kv_documents=Documents(keys.lengths))
    other = replace_everywhere(plan, attention, replace(attention, mask=mask))
    with pytest.raises(ConfigError, match=says):
        ring(attention=other.attention, kv_documents=keys)
    kv_layout = replace(plan.kv_layout_in, documents=keys)
    programs = {name: replace(getattr(other, name), kv_documents=keys) for name in ("forward", "backward")}
    with pytest.raises(PlanError, match=says):
        verify_plan(replace(other, kv_layout_in=kv_layout, kv_layout_compute=kv_layout, **programs))


class Edited(Program):
    """A program whose tiles are edited by a function, which is an attribute of the class."""

    edit: Any = None

    def tiles(self, rank: int) -> np.ndarray:
        return type(self).edit(super().tiles(rank))


def with_tiles(plan: Plan, edit: Any) -> Plan:
    kind = type("Edited", (Edited,), {"edit": staticmethod(edit)})
    return replace(plan, backward=kind(**{field.name: getattr(plan.backward, field.name) for field in fields(Program)}))


def band_beyond_the_window(tiles: np.ndarray) -> np.ndarray:
    """The last key of the first band tile is a tile of its own, which most queries do not see."""
    band = np.flatnonzero(tiles["mask"] == BAND)
    if len(band):
        tiles["k_rows"][band[0]] -= 1
        extra = tiles[band[:1]].copy()
        extra["k_row"] += extra["k_rows"]
        extra["k_pos"] += extra["k_rows"]
        extra["k_rows"] = 1
        tiles = np.insert(tiles, band[0] + 1, extra)
    return tiles


def test_every_row_of_a_band_tile_sees_a_key() -> None:
    plan = ring(attention=AttentionConfig(4, 2, window=(5, 0)))
    verify_plan(plan)
    with pytest.raises(PlanError, match="a query sees no key of it"):
        verify_plan(with_tiles(plan, band_beyond_the_window))


def test_tiles_of_a_step_are_in_the_order_of_slots() -> None:
    plan = build_plan(Documents(LENGTHS), Topology(1, 4), AttentionConfig(4, 2), algorithm="direct", prefetch=3)
    contents = plan.backward.contents.copy()
    contents["step"] = np.where(contents["slot"] > 0, plan.backward.reduce.items["start"].min() - 1, contents["step"])
    contents = sorted_contents(contents)  # all receive buffers in one step
    plan = replace(plan, backward=replace(plan.backward, contents=contents))
    try:
        verify_plan(plan)
    except PlanError as error:
        assert "comes after" not in str(error)
    with pytest.raises(PlanError, match="comes after a tile of a later step or slot"):
        verify_plan(with_tiles(plan, lambda tiles: tiles[np.lexsort((-tiles["slot"], tiles["step"]))]))


@pytest.mark.parametrize(
    "tiles", [None, [], np.zeros(0), np.zeros((2, 1), TILE)], ids=["None", "list", "floats", "table"]
)
def test_tiles_are_records(tiles: Any) -> None:
    with pytest.raises(PlanError, match="its tiles are not records"):
        verify_plan(with_tiles(ring(), lambda _: tiles))


def test_a_causal_tile_lies_in_the_window() -> None:
    """In a block, which no window limits, operators would hide keys of a causal tile again."""
    plan = build_plan(Documents([8], blocks=[(0, 8)]), Topology(1, 1), AttentionConfig(4, 2, window=(1, 0)))
    (tile,) = plan.backward.tiles(0)
    assert tile["mask"] == FULL and tile["q_rows"] == 8

    def causal(tiles: np.ndarray) -> np.ndarray:
        tiles["mask"] = CAUSAL
        return tiles

    with pytest.raises(PlanError, match="its last query does not reach its first key"):
        verify_plan(with_tiles(plan, causal))


@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_what_is_no_plan_is_one_line(value: object) -> None:
    with pytest.raises(ConfigError, match=r"plan is .*; valid: a Plan, from build_plan"):
        verify_plan(value)  # type: ignore[arg-type]
