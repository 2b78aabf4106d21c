"""Messages of a timeline as bars, and the documents in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import Layout, Redistribution, intersect_runs, ragged_arange
from mindspeed_cp.plan import Messages, Plan, Program
from mindspeed_cp.plan.transfers import GRADIENTS, HIDDEN_STATES, KEYS, REDISTRIBUTION, edge_steps
from mindspeed_cp.report.slot_rows import SlotRows
from mindspeed_cp.simulate.timeline import Timeline
from mindspeed_cp.simulate.waits import is_internode

#: Messages that one rank sends, or receives, of one kind and part, posted in one step: `messages` messages of kind
#: KINDS[kind] and `bytes` bytes in all, posted in step `start`; the first is due in step `done`. They are in transit
#: from `begin` to `end` (seconds). `far` is 1 between nodes. `peer` is the other end of the largest message.
MESSAGE_BAR = np.dtype(
    [
        *((name, np.int64) for name in ("rank", "start", "done", "kind", "part", "far", "messages", "peer")),
        *((name, np.float64) for name in ("bytes", "begin", "end")),
    ]
)


class MessageBars:
    """Message bars of one direction of a timeline.

    Args:
        timeline: a simulated layer.
        direction: "forward" or "backward".
        end: "dst" for bars of what ranks receive, "src" for bars of what they send.
        detailed_ranks: ranks for whose bars the documents are computed; None: all ranks.

    Attributes:
        bars: records of dtype MESSAGE_BAR, by rank and time.
        message_numbers, bar_offsets: transfers message_numbers[bar_offsets[i] : bar_offsets[i + 1]] of the direction
            are the messages of bar i, the largest first.
    """

    def __init__(
        self, timeline: Timeline, direction: str, end: str, detailed_ranks: Sequence[int] | None = None
    ) -> None:
        self._plan, self._direction, self._end, self._detailed_ranks = timeline.plan, direction, end, detailed_ranks
        self._peer = "src" if end == "dst" else "dst"
        self._sent = sent = timeline.transfers(direction)
        far = is_internode(sent, timeline.cluster)
        keys = (far, sent["part"], sent["kind"], sent["start"], sent[end])
        order = np.lexsort((-sent["bytes"], *keys))
        sorted_sent = sent[order]
        is_first = np.zeros(len(sorted_sent), bool)
        is_first[:1] = True
        for key in keys:
            is_first[1:] |= np.diff(key[order]) != 0
        first = np.flatnonzero(is_first)
        self.message_numbers, self.bar_offsets = order, np.append(first, len(sorted_sent))
        self.bars = bars = np.zeros(len(first), MESSAGE_BAR)
        fields = (("rank", end), ("peer", self._peer), ("start", "start"), ("kind", "kind"), ("part", "part"))
        for name, field in fields:
            bars[name] = sorted_sent[field][first]
        bars["far"] = far[order][first]
        bars["messages"] = np.diff(self.bar_offsets)
        reductions = (("done", np.minimum), ("bytes", np.add), ("begin", np.minimum), ("end", np.maximum))
        for name, reduction in reductions:
            bars[name] = reduction.reduceat(sorted_sent[name], first) if len(first) else 0

    def peers(self, bar: int) -> list[int]:
        """Return the other ends of the messages of a bar, that of the largest message first."""
        messages = self.message_numbers[self.bar_offsets[bar] : self.bar_offsets[bar + 1]]
        return [int(rank) for rank in self._sent[self._peer][messages]]

    def documents(self, bar: int) -> list[int]:
        """Return the documents in the messages of a bar, those with most rows first; empty for ranks without
        details."""
        low, high = self._documents[0][bar : bar + 2]
        return [int(doc) for doc in self._documents[1][low:high]]

    @cached_property
    def _documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents of all bars one after the other, and the offset of each bar."""
        ranks = self._detailed_ranks
        wanted = None if ranks is None else np.isin(self._sent[self._end], list(ranks))
        table = documents_in_messages(self._plan, self._direction, self._sent, wanted)
        bar_of_message = np.empty(len(self._sent), np.int64)
        bar_of_message[self.message_numbers] = np.repeat(np.arange(len(self.bars)), np.diff(self.bar_offsets))
        table["message"] = bar_of_message[table["message"]]
        table = merge_by_document(table)
        return np.searchsorted(table["message"], np.arange(len(self.bars) + 1)), table["doc"]


#: `rows` rows of document `doc` in message `message`, an index into a table of transfers.
MESSAGE_DOCUMENT = np.dtype([(name, np.int64) for name in ("message", "doc", "rows")])


def documents_in_messages(plan: Plan, direction: str, sent: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
    """Return the documents in messages: records of dtype MESSAGE_DOCUMENT, in any order, possibly several of one
    document.

    Rows that a rank forwards without computing on them are looked up where they are computed or owned; messages
    between two relays have no record.

    Args:
        plan: any plan.
        direction: "forward" or "backward".
        sent: all transfers of this direction, dtype TRANSFER or SPENT, in any stable order.
        wanted: mask of the transfers to look up, bool [transfers]; default: all.
    """
    wanted = np.ones(len(sent), bool) if wanted is None else wanted
    tables = [np.empty(0, MESSAGE_DOCUMENT)]
    for part, part_plan in enumerate(plan.parts_or_self):
        program: Program = getattr(part_plan, direction)
        for kind, messages in ((KEYS, program.fetch), (GRADIENTS, program.reduce)):
            numbers = _message_numbers(
                messages.items, sent, np.flatnonzero((sent["kind"] == kind) & (sent["part"] == part))
            )
            tables.append(_fetch_and_reduce_documents(part_plan, program, messages, kind, numbers, wanted))
        redistribution_numbers = np.flatnonzero((sent["kind"] == REDISTRIBUTION) & (sent["part"] == part) & wanted)
        for move in (part_plan.q_redistribution, part_plan.kv_redistribution):  # the first that has the message
            tables.append(_redistributed_documents(move, sent, redistribution_numbers, edge_steps(plan)))
            redistribution_numbers = np.setdiff1d(redistribution_numbers, tables[-1]["message"])
    redistribution_numbers = np.flatnonzero((sent["kind"] == HIDDEN_STATES) & wanted)
    if len(redistribution_numbers) and plan.linear_layout is not None:
        tables.append(
            _redistributed_documents(
                Redistribution.between(plan.linear_layout, plan.layout, 1),
                sent,
                redistribution_numbers,
                edge_steps(plan),
            )
        )
    return np.concatenate(tables)


def merge_by_document(table: np.ndarray) -> np.ndarray:
    """Return one record of dtype MESSAGE_DOCUMENT for each message and document; by message, those with most rows
    first."""
    document_count = int(table["doc"].max(initial=0)) + 1
    key = table["message"] * document_count + table["doc"]
    order = np.argsort(key, kind="stable")
    key = key[order]
    first_records = np.flatnonzero(np.append(True, np.diff(key) != 0)[: len(key)])
    out = table[order[first_records]]
    if len(out):
        out["rows"] = np.add.reduceat(table["rows"][order], first_records)
    row_limit = int(out["rows"].max(initial=0)) + 1
    return out[np.argsort(out["message"] * row_limit + (row_limit - 1 - out["rows"]), kind="stable")]


def _message_numbers(items: np.ndarray, sent: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the index in `sent` of each message of a program; `numbers` are the indices of its kind and part."""
    of_items = np.lexsort((items["dst"], items["src"], items["start"]))
    candidates = sent[numbers]
    out = np.empty(len(items), np.int64)
    out[of_items] = numbers[np.lexsort((candidates["dst"], candidates["src"], candidates["start"]))]
    return out


def _fetch_and_reduce_documents(
    part_plan: Plan, program: Program, messages: Messages, kind: int, numbers: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Return the documents in the fetch or reduce messages of one part, whose table indices are `numbers`."""
    items = messages.items
    owner, runs = messages.flat_runs
    chosen = wanted[numbers][owner]
    owner, runs = owner[chosen], runs[chosen]
    near, far = ("src", "dst") if kind == KEYS else ("dst", "src")  # near: the end closer to the owner
    own = items[near + "_slot"][owner] == 0
    of_owner = _at_kv_owner(
        part_plan.kv_layout_compute, items[near][owner[own]], runs[near + "_row"][own], runs["rows"][own]
    )
    computed = _in_receive_buffer(program, items, kind, far, owner[~own], runs[~own])
    out = np.empty(len(of_owner[0]) + len(computed[0]), MESSAGE_DOCUMENT)
    run = np.concatenate([np.flatnonzero(own)[of_owner[0]], np.flatnonzero(~own)[computed[0]]])
    out["message"] = numbers[owner[run]]
    out["doc"] = np.concatenate([of_owner[1], computed[1]])
    out["rows"] = np.concatenate([of_owner[2], computed[2]])
    return out


def _at_kv_owner(layout: Layout, rank: np.ndarray, row: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return (number, document, rows) of rows of ranks' own shards."""
    width = int(layout.token_counts.max(initial=0)) + 1
    first = layout.spans["rank"] * width + layout.span_first_rows
    return _documents_of_rows(rank * width + row, rows, first, layout.spans)


def _in_receive_buffer(
    program: Program, items: np.ndarray, kind: int, end: str, owner: np.ndarray, runs: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return (number, document, rows) of runs in a receive buffer.

    The content is what the buffer holds in the next step that computes on it; for gradients, in the last such step.
    """
    slot_rows = SlotRows(program, items[end][owner])
    groups = slot_rows.groups
    buffer, slot = items[end][owner], items[end + "_slot"][owner]
    if kind == KEYS:
        index = np.searchsorted(groups, slot_rows.group(buffer, slot, items["done"][owner] + 1), "left")
    else:
        index = np.searchsorted(groups, slot_rows.group(buffer, slot, items["start"][owner]), "right") - 1
    known_runs = np.flatnonzero((index >= 0) & (index < len(groups)))
    group = groups[index[known_runs]]
    is_of_buffer = group // slot_rows.steps == slot_rows.group(buffer, slot, 0)[known_runs] // slot_rows.steps
    known_runs, group = known_runs[is_of_buffer], group[is_of_buffer]
    number, doc, rows = _documents_of_rows(
        group * slot_rows.width + runs[end + "_row"][known_runs],
        runs["rows"][known_runs],
        slot_rows.first,
        slot_rows.spans,
    )
    return known_runs[number], doc, rows


def _redistributed_documents(
    move: Redistribution | None, sent: np.ndarray, numbers: np.ndarray, before: int
) -> np.ndarray:
    """Return the documents that a redistribution moves in messages; of q, k and v in one message, those of q.

    Messages posted before step `before` (the first of the plan) belong to the redistribution, others to its adjoint.
    """
    if move is None or not len(numbers):
        return np.empty(0, MESSAGE_DOCUMENT)
    parts, layout, ranks = move.rank_pairs, move.source, move.source.ranks
    part = np.repeat(np.arange(len(parts)), parts["count"])
    runs = move.runs[ragged_arange(parts["first"], parts["count"])]
    run, doc, rows = _at_kv_owner(layout, parts["src"][part], runs["src_row"], runs["rows"])
    table = np.empty(len(run), MESSAGE_DOCUMENT)
    table["message"], table["doc"], table["rows"] = part[run], doc, rows
    table = merge_by_document(table)
    bar_offsets = np.searchsorted(table["message"], np.arange(len(parts) + 1))
    number_of = np.full(ranks * ranks, -1)
    number_of[parts["src"] * ranks + parts["dst"]] = np.arange(len(parts))
    src, dst = sent["src"][numbers], sent["dst"][numbers]
    pair = number_of[np.where(sent["start"][numbers] < before, src * ranks + dst, dst * ranks + src)]
    numbers, pair = numbers[pair >= 0], pair[pair >= 0]
    count = bar_offsets[pair + 1] - bar_offsets[pair]
    out = table[ragged_arange(bar_offsets[pair], count)]
    out["message"] = np.repeat(numbers, count)
    return out


def _documents_of_rows(
    begin: np.ndarray, rows: np.ndarray, first: np.ndarray, spans: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return (number, document, rows) where runs of rows meet spans, whose first rows ascend on the same axis."""
    number, span, low, high = intersect_runs(begin, begin + rows, first, first + spans["stop"] - spans["start"])
    return number, spans["doc"][span], high - low
