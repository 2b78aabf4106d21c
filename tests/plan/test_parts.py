"""Plans of parts: made, proved, and refused where they are broken."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.layout import contiguous, zigzag
from mindspeed_cp.plan import (
    Messages,
    combine,
    part_rows,
    peak_bytes,
    select_documents,
    select_layout,
    traffic,
)
from tests.layout.layouts import equal_tokens
from tests.plan.parts import mixed_plan, remapped, shuffled
from tests.plan.problems import Problem, problems

LENGTHS = [50, 30, 64, 0, 20]
ATTENTION = AttentionConfig(4, 2, 16)


def mixed(ranks: int = 4) -> Plan:
    return mixed_plan(Documents(LENGTHS), ranks, ATTENTION)


@settings(deadline=None)
@given(problems(longest=40), st.integers(0, 2**32 - 1), st.sampled_from(["direct", "ring", "all_gather", "hybrid"]))
def test_any_parts_in_any_order_are_proved(problem: Problem, seed: int, algorithm: str) -> None:
    keys = None if problem.kv_lengths is None else Documents(problem.kv_lengths)
    plan = mixed_plan(Documents(problem.lengths), problem.ranks, problem.attention, algorithm, keys)
    verify_plan(plan)
    verify_plan(shuffled(plan, seed))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_a_plan_of_parts_does_is_what_its_parts_do(ranks: int) -> None:
    plan = mixed(ranks)
    whole = build_plan(Documents(LENGTHS), Topology(1, ranks), ATTENTION)
    assert plan.work().shape == (ranks, len(plan.forward_order)) and plan.work().sum() == whole.work().sum()
    assert all((plan.work()[rank] == plan.work_of(rank)).all() for rank in range(ranks))
    assert (traffic(plan)["total"] == sum(traffic(part)["total"] for part in plan.parts)).all()
    for direction in ("forward", "backward"):
        peak, each = peak_bytes(plan, direction), [peak_bytes(part, direction) for part in plan.parts]
        for name in ("kv", "gradients"):
            assert (peak[name] <= sum(part_peak[name] for part_peak in each)).all()
            assert (peak[name] >= np.max([part_peak[name] for part_peak in each], 0)).all()


def test_rows_of_parts_are_the_rows_of_the_whole() -> None:
    plan = remapped(mixed(), equal_tokens(Documents(LENGTHS), 4))
    for rank in range(4):
        rows = [np.concatenate([np.arange(a, a + n) for a, n in zip(*part_rows(plan, p, rank), strict=True)] or [np.zeros(0)])
                for p in range(3)]  # fmt: skip
        assert sorted(np.concatenate(rows).astype(int)) == list(range(plan.layout.token_counts[rank]))
        for part, its_rows in zip(plan.parts, rows, strict=True):
            docs = [layout.documents.document_of(layout.tokens(rank)) for layout in (part.layout, plan.layout)]
            assert (docs[0] == docs[1][its_rows.astype(int)]).all()
            assert (part.layout.positions(rank) == plan.layout.positions(rank)[its_rows.astype(int)]).all()


def test_by_default_parts_take_their_steps_in_turn() -> None:
    plan = mixed()
    steps = plan.parts[0].forward.steps
    assert plan.forward_order == ((0, 0), (1, 0), (2, 0), *((0, step) for step in range(1, steps)))
    assert plan.backward_order[:3] == ((0, 0), (1, 0), (2, 0))


def part_with(plan: Plan, number: int, **fields: object) -> Plan:
    parts = list(plan.parts)
    parts[number] = replace(parts[number], **fields)
    return replace(plan, parts=tuple(parts))


def without_a_message(plan: Plan) -> Plan:
    forward = plan.parts[0].forward
    fetch = Messages(np.delete(forward.fetch.items, 2), forward.fetch.runs)
    return part_with(plan, 0, forward=replace(forward, fetch=fetch))


def rows_elsewhere(plan: Plan) -> Plan:
    part = plan.parts[1]
    other = zigzag(part.documents, 4, [[2, 3]] * 5)
    return part_with(plan, 1, layout=other, kv_layout_in=other)


def shorter(plan: Plan) -> Plan:
    lengths = plan.parts[1].documents.lengths.copy()
    lengths[1] -= 1
    return part_with(
        plan, 1, **dict.fromkeys(("layout", "kv_layout_in"), contiguous(Documents(lengths), 4, [[0, 1]] * 5))
    )


def one_slot_in_one_part(plan: Plan) -> Plan:
    """All messages of part 0 go into one slot."""
    forward = plan.parts[0].forward
    items = forward.fetch.items.copy()
    items["dst_slot"] = 1
    return part_with(plan, 0, forward=replace(forward, fetch=Messages(items, forward.fetch.runs)))


BROKEN = {
    "a step twice": (lambda p: replace(p, forward_order=(*p.forward_order, (0, 0))), r"forward_order: \(0, 0\) comes where step 4 of part 0 is due"),
    "a step is missing": (lambda p: replace(p, forward_order=p.forward_order[:-1]), "forward_order: step 3 of part 0 is missing"),
    "steps out of order": (lambda p: replace(p, backward_order=p.backward_order[::-1]), r"backward_order: \(0, 4\) comes where step 0 of part 0 is due"),
    "a part that does not exist": (lambda p: replace(p, forward_order=((3, 0), *p.forward_order)), r"forward_order: \(3, 0\) names part 3; valid: 0 to 2"),
    "a step that does not exist": (lambda p: replace(p, forward_order=(*p.forward_order, (1, 1))), r"forward_order: \(1, 1\): part 1 has 1 steps"),
    "a part is missing": (lambda p: replace(p, parts=p.parts[:2]), "document 2: the parts have 0 of its 64 queries"),
    "a part twice": (lambda p: replace(p, parts=(*p.parts, p.parts[1])), "document 1 is in parts 1, 3; valid: in one"),
    "a part of parts": (lambda p: replace(p, parts=(p, *p.parts)), "part 0 has parts itself"),
    "a part with another mask": (lambda p: part_with(p, 1, attention=AttentionConfig(4, 2, 16, mask="full")), "part 1 is for AttentionConfig.*full.*, the plan for"),
    "a part on other ranks": (lambda p: part_with(p, 1, topology=Topology(2, 2)), "part 1 is for Topology.*, the plan for"),
    "a part of fewer documents": (lambda p: replace(p, parts=(*p.parts, build_plan(Documents([4]), Topology(1, 4), ATTENTION))), "part 3 has 1 documents, the plan 5"),
    "a part with a linear layout": (lambda p: part_with(p, 1, linear_layout=p.parts[1].layout), "part 1 has a linear_layout; valid: None"),
    "a part whose rows lie elsewhere": (rows_elsewhere, "rank 0: layout of part 1 differs from the plan"),
    "a part with a shorter document": (shorter, r"part 1: q_layout_compute: it is of Documents\(\[0, 30.*, the caller's layout of Documents\(\[0, 29"),
    "a part without a message": (without_a_message, r"part 0: forward: rank \d, step 1: slot 1, row 0: the plan says token"),
    "a part that receives twice": (one_slot_in_one_part, r"part 0: forward: .*rank \d, step \d: .* slot 1"),
    "a whole with layouts of its own": (lambda p: replace(p, q_layout_compute=p.parts[1].q_layout_compute), r"q_layout_compute: it is of Documents"),
    "a whole that moves": (lambda p: replace(p, q_layout_compute=equal_tokens(p.documents, 4)), "a plan of parts redistributes nothing itself"),
    "a whole with a program": (lambda p: replace(p, forward=p.parts[0].forward), "forward: a plan of parts computes and sends in its parts"),
    "an order without parts": (lambda p: replace(p.parts[0], forward_order=((0, 0),)), "forward_order, backward_order: a plan without parts has none"),
    "a linear layout of other documents": (lambda p: replace(p, linear_layout=p.parts[1].layout), "linear_layout: it is of Documents"),
    "a linear layout with heads": (lambda p: replace(p, linear_layout=p.layout.with_heads(np.tile([0, 4], (4, 1)))), "linear_layout: the caller holds all heads"),
    "a linear layout without a token": (lambda p: replace(p, linear_layout=replace(p.layout, spans=p.layout.spans[1:])), "is held by 0 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plans_of_parts_are_refused(kind: str) -> None:
    breaking, says = BROKEN[kind]
    plan = mixed()
    verify_plan(plan)
    with pytest.raises(PlanError) as error:
        verify_plan(breaking(plan))
    assert re.search(says, str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_a_plan_over_its_bound_of_bytes_is_refused() -> None:
    plan = mixed()
    most = max(int(peak_bytes(plan, direction)["total"].max()) for direction in ("forward", "backward"))
    verify_plan(plan, max_bytes=most)
    with pytest.raises(PlanError, match=r"rank \d: communication buffers take"):
        verify_plan(plan, max_bytes=most - 1)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (lambda p: [], r"parts are \(\); valid: one Plan or more"),
        (lambda p: [p.parts[0], 7], "valid: one Plan or more"),
        (lambda p: [p.parts[0], p.parts[0], p.parts[1]], "parts: document 0 is in parts 0, 1"),
        (lambda p: [p.parts[0], mixed(3).parts[1]], "parts: part 1 is for Topology.*ranks_per_node=3.*, the plan for"),
        (lambda p: [p], "parts: part 0 has parts itself"),
    ],
)
def test_parts_that_make_no_plan_are_refused(parts, says) -> None:
    with pytest.raises(ConfigError, match=says):
        combine("x", parts(mixed()))
    with pytest.raises(ConfigError, match="forward_order: step 0 of part 0 is missing"):
        combine("x", mixed().parts, ())


def test_parts_of_any_algorithms_are_combined() -> None:
    """The example of docs/algorithms.md."""
    documents, topology, chosen = Documents(LENGTHS), Topology(1, 4), np.array([False, True, False, False, True])
    exchanged = build_plan(select_documents(documents, ~chosen), topology, ATTENTION, "direct")
    split = build_plan(select_documents(documents, chosen), topology, ATTENTION, "ulysses")
    verify_plan(combine("direct and ulysses", [exchanged, split]))


def test_one_part_alone_is_the_plan() -> None:
    plan = build_plan(Documents(LENGTHS), Topology(1, 4), ATTENTION, "direct")
    alone = combine("one", [plan])
    verify_plan(alone)
    assert alone.layout.same_as(plan.layout) and (alone.work() == plan.work()).all()
    assert (traffic(alone) == traffic(plan)).all()
    assert (peak_bytes(alone, "backward") == peak_bytes(plan, "backward")).all()


def test_layouts_are_cut_by_documents_and_put_together_again() -> None:
    documents = Documents([5, 0, 9, 7])
    layout = zigzag(documents, 3)
    chosen = np.array([True, True, False, True])
    part = select_layout(layout, chosen)
    part.check()
    assert part.documents == select_documents(documents, chosen) == Documents([5, 0, 0, 7])
    assert part.token_counts.sum() == 12
    assert (part.positions(1) == layout.positions(1)[chosen[documents.document_of(layout.tokens(1))]]).all()
