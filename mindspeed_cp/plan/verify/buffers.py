"""Bytes of each communication buffer that the engine allocates for one plan without parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.layout.redistribution import packed_pairs
from mindspeed_cp.layout.runs import intersect_runs
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import Messages


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
    forward_inputs = [_Rows(q, qk * size, 1, rows), _Rows(kv, kv_channels * size, 2, kv_rows)]
    q_output = _Rows(q, v * size, 1, rows)
    if direction == "forward":
        saved, inputs, outputs = [], forward_inputs, [q_output]
    else:
        dkv_output = _Rows(kv, kv_channels * (4 if has_copies else size), 2, kv_rows)
        saved, inputs, outputs = forward_inputs, [q_output], [_Rows(q, qk * size, 1, rows), dkv_output]
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


class _Rows(NamedTuple):
    """Rows of tensors that are redistributed.

    Attributes:
        redistribution: None: nothing moves.
        width: bytes of a (row, head) of all tensors.
        tensors: number of tensors.
        rows: rows of the part.
    """

    redistribution: Redistribution | None
    width: int
    tensors: int
    rows: Rows


def _result_bytes(plan: Plan, moved: Sequence[_Rows], adjoint: bool) -> np.ndarray:
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


def _staging_bytes(plan: Plan, moved: Sequence[_Rows], adjoint: bool) -> np.ndarray:
    """Return the bytes of the staging of redistributions that are posted together, int64 [ranks]."""
    out = np.zeros(plan.ranks, np.int64)
    present = [(each, each.redistribution) for each in moved if each.redistribution is not None]
    packed = packed_pairs([(redistribution, each.width, each.tensors) for each, redistribution in present])
    for (each, redistribution), is_packed in zip(present, packed, strict=True):
        out += staging_volume(redistribution, adjoint, each.rows, is_packed) * each.width
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


# Lifetimes: no row is received while it is read, sent or received again; no gradient is sent while it is summed.


Intervals = tuple[np.ndarray, np.ndarray]  # first and last-plus-one address of runs of rows


def check_lifetimes(program: Program, tiles: Sequence[np.ndarray], direction: str) -> None:
    """Check that no row is used in two conflicting ways in one step.

    The slots of all ranks are concatenated into one address space, so that every conflict is an overlap of two
    intervals.

    Args:
        program: program that has passed `check_program`.
        tiles: tiles of each rank.
        direction: "forward" or "backward", for the message.

    Raises:
        PlanError: names rank, step, slot and row of the first conflict.
    """
    space = _Addresses(program)
    fetches = space.of_messages(program.fetch)
    reduces = space.of_messages(program.reduce)
    reads = space.of_tiles(tiles)
    for step in range(program.steps):
        fetched = _in_flight(fetches, step)
        received, sent = fetched["dst"], fetched["src"]
        read = _select(reads, reads["step"] == step)
        space.forbid_double(received, direction, step, "is received by two messages at once")
        space.forbid_overlap(received, sent, direction, step, "is received while it is being sent")
        space.forbid_overlap(received, read, direction, step, "is received while a tile reads it")

        leaving = _in_flight(reduces, step)["src"]
        landing = _select(reduces["dst"], reduces["done"] == step)
        space.forbid_overlap(leaving, read, direction, step, "has its gradient sent while a tile still adds to it")
        space.forbid_overlap(
            leaving, landing, direction, step, "has its gradient sent while another gradient is added to it"
        )
        reset = _select(fetches["dst"], fetches["done"] == step)
        staying = _select(reduces["src"], (reduces["start"] <= step) & (step < reduces["done"]))
        space.forbid_overlap(
            staying, reset, direction, step, "has its gradient sent while a fetch that lands sets it to zero"
        )


class _Addresses:
    """Addresses of the rows of all slots of all ranks."""

    def __init__(self, program: Program) -> None:
        self.slots = program.capacity.shape[1]
        self.base = np.concatenate([[0], np.cumsum(program.capacity.ravel())])

    def address(self, rank: np.ndarray | int, slot: np.ndarray, row: np.ndarray) -> np.ndarray:
        return self.base[rank * self.slots + slot] + row

    def of_messages(self, messages: Messages) -> dict:
        """Return the runs of messages at both ends, with their start and done steps."""
        owner, runs = messages.flat_runs
        items = messages.items[owner]
        out = {"start": items["start"], "done": items["done"]}
        for side in ("src", "dst"):
            first = self.address(items[side], items[side + "_slot"], runs[side + "_row"])
            out[side] = first, first + runs["rows"]
        return out

    def of_tiles(self, tiles: Sequence[np.ndarray]) -> dict:
        """Return the runs of rows that tiles read, with their steps."""
        first = np.concatenate([self.address(rank, tile["slot"], tile["k_row"]) for rank, tile in enumerate(tiles)])
        rows = np.concatenate([tile["k_rows"] for tile in tiles])
        return {"step": np.concatenate([tile["step"] for tile in tiles]), 0: first, 1: first + rows}

    def forbid_double(self, runs: Intervals, direction: str, step: int, why: str) -> None:
        """Raise PlanError if two of the runs overlap."""
        order = np.argsort(runs[0], kind="stable")
        first, end = runs[0][order], np.maximum.accumulate(runs[1][order])
        overlap = np.flatnonzero(first[1:] < end[:-1])
        if len(overlap):
            self._raise(int(first[overlap[0] + 1]), direction, step, why)

    def forbid_overlap(self, a: Intervals, b: Intervals, direction: str, step: int, why: str) -> None:
        """Raise PlanError if a and b have a row in common."""
        if not len(a[0]) or not len(b[0]):
            return
        starts, ends = np.sort(a[0]), np.sort(a[1])
        common = np.searchsorted(starts, b[1], "left") - np.searchsorted(ends, b[0], "right")
        hit = np.flatnonzero(common > 0)
        if len(hit):
            inside = (a[0] < b[1][hit[0]]) & (a[1] > b[0][hit[0]])
            self._raise(int(max(b[0][hit[0]], a[0][inside].min())), direction, step, why)

    def _raise(self, address: int, direction: str, step: int, why: str) -> None:
        index = int(np.searchsorted(self.base, address, "right")) - 1
        rank, slot = divmod(index, self.slots)
        row = address - int(self.base[index])
        raise PlanError(f"{direction}: rank {rank}, step {step}: row {row} of slot {slot} {why}")


def _in_flight(messages: dict, step: int) -> dict[str, Intervals]:
    now = (messages["start"] <= step) & (step <= messages["done"])
    return {side: _select(messages[side], now) for side in ("src", "dst")}


def _select(runs: dict | Intervals, keep: np.ndarray) -> Intervals:
    return runs[0][keep], runs[1][keep]
