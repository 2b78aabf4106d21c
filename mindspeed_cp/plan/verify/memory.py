"""Peak bytes of the communication buffers that the engine allocates for a plan, and of its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.layout.redistribution import packed_pairs
from mindspeed_cp.layout.runs import intersect_runs
from mindspeed_cp.plan.parts import part_ends, part_rows
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages, int64_record
from mindspeed_cp.plan.transfers import GRADIENT_BYTES
from mindspeed_cp.schema.numbers import check_type

#: Bytes of one rank: K/V receive buffers, fp32 gradients, results of redistributions, staging (its largest moment),
#: total.
PEAK = int64_record("kv gradients redistributed staging total")


def peak_bytes(plan: Plan, direction: str, bytes_per_element: int = 2) -> np.ndarray:
    """Return the peak bytes of the communication buffers of every rank.

    Counted are the buffers that the engine allocates for communication:

    * kv: K and V of slots 1 and up, for the whole program;
    * gradients (backward): at most fp32 dK and dV of every slot that is computed or receives a reduce, for the whole
      program; a slot to which one call or message alone adds keeps what that made;
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
    out["kv"], out["gradients"], out["staging"] = _peak_over_steps(plan, direction, buffers, bytes_per_element)
    out["redistributed"] = (
        _redistributed_by_parts(plan, direction, buffers, bytes_per_element)
        if plan.parts
        else buffers[0].saved_inputs + buffers[0].inputs + buffers[0].outputs
    )
    out["total"] = out["kv"] + out["gradients"] + out["redistributed"] + out["staging"]
    if direction == "backward":
        out["total"] += _row_of_zeros(plan)
    return out


def attention_peak_bytes(plan: Plan, bytes_per_element: int = 2) -> np.ndarray:
    """Return the peak bytes of one layer's attention, int64 [ranks]: the larger of forward and backward.

    Included are the caller's q, k, v, out and, in the backward, their gradients; out, lse and the gradient of q in fp32
    during accumulation; and the communication buffers of :func:`peak_bytes`, an upper
    bound. With latents, so are the keys and values of a slot while it is read, and their gradients. Weights,
    activations of other layers and buffers inside kernels are not included.
    """
    attention = plan.attention
    width, width_v = attention.head_dim, attention.head_dim_v
    q_tokens, kv_tokens = plan.layout.token_counts, plan.kv_layout_in.token_counts
    kv_channels = attention.kv_row.channels
    caller = (q_tokens * attention.heads * (width + width_v) + kv_tokens * kv_channels) * bytes_per_element
    rows = np.zeros(plan.ranks, np.int64)  # computed queries times their heads
    for part in plan.parts_or_self:
        rows += part.q_layout_compute.token_counts * part.q_layout_compute.head_counts(attention.heads)
    peaks = []
    for direction, tensors, summed in (("forward", 1, width_v), ("backward", 2, width)):
        buffers = peak_bytes(plan, direction, bytes_per_element)["total"]
        expanded = _expanded_bytes(plan, direction, bytes_per_element)
        peaks.append(tensors * caller + rows * (4 * summed + 4) + buffers + expanded)
    return np.maximum(*peaks)


def _expanded_bytes(plan: Plan, direction: str, bytes_per_element: int) -> np.ndarray:
    """Return an upper bound of the bytes of the keys and values that are expanded from the latents of one slot, and in
    the backward of their gradients, in fp32 and as the operand of the products; int64 [ranks]."""
    attention, out = plan.attention, np.zeros(plan.ranks, np.int64)
    if attention.latent is None:
        return out
    element = bytes_per_element if direction == "forward" else 2 * bytes_per_element + GRADIENT_BYTES
    for part in plan.parts_or_self:
        heads = part.q_layout_compute.head_counts(attention.heads)
        rows = getattr(part, direction).capacity.max(1, initial=0)
        out = np.maximum(out, rows * heads * (attention.head_dim + attention.head_dim_v) * element)
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
    """Return the peak bytes of K/V buffers, of gradients and of staging over the step order of a plan, including the
    times before and after all steps; int64 [ranks] each."""
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


# Bytes of each buffer of one plan without parts.


@dataclass(frozen=True)
class BufferBytes:
    """Bytes of the buffers of one direction, int64; `peak_bytes` describes them.

    Attributes:
        kv: receive buffers, [ranks].
        gradients: gradients of each slot, [ranks, slots].
        staging: staging in each step, [steps, ranks].
        saved_inputs: redistributed q, k and v that the backward has from the forward, [ranks].
        inputs, outputs: results of the redistributions before and after the steps, [ranks].
        output_copies: the part of `outputs` in which copies of kv heads are summed and later rounded, [ranks].
        input_staging, output_staging: staging of these redistributions, [ranks].
        has_copies: True if a kv head is on several ranks; gradients then stay fp32 until they are redistributed.
    """

    kv: np.ndarray
    gradients: np.ndarray
    staging: np.ndarray
    saved_inputs: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    output_copies: np.ndarray
    input_staging: np.ndarray
    output_staging: np.ndarray
    has_copies: bool


#: First rows and numbers of rows of the runs of a part's rows among the caller's, for each rank; None: all rows.
Rows = Sequence[tuple[np.ndarray, np.ndarray]] | None

#: Rows of tensors that are redistributed: the redistribution (None: nothing moves), bytes of a (row, head) of all
#: tensors, number of tensors, and rows of the part.
MovedRows = tuple[Redistribution | None, int, int, Rows]


def buffer_bytes(plan: Plan, direction: str, size: int, rows: Rows = None, kv_rows: Rows = None) -> BufferBytes:
    """Return the buffers of a plan without parts.

    Args:
        plan: plan, or part of a plan.
        direction: "forward" or "backward".
        size: bytes of an element.
        rows, kv_rows: rows of a part among the caller's rows of q, and of k and v.
    """
    program: Program = getattr(plan, direction)
    attention = plan.attention
    kv_channels = attention.kv_row.dim + attention.kv_row.dim_v  # of a head
    kv_width = plan.kv_layout_compute.head_counts(attention.kv_row.heads) * kv_channels
    gradients = np.zeros_like(program.capacity)
    if direction == "backward":
        summed = np.zeros_like(program.capacity, bool)
        summed[:, 0] = True
        summed[program.contents["rank"], program.contents["slot"]] = True
        summed[program.reduce.items["dst"], program.reduce.items["dst_slot"]] = True
        gradients = program.capacity * summed * kv_width[:, None] * 4
    staging = _message_staging(plan, program, size) * kv_width

    qk, v = attention.head_dim, attention.head_dim_v
    q, kv = plan.q_redistribution, plan.kv_redistribution
    has_copies = kv is not None and kv.has_copies
    saved: list[MovedRows] = []
    inputs: list[MovedRows] = [(q, qk * size, 1, rows), (kv, kv_channels * size, 2, kv_rows)]
    outputs: list[MovedRows] = [(q, v * size, 1, rows)]
    if direction == "backward":
        saved, inputs = inputs, outputs
        outputs = [(q, qk * size, 1, rows), (kv, kv_channels * (4 if has_copies else size), 2, kv_rows)]
    return BufferBytes(
        kv=program.capacity[:, 1:].sum(1) * kv_width * size,
        gradients=gradients,
        staging=staging,
        saved_inputs=_result_bytes(plan, saved, adjoint=False),
        inputs=_result_bytes(plan, inputs, adjoint=False),
        outputs=_result_bytes(plan, outputs, adjoint=True),
        output_copies=_result_bytes(plan, outputs[1:] if has_copies else [], adjoint=True),
        input_staging=_staging_bytes(plan, inputs, adjoint=False),
        output_staging=_staging_bytes(plan, outputs, adjoint=True),
        has_copies=has_copies,
    )


def _result_bytes(plan: Plan, moved: Sequence[MovedRows], adjoint: bool) -> np.ndarray:
    """Return the bytes of the results of redistributions, int64 [ranks]."""
    out = np.zeros(plan.ranks, np.int64)
    for redistribution, width, *_ in moved:
        if redistribution is None:
            continue
        target, heads = redistribution.target, redistribution.heads
        if adjoint:
            out += redistribution.source.token_counts * heads * width
        else:
            out += target.token_counts * target.head_counts(heads) * width
    return out


def _staging_bytes(plan: Plan, moved: Sequence[MovedRows], adjoint: bool) -> np.ndarray:
    """Return the bytes of the staging of redistributions that are posted together, int64 [ranks]."""
    out = np.zeros(plan.ranks, np.int64)
    present = [(moves, width, tensors, rows) for moves, width, tensors, rows in moved if moves is not None]
    packed = packed_pairs([(moves, width, tensors) for moves, width, tensors, _ in present])
    for (moves, width, _, rows), is_packed in zip(present, packed, strict=True):
        out += staging_volume(moves, adjoint, rows, is_packed) * width
    return out


def staging_volume(
    redistribution: Redistribution, adjoint: bool, rows: Rows = None, packed: np.ndarray | bool = False
) -> np.ndarray:
    """Return the (row, head) pairs that a redistribution stages, int64 [ranks]; an upper bound.

    Staged are messages that several tensors are packed into; of a single one, on the side with all heads, rows of some
    heads only and rows from several places; on the other side, rows from several places; copies that are summed; and
    rows that stay on a rank but are gathered from several places.

    Args:
        redistribution: redistribution.
        adjoint: True for the move back to the source.
        rows: runs of the source's rows among the caller's rows.
        packed: of each of `rank_pairs`, or of all: there are rows of other tensors in the same message.
    """
    pairs = redistribution.rank_pairs
    out = np.zeros(redistribution.source.ranks, np.int64)
    for pair, is_packed in zip(pairs, np.broadcast_to(packed, len(pairs)), strict=True):
        runs, volume = redistribution.runs_of(pair), int(pair["rows"] * pair["heads"])
        src_row, count = runs["src_row"], runs["rows"]
        if rows is not None and not adjoint:  # the adjoint writes to the part's own rows
            src_row, count = _caller_runs(src_row, count, *rows[pair["src"]])
        src_is_run, dst_is_run = _is_one_run(src_row, count), _is_one_run(runs["dst_row"], runs["rows"])
        if pair["src"] == pair["dst"]:
            if not (dst_is_run if adjoint else src_is_run):
                out[pair["src"]] += volume
            continue
        some_heads = pair["heads"] < redistribution.heads and pair["rows"] > 1
        if is_packed or some_heads or not src_is_run or (adjoint and redistribution.has_copies):
            out[pair["src"]] += volume
        if is_packed or not dst_is_run:
            out[pair["dst"]] += volume
    return out


def _caller_runs(
    row: np.ndarray, count: np.ndarray, first: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return runs of a part's rows as runs of the caller's, where the part's rows are `rows` from each `first` on."""
    first, rows = first[rows > 0], rows[rows > 0]
    ends = np.cumsum(rows)
    _, run, begin, end = intersect_runs(row, row + count, ends - rows, ends)
    return first[run] + begin - (ends - rows)[run], end - begin


def _is_one_run(first: np.ndarray, rows: np.ndarray) -> bool:
    return bool((first[1:] == first[:-1] + rows[:-1]).all())


def _message_staging(plan: Plan, program: Program, size: int) -> np.ndarray:
    """Return the staging of messages that travel by themselves, in bytes of one channel, int64 [steps, ranks]."""
    staging = np.zeros((program.steps, plan.ranks), np.int64)
    fetch, reduce = program.fetch, program.reduce
    gathered, every = ~reduce.is_contiguous("src"), np.ones(len(reduce), bool)
    _add_staging(staging, fetch, size, ~fetch.is_contiguous("src"), ~fetch.is_contiguous("dst"))
    if plan.gradient_bytes == 4:
        _add_staging(staging, reduce, 4, gathered, every)
    else:  # rounded copies are sent; scattered rows are copied in fp32 before that, and when they are added
        _add_staging(staging, reduce, plan.gradient_bytes, every, every)
        _add_staging(staging, reduce, 4, gathered, ~reduce.is_contiguous("dst"))
    return staging


def _add_staging(
    staging: np.ndarray, messages: Messages, size: int, gathered: np.ndarray, received_apart: np.ndarray
) -> None:
    """Add the staging of messages, in bytes of one channel, to the steps in which they are in flight.

    Args:
        staging: [steps, ranks].
        messages: messages of one kind.
        size: bytes of an element.
        gathered: bool [messages], True where the sender copies the rows first.
        received_apart: bool [messages], True where they arrive in a buffer of their own.
    """
    for item, is_copied, apart in zip(messages.items, gathered, received_apart, strict=True):
        steps = slice(item["start"], item["done"] + 1)
        if is_copied:
            staging[steps, item["src"]] += item["rows"] * size
        if apart:
            staging[steps, item["dst"]] += item["rows"] * size
