"""Plans of parts: the parts form the plan, and its step order does not dead-lock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.parts import parts_error
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages


def check_parts(plan: Plan) -> None:
    """Check a plan of parts, whose layouts are valid; the parts themselves are proved one by one.

    Raises:
        PlanError: the parts do not cover the documents of the batch once, hold other rows than the plan, or miss or
            repeat a step.
    """
    error = parts_error(plan)
    if error is not None:
        raise PlanError(f"parts: {error}")
    if not plan.q_layout_compute.same_as(plan.layout) or not plan.kv_layout_compute.same_as(plan.kv_layout_in):
        raise PlanError(
            "q_layout_compute, kv_layout_compute: a plan of parts redistributes nothing itself, but they differ "
            "from the caller's layouts"
        )
    for direction, program in (("forward", plan.forward), ("backward", plan.backward)):
        if program.steps or len(program.contents) or len(program.fetch) or len(program.reduce):
            raise PlanError(
                f"{direction}: a plan of parts computes and sends in its parts, but it has a program itself"
            )


def interleaved_program(plan: Plan, direction: str) -> Program:
    """Return the messages of all parts as one program whose steps are the entries of `plan.step_order`.

    As in the engine, the messages of a part are finished when its next step begins, or at the very end if it has no
    next step. Messages of one step are of one part; slots of different parts are not distinguished.
    """
    order = plan.step_order(direction)
    programs: list[Program] = [getattr(part, direction) for part in plan.parts]
    step_index = [np.full(program.steps + 1, len(order)) for program in programs]  # index in `order`
    for index, (part, step) in enumerate(order):
        step_index[part][step] = index
    return replace(
        plan.forward,
        steps=len(order),
        fetch=_interleaved([program.fetch for program in programs], step_index),
        reduce=_interleaved([program.reduce for program in programs], step_index),
    )


def _interleaved(messages: list[Messages], step_index: list[np.ndarray]) -> Messages:
    items = np.concatenate([part.items for part in messages])
    items["start"] = np.concatenate(
        [index[part.items["start"]] for part, index in zip(messages, step_index, strict=True)]
    )
    items["done"] = np.concatenate(
        [index[part.items["done"] + 1] - 1 for part, index in zip(messages, step_index, strict=True)]
    )
    return Messages(items[np.argsort(items["start"], kind="stable")], messages[0].runs[:0])
