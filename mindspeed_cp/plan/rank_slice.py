"""The slice of a plan that one rank needs to run it, for ranks that get their plans from another one.

A rank reads all layouts, by which it cuts batches and moves rows, and counts the messages of all ranks, by which both
ends number them alike. Most of a program belongs to other ranks, though::

    layouts, steps, capacities      whole
    messages                        whole; rows of those that the rank sends or receives
    contents and their token spans  those of the rank
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages


def slice_plan(plan: Plan, rank: int) -> Plan:
    """Return a plan that one rank runs as it would run the whole one.

    The slice cannot be proved, simulated or drawn, and has no meaning on other ranks.

    Args:
        plan: any plan.
        rank: context-parallel rank.
    """
    return replace(
        plan,
        forward=_slice_program(plan.forward, rank),
        backward=_slice_program(plan.backward, rank),
        parts=tuple(slice_plan(part, rank) for part in plan.parts),
    )


def _slice_program(program: Program, rank: int) -> Program:
    contents = program.contents_of(rank).copy()
    spans = program.spans[ragged_arange(contents["first"], contents["count"])]
    contents["first"] = np.cumsum(contents["count"]) - contents["count"]
    return replace(
        program,
        contents=contents,
        spans=spans,
        fetch=_slice_messages(program.fetch, rank),
        reduce=_slice_messages(program.reduce, rank),
    )


def _slice_messages(messages: Messages, rank: int) -> Messages:
    own, items = messages.involving(rank), messages.items.copy()
    runs = messages.runs[ragged_arange(items["first"][own], items["count"][own])]
    count = np.zeros(len(items), np.int64)
    count[own] = items["count"][own]
    items["count"], items["first"] = count, np.cumsum(count) - count
    return Messages(items, runs)
