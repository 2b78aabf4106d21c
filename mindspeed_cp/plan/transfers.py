"""All messages of one direction of a plan as one table: fetches, reduces, and redistributions between layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.layout import Redistribution
from mindspeed_cp.layout.redistribution import Moved, packed_pairs
from mindspeed_cp.layout.runs import concatenate_records
from mindspeed_cp.plan.parts import part_ends
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import int64_record
from mindspeed_cp.schema.numbers import check_type

GRADIENT_BYTES = 4  # of an element of gradients that are summed on their way, if the plan does not say otherwise

#: Payload of a transfer, indexed by its `kind`: keys and values between steps; their gradients; q, k, v, out or their
#: gradients between two layouts of attention; hidden states between the layouts of linear layers and attention.
KINDS = ("keys", "gradients", "redistribution", "hidden_states")
KEYS, GRADIENTS, REDISTRIBUTION, HIDDEN_STATES = range(len(KINDS))

#: `bytes` from src to dst for part `part`, posted by both when timeline step `start` begins and finished in step
#: `done`. Timeline steps are the plan steps with :func:`edge_steps` others before and after them.
TRANSFER = np.dtype(
    [
        *((name, np.int64) for name in ("src", "dst", "start", "done", "kind", "part")),
        ("bytes", np.float64),
    ]
)


#: Bytes that a rank sends in one forward and backward: K/V of fetches in the forward and in the backward, gradients of
#: reduces, and redistributions between the layouts of the caller and of the computation, forward and backward.
TRAFFIC = int64_record("fetch_forward fetch_backward reduce redistribution_forward redistribution_backward total")


def transfers(
    plan: Plan, direction: str, bytes_per_element: int = 2, hidden_row_bytes: float | None = None
) -> np.ndarray:
    """Return records of dtype TRANSFER, sorted by `start`, within a step in the order in which the plan posts them.

    Gradients of keys and values have fp32 elements between steps, and in the redistribution back to the caller's layout
    if copies of kv heads are summed there.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        bytes_per_element: element size of q, k, v and out.
        hidden_row_bytes: bytes of a row of hidden states that a rank moves; None: leave hidden states out.
    """
    tables = [
        np.empty(0, TRANSFER),
        *_between_steps(plan, direction, bytes_per_element),
        *_redistributions(plan, direction, bytes_per_element),
    ]
    if plan.linear_layout is not None and hidden_row_bytes is not None:
        tables += _hidden_states(plan, direction, hidden_row_bytes)
    out = concatenate_records(tables)
    # source XOR target: see Messages.in_global_order
    return out[np.lexsort((out["src"] ^ out["dst"], out["part"], out["start"]))]


def traffic(plan: Plan, bytes_per_element: int = 2) -> np.ndarray:
    """Count the bytes that each rank sends, without hidden states; arguments as for :func:`transfers`.

    Returns:
        Records of dtype TRAFFIC [ranks].
    """
    check_type("plan", plan, Plan)
    out = np.zeros(plan.ranks, TRAFFIC)
    for direction in ("forward", "backward"):
        table = transfers(plan, direction, bytes_per_element)
        for kind, name in (
            (KEYS, f"fetch_{direction}"),
            (GRADIENTS, "reduce"),
            (REDISTRIBUTION, f"redistribution_{direction}"),
        ):
            sent = table[table["kind"] == kind]
            volume = np.bincount(sent["src"], sent["bytes"], plan.ranks).astype(np.int64)
            out[name] += volume
            out["total"] += volume
    return out


#: Algorithms whose ranks have few neighbours: on devices each direction of each pair has a stream of its own by default
#: (:mod:`mindspeed_cp.comm.directional_groups`). Other plans have one stream, on which the launches of a rank are in
#: order.
PAIR_STREAMS = ("ring", "double_ring")


def launch_numbers(table: np.ndarray) -> np.ndarray:
    """Return the launch that each message belongs to, in the order in which all ranks launch them, int64 [messages]: a
    rank launches together what a part posts in a step and waits for in one.

    Args:
        table: records of dtype TRANSFER.
    """
    parts, steps = (int(table[name].max(initial=0)) + 1 for name in ("part", "done"))
    key = (table["start"] * parts + table["part"]) * steps + table["done"]
    return np.unique(key, return_inverse=True)[1].reshape(-1)


def edge_steps(plan: Plan) -> int:
    """Return the number of timeline steps before the first plan step, and after the last one.

    One waits for redistributions between layouts of attention. If hidden states move (`Plan.linear_layout`), there are
    two more: the outermost waits for them, and the innermost computes projections.
    """
    return 1 if plan.linear_layout is None else 3


def step_count(plan: Plan, direction: str) -> int:
    """Return the number of timeline steps of a direction."""
    return len(plan.step_order(direction)) + 2 * edge_steps(plan)


def steps_of_parts(plan: Plan, direction: str) -> list[np.ndarray]:
    """Return for each part the timeline step of each of its steps, int64 [steps]; the plan's first is `edge_steps`."""
    out = [np.zeros(getattr(part, direction).steps, np.int64) for part in plan.parts_or_self]
    for timeline_step, (part, step) in enumerate(plan.step_order(direction), edge_steps(plan)):
        out[part][step] = timeline_step
    return out


def _between_steps(plan: Plan, direction: str, element: int) -> list[np.ndarray]:
    """Return the fetches and reduces of each part."""
    attention = plan.attention
    tables = []
    for number, (part, plan_steps) in enumerate(zip(plan.parts_or_self, steps_of_parts(plan, direction), strict=True)):
        program: Program = getattr(part, direction)
        kv_row = attention.kv_row
        row = part.kv_layout_compute.head_counts(kv_row.heads) * (kv_row.dim + kv_row.dim_v)
        for messages, kind, size in ((program.fetch, KEYS, element), (program.reduce, GRADIENTS, plan.gradient_bytes)):
            items = messages.items
            out = np.empty(len(items), TRANSFER)
            for name in ("src", "dst"):
                out[name] = items[name]
            for name in ("start", "done"):
                out[name] = plan_steps[items[name]]
            out["kind"], out["part"] = kind, number
            out["bytes"] = items["rows"] * row[items["src"]] * float(size)
            tables.append(out)
    return tables


def _redistributions(plan: Plan, direction: str, element: int) -> list[np.ndarray]:
    """Return the redistributions between layouts of attention."""
    attention, forward = plan.attention, direction == "forward"
    first, last = edge_steps(plan) - 1, step_count(plan, direction) - edge_steps(plan)
    ends = part_ends(plan, direction)
    width, width_v = attention.head_dim, attention.head_dim_v
    tables = []
    for number, (part, plan_steps) in enumerate(zip(plan.parts_or_self, steps_of_parts(plan, direction), strict=True)):
        before, after = int(plan_steps.min(initial=last)) - 1, min(ends[number] + 2 + first, last)
        inward, outward = (width, width_v) if forward else (width_v, width)
        q, kv = part.q_redistribution, part.kv_redistribution
        size = GRADIENT_BYTES if kv is not None and kv.has_copies and not forward else element
        kv_row = (attention.kv_row.dim + attention.kv_row.dim_v) * size
        into: list[Moved] = [] if q is None else [(q, inward * element, 1)]
        out: list[Moved] = [] if q is None else [(q, outward * element, 1)]
        if kv is not None:
            (into if forward else out).append((kv, kv_row, 2))
        tables.append(_messages(into, False, first, before, REDISTRIBUTION, number))
        tables.append(_messages(out, True, after, last, REDISTRIBUTION, number))
    return tables


def _hidden_states(plan: Plan, direction: str, row: float) -> list[np.ndarray]:
    """Return the redistribution of hidden states to attention's layout in the first step, and back in the last one."""
    assert plan.linear_layout is not None
    hidden = Redistribution.between(plan.linear_layout, plan.layout, 1)
    if hidden is None:
        return []
    last = step_count(plan, direction) - 1
    return [
        _messages([(hidden, row, 1)], adjoint, step, step, HIDDEN_STATES, 0)
        for adjoint, step in ((False, 0), (True, last))
    ]


def _messages(moved: Sequence[Moved], adjoint: bool, start: int, done: int, kind: int, part: int) -> np.ndarray:
    """Return the messages of redistributions that are posted together; `adjoint`: they move rows back."""
    if not moved:
        return np.empty(0, TRANSFER)
    pairs = np.concatenate([redistribution.rank_pairs for redistribution, *_ in moved])
    size = np.concatenate([each.rank_pairs["rows"] * each.rank_pairs["heads"] * float(row) for each, row, _ in moved])
    if len(moved) > 1:
        packed, ranks = np.concatenate(packed_pairs(moved)), moved[0][0].source.ranks
        message = np.where(packed, pairs["src"] * ranks + pairs["dst"], ranks**2 + np.arange(len(pairs)))
        _, first, number = np.unique(message, return_index=True, return_inverse=True)
        pairs, size = pairs[first], np.bincount(number.reshape(-1), size)
    remote = pairs["src"] != pairs["dst"]
    out = np.empty(int(remote.sum()), TRANSFER)
    for name, end in zip(("src", "dst"), ("dst", "src") if adjoint else ("src", "dst"), strict=True):
        out[name] = pairs[end][remote]
    out["start"], out["done"], out["kind"], out["part"] = start, done, kind, part
    out["bytes"] = size[remote]
    return out
