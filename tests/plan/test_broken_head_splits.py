"""Plans whose ranks hold other heads than their messages and queries need are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Plan, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms.derived_backward import derive_backward
from mindspeed_cp.plan import CONTENT, MessageBuilder, Messages, Program
from tests.plan.test_broken_plans import edit


def split_queries(heads: list[list[int]], reduce: bool) -> Plan:
    """Two ranks: all queries on both, for some heads; keys in two halves with all heads, each fetched by the other."""
    documents, attention = Documents([8]), AttentionConfig(4, 4, 8)
    held = build_plan(documents, Topology(1, 2), attention, layout="contiguous").layout
    everything = np.array([(r, 0, 0, 8) for r in range(2)], held.spans.dtype)
    queries = replace(held, spans=everything).with_heads(np.array(heads))
    messages = MessageBuilder()
    for rank in range(2):
        where = {"start": 0, "done": 0, "src_slot": 0, "dst_slot": 1, "src_row": 0, "dst_row": 0}
        messages.add(src=1 - rank, dst=rank, rows=4, **where)
    contents = np.array([(s, r, s, 0, r ^ s, 1) for r in range(2) for s in range(2)], CONTENT)
    program = Program(
        2,
        np.full((2, 2), 4),
        queries,
        documents,
        attention,
        contents,
        held.spans,
        messages.messages(),
        Messages.empty(),
    )
    return Plan(
        "x",
        attention,
        Topology(1, 2),
        held,
        held,
        queries,
        held,
        program,
        derive_backward(program) if reduce else program,
    )


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("heads", [[[0, 2], [2, 4]], [[0, 4], [4, 4]]])
def test_keys_whose_heads_are_not_those_of_the_queries_are_refused(heads, reduce):
    """A sum over queries would stand for other heads on each rank, and none of the proof's sums would be right."""
    with pytest.raises(
        PlanError, match=r"rank \d: kv heads 0 to 3 are not exactly those that query heads \d to -?\d+ read"
    ):
        verify_plan(split_queries(heads, reduce))


def test_keys_held_twice_by_ranks_with_the_same_heads_are_refused():
    plan = build_plan(Documents([10]), Topology(1, 4), AttentionConfig(4, 2), "hybrid", ulysses_degree=2)
    spans = plan.kv_layout_compute.spans.copy()
    spans["stop"][spans["rank"] == 0] += 1
    with pytest.raises(PlanError, match=r"kv_layout_compute: keys and values, by the query heads that read them"):
        verify_plan(replace(plan, kv_layout_compute=replace(plan.kv_layout_compute, spans=spans)))


def test_messages_between_ranks_with_other_heads_are_refused():
    plan = build_plan(Documents([40]), Topology(1, 4), AttentionConfig(4, 1), "hybrid", ulysses_degree=2)
    verify_plan(plan)
    with pytest.raises(
        PlanError, match=r"forward: rank \d, step 0: keys and values.* go to rank \d, which has other heads"
    ):
        verify_plan(edit(plan, "forward", "fetch", 0, dst=1))
