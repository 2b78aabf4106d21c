"""Plans behind an equal-token layout: proved, the same attention, and the bytes that are said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms.linear_layout import (
    LINEAR_LAYOUT_MODES,
    cheapest_mode,
    with_caller_layout,
    with_linear_layout,
)
from mindspeed_cp.layout import Layout, contiguous, equal_token_layout, row_zigzag, zigzag
from mindspeed_cp.plan import traffic
from tests.plan.parts import mixed_plan
from tests.plan.problems import choices, problems

ATTENTION = AttentionConfig(heads=8, kv_heads=2, head_dim=16)
LENGTHS = (90, 3, 5, 1, 0, 14, 2)


def plan_of(algorithm: str = "direct", attention: AttentionConfig = ATTENTION, **options: object) -> Plan:
    options = options or ({} if algorithm == "ulysses" else {"layout": "balanced"})
    return build_plan(Documents(LENGTHS), Topology(2, 2), attention, algorithm, **options)


@settings(max_examples=150, deadline=None)
@given(problems(), st.data(), st.sampled_from(LINEAR_LAYOUT_MODES))
def test_plans_with_a_linear_layout_are_proved(problem, data, mode) -> None:  # type: ignore[no-untyped-def]
    algorithm, options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **({**options, "remap": "off"} if algorithm == "hierarchical" else options))
    try:
        remapped = with_linear_layout(plan, mode)
    except ConfigError:
        assert mode == "hidden" and cheapest_mode(plan, 1) == "qkv"
        return
    verify_plan(remapped)
    held = remapped.batch_layout
    for layout in (held, remapped.kv_layout_in) if mode == "qkv" else (held,):
        assert np.ptp(layout.token_counts) <= 1
    if not plan.parts:
        assert (
            remapped.q_layout_compute is plan.q_layout_compute and remapped.kv_layout_compute is plan.kv_layout_compute
        )
    assert np.array_equal(remapped.work(), plan.work())
    assert with_linear_layout(plan, mode).layout.same_as(remapped.layout)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data(), st.sampled_from([zigzag, row_zigzag, contiguous]))
def test_plans_behind_any_layout_of_the_caller_are_proved(problem, data, cut) -> None:  # type: ignore[no-untyped-def]
    algorithm, options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **options)
    if not plan.kv_layout_in.same_as(plan.layout):
        with pytest.raises(ConfigError, match="the plan is of cross-attention"):
            with_caller_layout(plan, plan.layout)
        return
    layout: Layout = cut(plan.documents, plan.ranks)
    behind = with_caller_layout(plan, layout)
    verify_plan(behind)
    assert behind.batch_layout is behind.layout and behind.layout.same_as(layout)
    assert np.array_equal(behind.work(), plan.work())


def test_a_layout_of_something_else_is_refused() -> None:
    plan = plan_of()
    for layout in (
        zigzag(Documents(LENGTHS), 3),
        zigzag(Documents(LENGTHS[::-1]), 4),
        zigzag(Documents(LENGTHS), 4).with_heads(np.array([[0, 2], [2, 4], [4, 6], [6, 8]])),
    ):
        with pytest.raises(
            ConfigError, match=r"layout is of Documents.* valid: whole tokens of Documents.* on 4 ranks"
        ):
            with_caller_layout(plan, layout)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=7), st.integers(1, 6), st.sampled_from(LINEAR_LAYOUT_MODES))
def test_plans_of_parts_are_proved(lengths, ranks, mode) -> None:  # type: ignore[no-untyped-def]
    plan = mixed_plan(Documents(lengths), ranks, ATTENTION)
    if mode == "hidden" and all(part.q_layout_compute.heads is not None for part in plan.parts):
        return
    remapped = with_linear_layout(plan, mode)
    verify_plan(remapped)
    held = remapped.batch_layout
    assert held.same_as(equal_token_layout(plan.layout, ranks))
    assert remapped.forward_order == plan.forward_order


def test_a_balanced_plan_stays_as_it_is() -> None:
    plan = build_plan(Documents([64, 64]), Topology(1, 4), ATTENTION, "ring")
    assert all(with_linear_layout(plan, mode) is plan for mode in LINEAR_LAYOUT_MODES)


def test_heads_are_split_straight_from_the_linear_layout() -> None:
    """One move as before: from every rank's equal share to heads."""
    plan = plan_of("hybrid")
    remapped = with_linear_layout(plan)
    assert not remapped.layout.same_as(plan.layout)
    assert remapped.q_redistribution is not None and remapped.q_redistribution.target is plan.q_layout_compute
    assert remapped.linear_layout is None


@pytest.mark.parametrize("attention", [
    ATTENTION,
    AttentionConfig(heads=4, kv_heads=4, head_dim=16),
    AttentionConfig(heads=2, kv_heads=2, head_dim=192, head_dim_v=128),
])  # fmt: skip
def test_bytes_of_qkv_are_those_of_the_plans_moves(attention: AttentionConfig) -> None:
    plan = with_linear_layout(plan_of(attention=attention))
    sent = traffic(plan)
    rows = plan.q_redistribution.remote_pairs["rows"].sum()  # type: ignore[union-attr]
    assert rows > 0
    row_bytes = 2 * (attention.heads * (attention.head_dim + attention.head_dim_v) + attention.kv_row.channels)
    assert sent["redistribution_forward"].sum() == row_bytes * rows
    assert sent["redistribution_backward"].sum() == row_bytes * rows


@pytest.mark.parametrize(("attention", "hidden", "tensor", "shared", "mode"), [
    (AttentionConfig(32, 32, 128), 4096, 1, False, "hidden"),  # 4 widths against 2
    (AttentionConfig(32, 8, 128), 4096, 1, False, "hidden"),   # 2.5 against 2
    (AttentionConfig(8, 2, 128), 4096, 4, False, "qkv"),       # a quarter of 2.5 against whole hidden states
    (AttentionConfig(8, 2, 128), 4096, 4, True, "hidden"),     # a quarter of either
    (AttentionConfig(8, 1, 128), 4096, 1, False, "qkv"),       # narrow heads: 18 * 128 against 64 * 128
    (AttentionConfig(128, 128, 192, 128), 7168, 1, False, "hidden"),  # latent, unfolded: 640 * 128 against 112 * 128
    (AttentionConfig(4, 4, 192, 128), 7168, 32, False, "qkv"),
])  # fmt: skip
def test_the_narrower_rows_move(attention: AttentionConfig, hidden: int, tensor: int, shared: bool, mode: str) -> None:
    plan = plan_of(attention=replace(attention))
    assert cheapest_mode(plan, hidden, tensor, shared) == mode


@pytest.mark.parametrize(("call", "message"), [
    (lambda: with_linear_layout(plan_of(), "o"), "mode is 'o'; valid: qkv, hidden"),
    (lambda: with_linear_layout(with_linear_layout(plan_of(), "hidden")), "has a linear layout already"),
    (lambda: with_linear_layout(plan_of("hybrid"), "hidden"), "the plan splits the heads of all documents"),
    (lambda: with_linear_layout(crossed(), "hidden"), "the plan is of cross-attention"),
])  # fmt: skip
def test_the_error_of_a_bad_mode_has_the_valid_ones(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        call()


def crossed() -> Plan:
    attention = replace(ATTENTION, mask="full")
    return build_plan(Documents([9, 1]), Topology(1, 4), attention, "direct", Documents([3, 8]), layout="balanced")
