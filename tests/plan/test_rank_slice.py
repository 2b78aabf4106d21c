"""Slices of plans, and plans as bytes: a rank finds in its slice what it finds in the whole plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import Messages, Program, part_ends
from mindspeed_cp.plan.exchanges import Exchanges
from mindspeed_cp.plan.plan_bytes import plan_from_bytes, plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan
from tests.plan.forests import forest_plan
from tests.plan.problems import Problem, choices, problems


def assert_same_layout(layout: Layout | None, other: Layout | None) -> None:
    if layout is None or other is None:
        assert layout is other
        return
    assert layout.same_as(other) and layout.documents == other.documents


def assert_same_program(program: Program, other: Program) -> None:
    """Not a record of a program differs, nor the type of one."""
    assert (program.steps, program.attention, program.kv_documents) == (
        other.steps,
        other.attention,
        other.kv_documents,
    )
    assert_same_layout(program.q_layout_compute, other.q_layout_compute)
    for array, same in zip(arrays(program), arrays(other), strict=True):
        assert array.dtype == same.dtype and array.shape == same.shape and np.array_equal(array, same)


def arrays(program: Program) -> list[np.ndarray]:
    messages = (program.fetch.items, program.fetch.runs, program.reduce.items, program.reduce.runs)
    return [program.capacity, program.contents, program.spans, *messages]


def assert_same_plan(plan: Plan, other: Plan) -> None:
    for name in ("algorithm", "attention", "topology", "forward_order", "backward_order", "reduce_dtype", "exchange"):
        assert getattr(plan, name) == getattr(other, name)
    for name in ("layout", "kv_layout_in", "q_layout_compute", "kv_layout_compute", "linear_layout"):
        assert_same_layout(getattr(plan, name), getattr(other, name))
    assert (plan.layout is plan.q_layout_compute) == (other.layout is other.q_layout_compute)
    assert_same_program(plan.forward, other.forward)
    assert_same_program(plan.backward, other.backward)
    for part, same in zip(plan.parts, other.parts, strict=True):
        assert_same_plan(part, same)


def message_rows(messages: Messages, rank: int) -> list[Any]:
    """What a rank sends and receives, with the numbers of the messages."""
    return [
        (index, *messages.items[index].tolist()[:6], *(rows.tolist() for rows in messages.rows_of(index)))
        for index in messages.involving(rank).tolist()
    ]


def assert_same_to_rank(plan: Plan, part: Plan, rank: int) -> None:
    """A rank reads the same from a slice of a plan."""
    assert (plan.work_of(rank) == part.work_of(rank)).all()
    for direction in ("forward", "backward"):
        assert part_ends(plan, direction) == part_ends(part, direction)
        assert plan.step_order(direction) == part.step_order(direction)
        for whole, own in zip(plan.parts_or_self, part.parts_or_self, strict=True):
            program, kept = getattr(whole, direction), getattr(own, direction)
            assert (program.tiles(rank) == kept.tiles(rank)).all()
            for messages, sliced in ((program.fetch, kept.fetch), (program.reduce, kept.reduce)):
                assert len(messages) == len(sliced)
                assert message_rows(messages, rank) == message_rows(sliced, rank)
                involved = messages.involving(rank)
                for side in ("src", "dst"):
                    assert (messages.is_contiguous(side)[involved] == sliced.is_contiguous(side)[involved]).all()
            exchanges, of_slice = Exchanges.of(program), Exchanges.of(kept)
            assert all(
                np.array_equal(x, y) for x, y in zip(vars(exchanges).values(), vars(of_slice).values(), strict=True)
            )


@settings(deadline=None)
@given(st.data(), problems())
def test_a_rank_reads_the_same_from_its_slice_after_it_travelled(data: st.DataObject, problem: Problem) -> None:
    algorithm, options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **options)
    rank = data.draw(st.integers(0, problem.ranks - 1))
    part = slice_plan(plan, rank)
    assert_same_to_rank(plan, part, rank)
    travelled = plan_from_bytes(plan_to_bytes(part))
    assert_same_plan(part, travelled)
    assert_same_to_rank(plan, travelled, rank)


@settings(deadline=None)
@given(st.data(), problems())
def test_plans_are_the_same_after_they_travelled(data: st.DataObject, problem: Problem) -> None:
    algorithm, options = data.draw(choices(problem.ranks))
    plan = problem.plan(algorithm, **options)
    assert_same_plan(plan, plan_from_bytes(plan_to_bytes(plan)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 6), st.integers(0, 2**16))
def test_relays_and_slots_of_several_messages(lengths: list[int], ranks: int, seed: int) -> None:
    plan = forest_plan(lengths, ranks, AttentionConfig(2, 1, 8), seed)
    for rank in range(ranks):
        assert_same_to_rank(plan, slice_plan(plan, rank), rank)


@pytest.mark.parametrize(
    "documents",
    [
        Documents([5, 0, 700, 3]),
        Documents([40, 30, 20, 0, 7], parents=[-1, 0, 0, 2, -1]),
        Documents([40, 0, 70], blocks=[(3, 9), (41, 50)]),
        Documents([40, 30, 70], parents=[-1, 0, -1], blocks=[(3, 9), (45, 50)]),
        Documents([]),
    ],
)
def test_trees_blocks_and_rows_without_documents(documents: Documents) -> None:
    assert Documents.from_key(documents.key) == documents
    plan = build_plan(documents, Topology(2, 2), AttentionConfig(4, 2, 16), "hierarchical", remap="hidden")
    for rank in range(4):
        travelled = plan_from_bytes(plan_to_bytes(slice_plan(plan, rank)))
        assert travelled.documents == documents
        assert_same_to_rank(plan, travelled, rank)


def test_a_slice_leaves_out_what_other_ranks_do() -> None:
    documents = Documents(np.random.default_rng(0).integers(100, 9000, 64))
    plan = build_plan(documents, Topology(2, 8), AttentionConfig(8, 8, 64), "direct")
    slices = [slice_plan(plan, rank) for rank in range(16)]
    assert sum(len(part.forward.contents) for part in slices) == len(plan.forward.contents)
    assert sum(len(part.forward.fetch.runs) for part in slices) == 2 * len(plan.forward.fetch.runs), "at both ends"
    whole = len(plan_to_bytes(plan))
    assert max(len(plan_to_bytes(part)) for part in slices) < whole / 2


def test_numbers_of_any_size_and_slopes_travel() -> None:
    attention = AttentionConfig(
        3, 3, 8, alibi=tuple(np.array([0.1, 0.25, 1 / 3])), scale=np.float32(0.3), window=(7, 0)
    )
    plan = build_plan(Documents([200_000, 3]), Topology(1, 2), attention, "ring")
    travelled = plan_from_bytes(plan_to_bytes(plan))
    assert travelled.attention == attention and travelled.attention.alibi == (0.1, 0.25, 1 / 3)
    assert_same_plan(plan, travelled)
