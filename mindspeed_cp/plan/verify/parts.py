"""A part of the proof, for plans of parts: they are the plan together, and their steps can be taken in its order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.combine import no_whole
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages
from mindspeed_cp.plan.verify.queues import check_queues


def check_parts(plan: Plan) -> None:
    """Raise PlanError unless the parts are over disjoint documents that are all of the batch, have just the plan's rows
    of these, take every step once and in order, and no rank waits for ever in the plan's order of steps. The parts
    themselves are proved one by one."""
    problem = no_whole(plan)
    if problem is not None:
        raise PlanError(f"parts: {problem}")
    if not plan.q_layout.same_as(plan.layout) or not plan.kv_layout.same_as(plan.layout_kv):
        raise PlanError("q_layout, kv_layout: a plan of parts moves nothing itself, but they differ from the caller's")
    for name, program in (("forward", plan.forward), ("backward", plan.backward)):
        if program.steps or len(program.contents) or len(program.fetch) or len(program.reduce):
            raise PlanError(f"{name}: a plan of parts computes and sends in its parts, but it has a program of its own")
        check_queues(interleaved(plan, name), name)


def interleaved(plan: Plan, direction: str) -> Program:
    """The messages of all parts in one program, whose steps are the plan's turns: as the engine takes them, a part's
    messages are finished when its next turn comes, and at the very end those that are then still under way. Messages of
    one turn are of one part; slots are not told apart."""
    turns = plan.turns(direction)
    programs: list[Program] = [getattr(part, direction) for part in plan.parts]
    turn_of = [np.zeros(program.steps + 1, np.int64) for program in programs]
    for number, (part, step) in enumerate(turns):
        turn_of[part][step] = number
    for table in turn_of:
        table[-1] = len(turns)
    return replace(
        plan.forward,
        steps=len(turns),
        fetch=_in_turns([program.fetch for program in programs], turn_of),
        reduce=_in_turns([program.reduce for program in programs], turn_of),
    )


def _in_turns(messages: list[Messages], turn_of: list[np.ndarray]) -> Messages:
    found = []
    for one, table in zip(messages, turn_of, strict=True):
        items = one.items.copy()
        items["start"], items["done"] = table[items["start"]], table[items["done"] + 1] - 1
        found.append(items)
    items = np.concatenate(found)
    return Messages(items[np.argsort(items["start"], kind="stable")], messages[0].runs[:0])
