"""Fetched keys in pieces: every message of a step is cut by rows, and attention on a piece begins when it is there.

A step becomes as many steps as there are pieces. What lies in a receive slot is cut into equal runs of rows; step i of
them computes run i, which is due just before, and its gradients leave in the step after::

    step              0                               1
    whole             post A   compute own            compute A                 post dA
    two pieces        post A0  post A1, compute own   compute A0  post dA0, compute A1  post dA1

A relay passes a piece on when that piece is there. The local block stays whole in step 0, behind all posts, so that the
first piece of all messages goes before the second; shares of it in later steps of the backward are cut, too. Slots and
bytes stay the same; messages, kernel calls and steps are as many times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.layout.runs import group_starts
from mindspeed_cp.plan.parts import StepOrder
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import ROW_RUN, Messages, sorted_contents


def cut_fetches(plan: Plan, pieces: int) -> Plan:
    """Return a plan in which fetches, and the reduces of their gradients, are cut into pieces.

    Args:
        plan: plan of KV fetches: every reduce carries the gradients of rows that a fetch brought before. Parts that
            fetch nothing stay as they are.
        pieces: pieces of what lies in a slot, 1 or more.

    Returns:
        The new plan, or the given one if nothing is cut.
    """
    is_cut = [len(part.forward.fetch) > 0 for part in plan.parts_or_self]
    if pieces == 1 or not any(is_cut):
        return plan
    parts = tuple(
        replace(part, forward=_cut_program(part.forward, pieces), backward=_cut_program(part.backward, pieces))
        if is_cut[number] else part for number, part in enumerate(plan.parts_or_self)
    )  # fmt: skip
    if not plan.parts:
        return parts[0]

    def order(direction: str) -> StepOrder:
        steps: list[tuple[int, int]] = []
        for part, step in plan.step_order(direction):
            steps += [(part, step * pieces + piece) for piece in range(pieces)] if is_cut[part] else [(part, step)]
        return tuple(steps)

    return replace(plan, parts=parts, forward_order=order("forward"), backward_order=order("backward"))


def _cut_program(program: Program, pieces: int) -> Program:
    """Cut a direction. What starts, is computed or lands in piece i of a slot does so in the i-th of the new steps, or
    of those after the step in which the whole was there."""
    fills = _fills(program)
    contents, spans = _cut_contents(program, fills, pieces)
    last = program.steps * pieces - 1
    fetch, src_piece, dst_piece = _cut_messages(program.fetch, fills, pieces, "done")
    items = fetch.items
    items["start"] = items["start"] * pieces + np.where(items["src_slot"] > 0, src_piece, dst_piece)
    items["done"] = np.minimum((items["done"] + 1) * pieces - 1 + dst_piece, last)
    reduce, src_piece, dst_piece = _cut_messages(program.reduce, fills, pieces, "start")
    items = reduce.items
    items["start"] = (items["start"] - 1) * pieces + 1 + src_piece
    items["done"] = items["done"] * pieces + np.where(items["dst_slot"] > 0, dst_piece, pieces - 1)
    return replace(
        program,
        steps=program.steps * pieces,
        contents=contents,
        spans=spans,
        fetch=fetch.in_global_order(),
        reduce=reduce.in_global_order(),
    )


#: Function of (rank, slot, step) that returns the rows of what reached a slot last before a step; 0 for slot 0.
Fills = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _fills(program: Program) -> Fills:
    """Return the rows that fetches bring to each receive slot, stage by stage."""
    slots, steps = program.capacity.shape[1], program.steps
    owner, runs = program.fetch.flat_runs
    items = program.fetch.items[owner]
    key = (items["dst"] * slots + items["dst_slot"]) * steps + items["done"]
    order = np.argsort(key, kind="stable")
    first = group_starts(key[order])
    rows = np.maximum.reduceat((runs["dst_row"] + runs["rows"])[order], first) if len(first) else np.zeros(1, np.int64)
    key = key[order][first]

    def before(rank: np.ndarray, slot: np.ndarray, step: np.ndarray) -> np.ndarray:
        index = np.searchsorted(key, (rank * slots + slot) * steps + step) - 1
        return np.where(slot > 0, rows[np.maximum(index, 0)], 0)

    return before


def _borders(fill: np.ndarray, pieces: int) -> np.ndarray:
    """Return the first rows of the pieces of slots with so many rows, and the end, int64 [n, pieces + 1]. Where `fill`
    is 0 (slot 0), all rows are in piece 0."""
    out = fill[:, None] * np.arange(pieces + 1) // pieces
    out[fill == 0, 1:] = np.iinfo(np.int64).max // 4
    return out


def _cut_messages(
    messages: Messages, fills: Fills, pieces: int, filled: str
) -> tuple[Messages, np.ndarray, np.ndarray]:
    """Cut messages where pieces of their source slots and target slots begin; steps stay as they are.

    Args:
        messages: messages of one kind.
        fills: rows of the receive slots.
        pieces: pieces of a slot.
        filled: "done" if the messages themselves fill their target slots, "start" if these are full when they start.

    Returns:
        The messages, and the pieces of source and target slot of each, int64 [messages].
    """
    message, runs = messages.flat_runs
    items = messages.items[message]
    src_fill = fills(items["src"], items["src_slot"], items["start"])
    dst_fill = fills(items["dst"], items["dst_slot"], items[filled] + (filled == "done"))
    # Borders of pieces, and the part of each run that lies in a piece of the source and in one of the target
    # [runs, pieces, pieces]: all in rows of the target slot.
    shift = (runs["dst_row"] - runs["src_row"])[:, None]
    src_borders, dst_borders = _borders(src_fill, pieces) + shift, _borders(dst_fill, pieces)
    first_row, end_row = runs["dst_row"][:, None, None], (runs["dst_row"] + runs["rows"])[:, None, None]
    begin = np.maximum(first_row, np.maximum(src_borders[:, :-1, None], dst_borders[:, None, :-1]))
    end = np.minimum(end_row, np.minimum(src_borders[:, 1:, None], dst_borders[:, None, 1:]))
    run, src_piece, dst_piece = np.nonzero(end > begin)
    order = np.lexsort((run, dst_piece, src_piece, message[run]))
    run, src_piece, dst_piece = run[order], src_piece[order], dst_piece[order]
    part = run, src_piece, dst_piece
    cut_runs = np.empty(len(run), ROW_RUN)
    cut_runs["dst_row"], cut_runs["rows"] = begin[part], end[part] - begin[part]
    cut_runs["src_row"] = cut_runs["dst_row"] - shift[run, 0]
    first = group_starts(message[run], src_piece, dst_piece)  # first run of each new message
    cut_items = messages.items[message[run[first]]]
    cut_items["first"], cut_items["count"] = first, np.diff(np.append(first, len(run)))
    cut_items["rows"] = np.add.reduceat(cut_runs["rows"], first) if len(first) else 0
    return Messages(cut_items, cut_runs), src_piece[first], dst_piece[first]


def _cut_contents(program: Program, fills: Fills, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the contents of the steps of all pieces, and their spans."""
    contents = program.contents
    is_whole = (contents["slot"] == 0) & (contents["step"] == 0)
    whole, others = contents[is_whole].copy(), contents[~is_whole]
    whole["step"] = pieces - 1
    content = np.repeat(np.arange(len(others)), others["count"])  # of each span
    spans = program.spans[ragged_arange(others["first"], others["count"])]
    length = spans["stop"] - spans["start"]
    first_span = np.cumsum(others["count"]) - others["count"]  # of each content
    rows_before = np.cumsum(length) - length
    first_row = rows_before
    if len(others):
        first_row = rows_before - rows_before[first_span][content] + others["row"][content]
    fill = fills(others["rank"], others["slot"], others["step"])
    own_rows = np.add.reduceat(length, first_span) if len(first_span) else fill
    is_own = others["slot"] == 0  # shares of the local block are cut by themselves, not at borders of a slot
    borders = _borders(np.where(is_own, own_rows, fill), pieces) + np.where(is_own, others["row"], 0)[:, None]
    begin = np.maximum(first_row[:, None], borders[content, :-1])
    end = np.minimum((first_row + length)[:, None], borders[content, 1:])
    span, piece = np.nonzero(end > begin)
    order = np.lexsort((span, piece, content[span]))
    span, piece = span[order], piece[order]
    cut_spans = spans[span]
    cut_spans["start"] = spans["start"][span] + begin[span, piece] - first_row[span]
    cut_spans["stop"] = cut_spans["start"] + end[span, piece] - begin[span, piece]
    first = group_starts(content[span], piece)  # first span of each new content
    cut_contents = others[content[span[first]]]
    cut_contents["step"] = cut_contents["step"] * pieces + piece[first]
    cut_contents["row"] = begin[span[first], piece[first]]
    cut_contents["first"] = len(program.spans) + first
    cut_contents["count"] = np.diff(np.append(first, len(span)))
    return sorted_contents(np.concatenate([whole, cut_contents])), np.concatenate([program.spans, cut_spans])
