"""Plans whose parts are replaced by pieces of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages


def with_pieces(plan: Plan, pieces: list[list[Plan]]) -> Plan:
    """Return a plan in which each part is replaced by pieces, which take its steps in turn.

    Args:
        plan: any plan.
        pieces: plans without parts, one or more for each part of the plan, with as many steps.
    """
    if len(pieces) == 1 and len(pieces[0]) == 1:
        return replace(pieces[0][0], linear_layout=plan.linear_layout)
    first = [sum(map(len, pieces[:part])) for part in range(len(pieces))]

    def order(direction: str) -> tuple[tuple[int, int], ...]:
        out: list[tuple[int, int]] = []
        for part, step in plan.step_order(direction):
            out += [(first[part] + number, step) for number in range(len(pieces[part]))]
        return tuple(out)

    return replace(
        plan,
        q_layout_compute=plan.layout,
        kv_layout_compute=plan.kv_layout_in,
        forward=_without_steps(plan, plan.forward),
        backward=_without_steps(plan, plan.backward),
        parts=tuple(piece for of_part in pieces for piece in of_part),
        forward_order=order("forward"),
        backward_order=order("backward"),
    )


def edge_parts(plan: Plan) -> tuple[int, ...]:
    """Return the first and the last part whose heads are split, () if there is none: the first way in and the last way
    back have nothing beside them."""
    split = [
        part for part, _ in plan.step_order("forward") if plan.parts_or_self[part].q_layout_compute.heads is not None
    ]
    return (split[0], split[-1]) if split else ()


def each_part(plan: Plan, cut: Callable[[int, Plan], list[Plan]]) -> Plan:
    """Return the plan in which `cut` gives the pieces of each part, by its number; the plan itself if nothing is
    cut."""
    pieces = [cut(number, part) for number, part in enumerate(plan.parts_or_self)]
    if all(piece is part for part, of_part in zip(plan.parts_or_self, pieces, strict=True) for piece in of_part):
        return plan
    return with_pieces(plan, pieces)


def _without_steps(plan: Plan, program: Program) -> Program:
    none = Messages.empty()
    return replace(
        program, steps=0, capacity=plan.kv_layout_in.token_counts[:, None], q_layout_compute=plan.layout,
        contents=program.contents[:0], spans=program.spans[:0], fetch=none, reduce=none,
    )  # fmt: skip
