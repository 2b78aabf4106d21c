"""Traces that ui.perfetto.dev and chrome://tracing open: what every rank computed, sent and received, and when.

A trace is made of plain events, whoever has them: a simulated layer (:mod:`.recorded`) or clocks of a real step. In the
file a rank is a process, and "compute", "send" and "receive" are threads of it. Events of one thread that overlap
without lying inside each other, which viewers would draw wrongly, get lanes of their own: "receive", "receive 2".

The format is the JSON object format of Chrome's trace events: complete events ("ph": "X") with times in microseconds,
and metadata ("ph": "M") that names processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_cp.report.files import write_file

#: Threads of a rank from top to bottom; others come below them.
THREADS = ("compute", "send", "receive")

#: Processes of one recording are numbered from a multiple of this on: rank r of recording i is process i * STRIDE + r.
STRIDE = 100_000

NANOSECONDS = 1e9


class Event(NamedTuple):
    """Something that a rank did.

    Attributes:
        rank: whose.
        thread: one of THREADS, or another name.
        name: of the bar.
        start: seconds since the recording began.
        seconds: how long it took; 0 or more.
        category: what it counts as, such as "attention", "linear", "wait", "keys"; viewers filter by it.
        details: what a click on the bar shows: JSON values by name.
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
        name: shown before every rank's number, such as "ring, modelled".
        events: in any order.
        about: JSON values by name, kept in the file under "otherData".
    """

    name: str
    events: Sequence[Event]
    about: Mapping[str, Any] = field(default_factory=dict)


def write_trace(path: str | Path, recordings: Sequence[Recording], switch: str = "--trace") -> Path:
    """Write recordings to one file, the ranks of each below those of the one before; all begin at time 0.

    Args:
        path: JSON file to write.
        recordings: at least one.
        switch: what asked for it, for the error.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = {
        "displayTimeUnit": "ms",
        "otherData": {recording.name: dict(recording.about) for recording in recordings},
        "traceEvents": list(trace_events(recordings)),
    }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return write_file(switch, path, lambda aside: aside.write_text(text, encoding="utf-8"))


def trace_events(recordings: Iterable[Recording]) -> Iterator[dict[str, Any]]:
    """The entries of "traceEvents"."""
    for number, recording in enumerate(recordings):
        of_rank: dict[int, dict[str, list[Event]]] = {}
        for event in recording.events:
            of_rank.setdefault(event.rank, {}).setdefault(event.thread, []).append(event)
        for rank in sorted(of_rank):
            process = number * STRIDE + rank
            yield _named("process_name", process, 0, name=f"{recording.name}: rank {rank}")
            yield _named("process_sort_index", process, 0, sort_index=process)
            thread = 0
            for name in sorted(of_rank[rank], key=_place):
                for lane, events in enumerate(_lanes(of_rank[rank][name])):
                    thread += 1
                    yield _named("thread_name", process, thread, name=name if lane == 0 else f"{name} {lane + 1}")
                    yield _named("thread_sort_index", process, thread, sort_index=thread)
                    for begin, end, event in events:
                        yield _complete(process, thread, begin, end, event)


def _place(thread: str) -> tuple[int, str]:
    return (THREADS.index(thread) if thread in THREADS else len(THREADS), thread)


def _lanes(events: Sequence[Event]) -> list[list[tuple[int, int, Event]]]:
    """Events as (begin, end, event) in nanoseconds, in as few lanes as they need so that none overlaps another in a
    lane; each goes to the first lane that is free."""
    lanes: list[list[tuple[int, int, Event]]] = []
    for event in sorted(events, key=lambda event: (event.start, event.seconds)):
        begin = round(event.start * NANOSECONDS)
        end = max(begin, round((event.start + event.seconds) * NANOSECONDS))
        free = next((lane for lane in lanes if lane[-1][1] <= begin), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append((begin, end, event))
    return lanes


def _complete(process: int, thread: int, begin: int, end: int, event: Event) -> dict[str, Any]:
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
