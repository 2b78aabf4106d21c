"""Traces for ui.perfetto.dev and chrome://tracing: what every rank computes, sends and receives, and when.

A trace is a list of events of a simulated layer (:func:`timeline_recording`). In the file a rank is a process, and
"compute", "send" and "receive" are threads of it. Viewers draw overlapping events of one thread wrongly, so they get
threads of their own: "receive", "receive 2".

The format is the JSON object format of Chrome's trace events: complete events ("ph": "X") with times in microseconds,
and metadata ("ph": "M") that names processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.plan.transfers import KINDS, edge_steps
from mindspeed_cp.report.files import check_output_path, write_atomically
from mindspeed_cp.simulate.timeline import MESSAGE_KIND_NAMES, Timeline, is_internode, wait_records

#: Threads of a rank from top to bottom; other threads come below.
THREAD_ORDER = ("compute", "send", "receive")

#: Processes of one recording are numbered from a multiple of this on: rank r of recording i is process i *
#: PROCESS_STRIDE + r.
PROCESS_STRIDE = 100_000

NANOSECONDS = 1e9
_BETWEEN = ("ranks of a node", "nodes")

#: Largest number of ranks, and of steps of all ranks in both directions, that are recorded; some ranks stand for the
#: others.
RECORDED_RANK_LIMIT, RECORDED_STEP_LIMIT = 64, 12_000


class TraceEvent(NamedTuple):
    """A time span of a rank.

    Attributes:
        rank: the rank.
        thread: one of THREAD_ORDER, or another name.
        name: name of the bar.
        start: seconds since the recording began.
        seconds: duration; 0 or more.
        category: kind of the event, such as "attention", "linear", "wait", "keys"; viewers filter by it.
        details: JSON values by name, which a viewer shows for a selected bar.
    """

    rank: int
    thread: str
    name: str
    start: float
    seconds: float
    category: str
    details: Mapping[str, Any] = {}


@dataclass(frozen=True, eq=False)
class Recording:
    """Events of some ranks, on one clock.

    Attributes:
        name: shown before the number of each rank, such as "ring, modelled".
        events: in any order.
        metadata: JSON values by name, kept in the file under "otherData".
    """

    name: str
    events: Sequence[TraceEvent]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def write_trace(path: str | Path, recordings: Sequence[Recording]) -> Path:
    """Write recordings to one file, the ranks of each below those of the one before; all begin at time 0.

    Args:
        path: JSON file to write.
        recordings: at least one.

    Raises:
        ConfigError: the path has another suffix, or the file cannot be written.
    """
    target = check_output_path("--trace", path, (".json",))
    content = {
        "displayTimeUnit": "ms",
        "otherData": {recording.name: dict(recording.metadata) for recording in recordings},
        "traceEvents": list(trace_events(recordings)),
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return write_atomically("--trace", target, lambda new: new.write_text(text, "utf-8"))


def trace_events(recordings: Iterable[Recording]) -> Iterator[dict[str, Any]]:
    """Yield the entries of "traceEvents"."""
    for number, recording in enumerate(recordings):
        of_rank: dict[int, dict[str, list[TraceEvent]]] = {}
        for event in recording.events:
            of_rank.setdefault(event.rank, {}).setdefault(event.thread, []).append(event)
        for rank in sorted(of_rank):
            process = number * PROCESS_STRIDE + rank
            yield _named("process_name", process, 0, name=f"{recording.name}: rank {rank}")
            yield _named("process_sort_index", process, 0, sort_index=process)
            thread = 0
            for name in sorted(of_rank[rank], key=_place):
                for row, events in enumerate(_rows_without_overlap(of_rank[rank][name])):
                    thread += 1
                    yield _named("thread_name", process, thread, name=name if row == 0 else f"{name} {row + 1}")
                    yield _named("thread_sort_index", process, thread, sort_index=thread)
                    for begin, end, event in events:
                        yield _complete(process, thread, begin, end, event)


def _place(thread: str) -> tuple[int, str]:
    return (THREAD_ORDER.index(thread) if thread in THREAD_ORDER else len(THREAD_ORDER), thread)


def _rows_without_overlap(events: Sequence[TraceEvent]) -> list[list[tuple[int, int, TraceEvent]]]:
    """Return the events as (begin, end, event) in nanoseconds, in the fewest rows without overlap.

    Each event goes to the first free row.
    """
    rows: list[list[tuple[int, int, TraceEvent]]] = []
    for event in sorted(events, key=lambda event: (event.start, event.seconds)):
        begin = round(event.start * NANOSECONDS)
        end = max(begin, round((event.start + event.seconds) * NANOSECONDS))
        free = next((row for row in rows if row[-1][1] <= begin), None)
        if free is None:
            free = []
            rows.append(free)
        free.append((begin, end, event))
    return rows


def _complete(process: int, thread: int, begin: int, end: int, event: TraceEvent) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "name": event.name,
        "cat": event.category,
        "args": dict(event.details),
    }


def _named(what: str, process: int, thread: int, **details: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": details}


def timeline_recording(timeline: Timeline, name: str) -> Recording:
    """Return the recording of a simulated layer.

    Args:
        timeline: result of :func:`mindspeed_cp.simulate_plan`.
        name: name of the recording.
    """
    steps = timeline.steps_forward.shape[1] + timeline.steps_backward.shape[1]
    shown = ranks_to_draw(timeline, min(RECORDED_RANK_LIMIT, max(4, RECORDED_STEP_LIMIT // steps)))
    metadata = {
        "modelled": True,
        "layer_seconds": timeline.total,
        "ranks": timeline.ranks,
        "ranks_shown": len(shown),
        "cluster": timeline.cluster.name,
    }
    return Recording(name, list(timeline_events(timeline, shown)), metadata)


def ranks_to_draw(timeline: Timeline, limit: int) -> list[int]:
    """Return the ranks to draw: all; of too many the busiest, the one that waits longest, and others evenly spaced."""
    if timeline.ranks <= limit:
        return list(range(timeline.ranks))
    chosen = {int(timeline.waiting.argmax()), int((timeline.compute + timeline.linear).argmax())}
    chosen.update(np.linspace(0, timeline.ranks - 1, limit - len(chosen)).round().astype(int).tolist())
    return sorted(chosen)


def timeline_events(timeline: Timeline, ranks: Sequence[int]) -> Iterator[TraceEvent]:
    """Yield what some ranks of a simulated layer compute, send and receive, and what they wait for."""
    for direction in DIRECTIONS:
        yield from _kernels(timeline, direction, ranks)
        yield from _waits(timeline, direction, ranks)
        for thread, end in (("send", "src"), ("receive", "dst")):
            yield from _messages(timeline, direction, ranks, thread, end)
    yield from _rest(timeline, ranks)


def _kernels(timeline: Timeline, direction: str, ranks: Sequence[int]) -> Iterator[TraceEvent]:
    """Yield the kernels of each step, with the posting of messages before them."""
    plan, edge = timeline.plan, edge_steps(timeline.plan)
    names = [f"{part}.{step}" if plan.parts else str(step) for part, step in plan.step_order(direction)]
    is_attention = timeline.is_attention(direction)
    for rank in ranks:
        for step, (start, computed, _) in enumerate(timeline.steps(direction)[rank].tolist()):
            if computed <= start:
                continue
            what, category, details = "posts messages", "attention", {"step": str(step)}
            if not is_attention[step]:
                what, category = "projections", "linear"
            elif 0 <= step - edge < len(names):
                what, details["plan_step"] = "attention", names[step - edge]
            yield TraceEvent(rank, "compute", f"{what} {direction}", start, computed - start, category, details)


def _waits(timeline: Timeline, direction: str, ranks: Sequence[int]) -> Iterator[TraceEvent]:
    """Yield the waits for messages that are due, each with the message that arrives last."""
    sent, waits = timeline.transfers(direction), wait_records(timeline, direction)
    far = is_internode(sent, timeline.cluster)
    for wait in waits[np.isin(waits["rank"], ranks)]:
        message, kind = sent[wait["message"]], MESSAGE_KIND_NAMES[int(sent["kind"][wait["message"]])]
        details: dict[str, Any] = {name: int(message[name]) for name in ("src", "dst", "bytes")}
        details |= {"step": int(wait["step"]), "for": kind, "between": _BETWEEN[far[wait["message"]]]}
        begin, end = float(wait["begin"]), float(wait["end"])
        yield TraceEvent(int(wait["rank"]), "compute", f"waits for {kind}", begin, end - begin, "wait", details)


def _messages(timeline: Timeline, direction: str, ranks: Sequence[int], thread: str, end: str) -> Iterator[TraceEvent]:
    """Yield what ranks send, or receive; messages of one kind and part that are posted together are one event.

    Args:
        timeline: a simulated layer.
        direction: "forward" or "backward".
        ranks: ranks whose messages are events.
        thread: "send" or "receive".
        end: end of a message at which its event stands, "src" or "dst".
    """
    sent, peer = timeline.transfers(direction), "dst" if end == "src" else "src"
    sent = sent[np.isin(sent[end], ranks)]
    far = is_internode(sent, timeline.cluster)
    groups: dict[tuple[int, ...], list[int]] = {}
    keys = np.stack([sent[end], sent["start"], sent["kind"], sent["part"], far], 1).astype(np.int64)
    for number, key in enumerate(keys.tolist()):
        groups.setdefault(tuple(key), []).append(number)
    for (rank, step, kind_number, _, is_far), numbers in groups.items():
        messages = sent[numbers]
        messages = messages[np.argsort(-messages["bytes"], kind="stable")]
        kind, begin, until = KINDS[kind_number], float(messages["begin"].min()), float(messages["end"].max())
        details: dict[str, Any] = {"kind": kind, "bytes": int(messages["bytes"].sum())}
        details |= {end: rank, peer: messages[peer].tolist()}
        details |= {"between": _BETWEEN[is_far], "posted_in_step": step, "due_in_step": int(messages["done"].min())}
        yield TraceEvent(rank, thread, f"{kind} {direction}", begin, until - begin, kind, details)


def _rest(timeline: Timeline, ranks: Sequence[int]) -> Iterator[TraceEvent]:
    """Yield the linear layers between the two directions, and the wait for the slowest rank at the end."""
    tokens, ends = timeline.plan.batch_layout.token_counts, timeline.steps_backward[:, -1, 2]
    for rank in ranks:
        begin, end = float(timeline.steps_forward[rank, -1, 2]), float(timeline.steps_backward[rank, 0, 0])
        details: dict[str, Any] = {"tokens": int(tokens[rank])}
        yield TraceEvent(rank, "compute", "linear layers, forward and backward", begin, end - begin, "linear", details)
        late = timeline.total - float(ends[rank])
        if late > 0:
            details = {"for": f"rank {int(ends.argmax())}, the last one"}
            yield TraceEvent(rank, "compute", "waits for the slowest rank", float(ends[rank]), late, "late", details)
