"""Traces for ui.perfetto.dev and chrome://tracing: what every rank computes, sends and receives, and when.

A trace is a list of events, of a simulated layer (:mod:`mindspeed_cp.report.simulation.trace`) or of a real step. In
the file a rank is a process, and "compute", "send" and "receive" are threads of it. Viewers draw overlapping events of
one thread wrongly, so they get threads of their own: "receive", "receive 2".

The format is the JSON object format of Chrome's trace events: complete events ("ph": "X") with times in microseconds,
and metadata ("ph": "M") that names processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_cp.report.files import write_atomically

#: Threads of a rank from top to bottom; other threads come below.
THREAD_ORDER = ("compute", "send", "receive")

#: Processes of one recording are numbered from a multiple of this on: rank r of recording i is process i *
#: PROCESS_STRIDE + r.
PROCESS_STRIDE = 100_000

NANOSECONDS = 1e9


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
        ConfigError: the file cannot be written.
    """
    content = {
        "displayTimeUnit": "ms",
        "otherData": {recording.name: dict(recording.metadata) for recording in recordings},
        "traceEvents": list(trace_events(recordings)),
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return write_atomically("--trace", path, lambda new: new.write_text(text, encoding="utf-8"))


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
