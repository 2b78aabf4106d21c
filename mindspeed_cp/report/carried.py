"""Which documents the messages of a plan carry."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.transfers import GRADIENTS, KEYS, MOVE, REMAP, edges
from mindspeed_cp.layout import Layout, Redistribution, expand
from mindspeed_cp.plan import Messages, Plan, Program

#: `rows` rows of document `doc` are in message `message`, a number in a table of transfers.
CARRIED = np.dtype([(name, np.int64) for name in ("message", "doc", "rows")])


def carried(plan: Plan, direction: str, sent: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
    """What messages carry: records of dtype CARRIED in any order; one message may have several of a document.

    Rows that a rank passes on without computing against them are found where they are computed or owned; messages
    between two relays have no record.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        sent: transfers of this direction, dtype TRANSFER or SPENT, all of the plan's, in any order that is stable.
        wanted: of which of them, bool [transfers]; default: all.
    """
    wanted = np.ones(len(sent), bool) if wanted is None else wanted
    found = [np.empty(0, CARRIED)]
    for part, piece in enumerate(plan.pieces):
        program: Program = getattr(piece, direction)
        for kind, messages in ((KEYS, program.fetch), (GRADIENTS, program.reduce)):
            numbers = _numbers(messages.items, sent, np.flatnonzero((sent["kind"] == kind) & (sent["part"] == part)))
            found.append(_between_steps(piece, program, messages, kind, numbers, wanted))
        moved = np.flatnonzero((sent["kind"] == MOVE) & (sent["part"] == part) & wanted)
        for move in [piece.q_move or piece.kv_move] * bool(len(moved)):
            found.append(_moved(move, sent, moved, edges(plan)))
    moved = np.flatnonzero((sent["kind"] == REMAP) & wanted)
    if len(moved) and plan.linear is not None:
        found.append(_moved(Redistribution.between(plan.linear, plan.layout, 1), sent, moved, edges(plan)))
    return np.concatenate(found)


def summed(table: np.ndarray) -> np.ndarray:
    """Records of dtype CARRIED with one for each message and document; by message, those of most rows first."""
    many = int(table["doc"].max(initial=0)) + 1
    key = table["message"] * many + table["doc"]
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.append(True, np.diff(key) != 0)[: len(key)])
    out = table[order[first]]
    if len(out):
        out["rows"] = np.add.reduceat(table["rows"][order], first)
    most = int(out["rows"].max(initial=0)) + 1
    return out[np.argsort(out["message"] * most + (most - 1 - out["rows"]), kind="stable")]


def _numbers(items: np.ndarray, sent: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """For each message of a program its number in the table, where `numbers` are those of its kind and part."""
    of_items = np.lexsort((items["dst"], items["src"], items["start"]))
    mine = sent[numbers]
    out = np.empty(len(items), np.int64)
    out[of_items] = numbers[np.lexsort((mine["dst"], mine["src"], mine["start"]))]
    return out


def _between_steps(
    piece: Plan, program: Program, messages: Messages, kind: int, numbers: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Of the fetches or reduces of one piece, which have these numbers in the table."""
    items = messages.items
    owner, runs = messages.flat_runs
    chosen = wanted[numbers][owner]
    owner, runs = owner[chosen], runs[chosen]
    near, far = ("src", "dst") if kind == KEYS else ("dst", "src")  # the end that is nearer to the owner, and the other
    own = items[near + "_slot"][owner] == 0
    of_owner = _at_owner(piece.kv_layout, items[near][owner[own]], runs[near + "_row"][own], runs["rows"][own])
    computed = _where_computed(program, items, kind, far, owner[~own], runs[~own])
    out = np.empty(len(of_owner[0]) + len(computed[0]), CARRIED)
    run = np.concatenate([np.flatnonzero(own)[of_owner[0]], np.flatnonzero(~own)[computed[0]]])
    out["message"] = numbers[owner[run]]
    out["doc"] = np.concatenate([of_owner[1], computed[1]])
    out["rows"] = np.concatenate([of_owner[2], computed[2]])
    return out


def _at_owner(layout: Layout, rank: np.ndarray, row: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """(number, document, rows) of rows of ranks' own shards."""
    wide = int(layout.token_counts.max(initial=0)) + 1
    first = layout.spans["rank"] * wide + layout.first_rows
    length = layout.spans["stop"] - layout.spans["start"]
    return _meet(rank * wide + row, rows, first, length, layout.spans["doc"])


def _where_computed(
    program: Program, items: np.ndarray, kind: int, end: str, owner: np.ndarray, runs: np.ndarray
) -> tuple[np.ndarray, ...]:
    """(number, document, rows) of runs that lie in a receive buffer at one end, by what that computes next (or, of
    gradients, has computed last) in the same buffer."""
    contents = program.contents[np.isin(program.contents["rank"], items[end][owner])]
    slots, steps = program.capacity.shape[1], program.steps + 1
    wide = int(program.capacity.max(initial=0)) + 1
    place = (contents["rank"] * slots + contents["slot"]) * steps + contents["step"]
    known = np.unique(place)
    buffer = items[end][owner] * slots + items[end + "_slot"][owner]
    if kind == KEYS:
        at = np.searchsorted(known, buffer * steps + items["done"][owner] + 1, "left")
    else:
        at = np.searchsorted(known, buffer * steps + items["start"][owner], "right") - 1
    there = known[np.clip(at, 0, max(len(known) - 1, 0))] if len(known) else np.full(len(owner), -1)
    found = np.flatnonzero((at >= 0) & (at < len(known)) & (there // steps == buffer))
    spans = program.spans[expand(contents["first"], contents["count"])]
    of = np.repeat(np.arange(len(contents)), contents["count"])
    length = spans["stop"] - spans["start"]
    before = np.cumsum(length) - length
    begins = np.cumsum(contents["count"]) - contents["count"]
    inside = before - before[np.minimum(begins, max(len(before) - 1, 0))][of] if len(before) else before
    first = place[of] * wide + contents["row"][of] + inside
    order = np.argsort(first, kind="stable")
    number, doc, rows = _meet(
        there[found] * wide + runs[end + "_row"][found],
        runs["rows"][found],
        first[order],
        length[order],
        spans["doc"][order],
    )
    return found[number], doc, rows


def _moved(move: Redistribution | None, sent: np.ndarray, numbers: np.ndarray, before: int) -> np.ndarray:
    """Of a move between layouts, posted before turn `before`, the first of the plan, or of its adjoint, posted
    later."""
    if move is None:
        return np.empty(0, CARRIED)
    parts, layout, ranks = move.parts, move.source, move.source.ranks
    part = np.repeat(np.arange(len(parts)), parts["count"])
    runs = move.runs[expand(parts["first"], parts["count"])]
    at, doc, rows = _at_owner(layout, parts["src"][part], runs["src_row"], runs["rows"])
    table = np.empty(len(at), CARRIED)
    table["message"], table["doc"], table["rows"] = part[at], doc, rows
    table = summed(table)
    edges = np.searchsorted(table["message"], np.arange(len(parts) + 1))
    number_of = np.full(ranks * ranks, -1)
    number_of[parts["src"] * ranks + parts["dst"]] = np.arange(len(parts))
    src, dst = sent["src"][numbers], sent["dst"][numbers]
    pair = number_of[np.where(sent["start"][numbers] < before, src * ranks + dst, dst * ranks + src)]
    count = edges[pair + 1] - edges[pair]
    out = table[expand(edges[pair], count)]
    out["message"] = np.repeat(numbers, count)
    return out


def _meet(
    first: np.ndarray, count: np.ndarray, span: np.ndarray, length: np.ndarray, doc: np.ndarray
) -> tuple[np.ndarray, ...]:
    """(number, document, rows) where runs meet spans, which ascend on the same axis; runs may be in any order, and
    several may be of the same rows."""
    low = np.searchsorted(span + length, first, "right")
    many = np.maximum(np.searchsorted(span, first + count, "left") - low, 0)
    number, at = np.repeat(np.arange(len(first)), many), expand(low, many)
    rows = np.minimum(first[number] + count[number], span[at] + length[at]) - np.maximum(first[number], span[at])
    return number[rows > 0], doc[at[rows > 0]], rows[rows > 0]
