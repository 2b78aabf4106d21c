"""Peak bytes of the communication buffers that the engine allocates for a plan."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.parts import part_ends, part_rows
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.records import int64_record
from mindspeed_cp.plan.verify.buffers import BufferBytes, Rows, buffer_bytes
from mindspeed_cp.schema.numbers import check_type

#: Bytes of one rank: K/V receive buffers, fp32 gradients, results of redistributions, staging (its largest moment),
#: total.
PEAK = int64_record("kv gradients redistributed staging total")


def peak_bytes(plan: Plan, direction: str, bytes_per_element: int = 2) -> np.ndarray:
    """Return the peak bytes of the communication buffers of every rank.

    Counted are the buffers that the engine allocates for communication:

    * kv: K and V of slots 1 and up, for the whole program;
    * gradients (backward): at most fp32 dK and dV of every slot that is computed or receives a reduce, for the whole
      program; a slot with one part keeps it as the kernel, or the message, made it;
    * redistributed: results of redistributions between the layouts of the caller and of the computation: q, k, v and
      out in the forward; dout, dq, dk and dv in the backward, which also counts q, k and v saved from the forward;
    * staging: rows sent from several places are gathered; K and V that land in several places, and all reduces, are
      received separately; in messages of several tensors, all rows are packed at both ends; in redistributions, heads
      are cut out and put in. The largest sum over all messages in flight.

    Not counted is memory that one rank alone would need as well: results, copies, and what kernels make; its formula is
    in docs/algorithms.md, "Memory".

    In a plan of parts, the buffers of a part exist from its first step until it is concluded, and results of
    redistributions from before all steps until after them. "redistributed" then also counts rows of a part that are not
    consecutive and are gathered because no redistribution does so, and the caller's tensors that collect the results of
    the parts.

    Args:
        plan: plan.
        direction: "forward" or "backward".
        bytes_per_element: element size of K and V.

    Returns:
        Records of dtype PEAK [ranks]. The fields may reach their peaks at different times; the total is an upper bound.
        It also counts one row of zeros, from which gradients of keys that land in several places begin.
    """
    check_type("plan", plan, Plan)
    buffers = [
        buffer_bytes(part, direction, bytes_per_element, _rows(plan, index, False), _rows(plan, index, True))
        for index, part in enumerate(plan.parts_or_self)
    ]
    out = np.zeros(plan.ranks, PEAK)
    if plan.parts:
        out["kv"], out["gradients"], out["staging"] = _peak_over_steps(plan, direction, buffers, bytes_per_element)
        out["redistributed"] = _redistributed_by_parts(plan, direction, buffers, bytes_per_element)
    else:
        (only,) = buffers
        out["kv"], out["gradients"] = only.kv, only.gradients.sum(1)
        out["redistributed"] = only.saved_inputs + only.inputs + only.outputs
        out["staging"] = np.maximum(only.staging.max(0), np.maximum(only.input_staging, only.output_staging))
    out["total"] = out["kv"] + out["gradients"] + out["redistributed"] + out["staging"]
    if direction == "backward":
        out["total"] += _row_of_zeros(plan)
    return out


def _row_of_zeros(plan: Plan) -> np.ndarray:
    """Return the bytes of a row of fp32 gradients on the ranks where keys land in several places, int64 [ranks]."""
    kv_row, out = plan.attention.kv_row, np.zeros(plan.ranks, np.int64)
    for part in plan.parts_or_self:
        fetch = part.backward.fetch
        heads = part.kv_layout_compute.head_counts(kv_row.heads)
        ranks = np.unique(fetch.items["dst"][~fetch.is_contiguous("dst")])
        out[ranks] = np.maximum(out[ranks], 4 * heads[ranks] * max(kv_row.dim, kv_row.dim_v))
    return out


def _peak_over_steps(
    plan: Plan, direction: str, buffers: list[BufferBytes], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the peak bytes of K/V buffers, of gradients and of staging over the step order of a plan of parts,
    including the times before and after all steps; int64 [ranks] each."""
    order, ends = plan.step_order(direction), part_ends(plan, direction)
    begins = [order.index((part, 0)) for part in range(len(buffers))]
    part_step = [-1] * len(buffers)  # current step of each part
    kv, gradients, staging = np.zeros((3, len(order) + 2, plan.ranks), np.int64)
    for now, entry in enumerate((None, *order, None), -1):
        if entry is not None:
            part_step[entry[0]] = entry[1]
        for part, part_buffers in enumerate(buffers):
            lives, in_fp32 = begins[part] <= now <= ends[part], size == 4 or part_buffers.has_copies
            kv[now] += part_buffers.kv * lives
            gradients[now] += part_buffers.gradients[:, 1:].sum(1) * lives
            gradients[now] += part_buffers.gradients[:, 0] * (begins[part] <= now if in_fp32 else lives)
            if now < begins[part]:
                staging[now] += part_buffers.input_staging
            elif now <= ends[part]:
                output_staging = part_buffers.output_staging if now == ends[part] else 0
                staging[now] += np.maximum(part_buffers.staging[part_step[part]], output_staging)
            else:
                staging[now] += part_buffers.output_staging
    return kv.max(0), gradients.max(0), staging.max(0)


def _redistributed_by_parts(plan: Plan, direction: str, buffers: list[BufferBytes], size: int) -> np.ndarray:
    """Return the bytes of gathered rows, of results of redistributions and of the caller's tensors, int64 [ranks]."""
    attention = plan.attention
    q_row, out_row = attention.heads * attention.head_dim, attention.heads * attention.head_dim_v
    kv_row = attention.kv_row.channels
    out = np.zeros(plan.ranks, np.int64)
    for rank in range(plan.ranks):
        rows, kv_rows = (
            [_gathered_rows(plan, part, rank, keys) for part in range(len(buffers))] for keys in (False, True)
        )
        whole, kv_whole = (
            0 if any(count is None for count in counts) else int(layout.token_counts[rank])
            for counts, layout in ((rows, plan.layout), (kv_rows, plan.kv_layout_in))
        )
        q_gathered = sum(n for part, n in zip(plan.parts, rows, strict=True) if n and part.q_redistribution is None)
        kv_gathered = sum(
            n for part, n in zip(plan.parts, kv_rows, strict=True) if n and part.kv_redistribution is None
        )
        saved = (q_gathered * q_row + kv_gathered * kv_row) * size
        inputs, outputs = sum(int(b.inputs[rank]) for b in buffers), sum(int(b.outputs[rank]) for b in buffers)
        if direction == "forward":
            out[rank] = saved + inputs + outputs + whole * out_row * size
            continue
        saved += sum(int(b.saved_inputs[rank]) for b in buffers)
        rounded = outputs - sum(int(b.output_copies[rank]) for b in buffers if size < 4)  # copies: rounded per part
        results = (whole * q_row + kv_whole * kv_row) * size
        out[rank] = saved + max(inputs + q_gathered * out_row * size + outputs, rounded + results)
    return out


def _rows(plan: Plan, part: int, keys: bool) -> Rows:
    """Return the runs of a part's rows on each rank, or None for a plan without parts."""
    return [part_rows(plan, part, rank, keys) for rank in range(plan.ranks)] if plan.parts else None


def _gathered_rows(plan: Plan, part: int, rank: int, keys: bool) -> int | None:
    """Return the number of gathered rows of a part: 0 if they are one run, None if they are all of the rank."""
    first, count = part_rows(plan, part, rank, keys)
    rows = int(count.sum())
    if rows == (plan.kv_layout_in if keys else plan.layout).token_counts[rank]:
        return None
    return 0 if (first[1:] == first[:-1] + count[:-1]).all() else rows


def check_peak_bytes(plan: Plan, max_bytes: int, bytes_per_element: int) -> None:
    """Raise PlanError naming the rank and direction whose communication buffers exceed `max_bytes`."""
    for direction in ("forward", "backward"):
        peaks = peak_bytes(plan, direction, bytes_per_element)
        rank = int(np.argmax(peaks["total"]))
        peak = peaks[rank]
        if peak["total"] > max_bytes:
            raise PlanError(
                f"{direction}: rank {rank}: communication buffers take {peak['total']} bytes ({peak['kv']} keys and "
                f"values, {peak['gradients']} gradients, {peak['redistributed']} redistributed, {peak['staging']} "
                f"staging), more than the bound of {max_bytes}"
            )
