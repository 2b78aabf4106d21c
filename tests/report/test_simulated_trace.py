"""Traces of simulated layers: well-formed for viewers, and nothing of the timeline lost."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.report import trace_events as recorded
from mindspeed_cp.report.trace_events import (
    PROCESS_STRIDE,
    Recording,
    TraceEvent,
    ranks_to_draw,
    timeline_recording,
    trace_events,
    write_trace,
)
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.timeline import Timeline


def timeline_of(algorithm: str, nodes: int = 2, per: int = 3) -> Timeline:
    documents = Documents([3000, 40, 900, 5200, 0, 260])
    plan = build_plan(documents, Topology(nodes, per, "a2"), AttentionConfig(6, 2, 64), algorithm)
    return simulate_plan(plan, load_cluster("a2").with_ranks(per))


def written(tmp_path: Path, recordings: Sequence[Recording]) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(write_trace(tmp_path / "trace.json", recordings).read_text())
    return trace


def check_form(events: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Events by process and name of their thread, after what viewers ask for: names for all, no overlaps."""
    names, tracks = {}, defaultdict(list)
    for event in events:
        assert event["ph"] in "MX" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in names
                names[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
        assert isinstance(event["args"], dict)
        tracks[event["pid"], event["tid"]].append(event)
    assert set(tracks) == set(names) and len(set(names.items())) == len(names)
    for track in tracks.values():
        track.sort(key=lambda event: event["ts"])
        for before, after in pairwise(track):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6
    out = defaultdict(list)
    for (process, thread), track in tracks.items():
        out[process, names[process, thread].split()[0]] += track
    return out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_durations_are_those_of_the_timeline(algorithm: str, tmp_path: Path) -> None:
    timeline = timeline_of(algorithm)
    threads = check_form(written(tmp_path, [timeline_recording(timeline, algorithm)])["traceEvents"])
    assert {process for process, _ in threads} == set(range(6))
    both = np.concatenate([timeline.transfers_forward, timeline.transfers_backward])
    for rank in range(6):
        sums: dict[str, float] = defaultdict(float)
        for event in threads[rank, "compute"]:
            sums[event["cat"]] += event["dur"] / 1e6
        nanoseconds = 1e-9 * len(threads[rank, "compute"])
        expected = {
            "attention": timeline.compute[rank],
            "linear": timeline.linear[rank],
            "wait": timeline.exposed[rank],
            "late": timeline.waiting[rank] - timeline.exposed[rank],
        }
        for category, seconds in expected.items():
            assert sums.pop(category, 0.0) == pytest.approx(seconds, abs=nanoseconds)
        assert not sums
        sent = [event["args"]["bytes"] for event in threads[rank, "send"]]
        peers = [peer for event in threads[rank, "send"] for peer in event["args"]["dst"]]
        assert sorted(peers) == sorted(both["dst"][both["src"] == rank].tolist())
        assert sum(sent) == timeline.bytes_sent[rank]
        assert all(event["args"]["src"] == rank for event in threads[rank, "send"])
        assert all(event["args"]["dst"] == rank for event in threads[rank, "receive"])
    got = sum(
        event["args"]["bytes"] for (_, thread), slices in threads.items() if thread == "receive" for event in slices
    )
    assert got == both["bytes"].sum()


def test_messages_and_waits_name_their_ends() -> None:
    events = timeline_recording(timeline_of("ring"), "ring").events
    message = next(event for event in events if event.thread == "receive" and event.rank == 3)
    assert message.details["src"] == [2] and message.details["between"] == "nodes" and message.details["kind"] == "keys"
    wait = next(event for event in events if event.category == "wait")
    assert {"for", "src", "dst", "bytes", "between"} <= set(wait.details)


def test_recordings_stand_below_each_other(tmp_path: Path) -> None:
    first, second = (timeline_recording(timeline_of(name), name) for name in ("ring", "ulysses"))
    trace = written(tmp_path, [first, second])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names[2] == "ring: rank 2" and names[PROCESS_STRIDE + 2] == "ulysses: rank 2" and len(names) == 12
    assert trace["otherData"]["ring"]["modelled"] is True
    assert trace["otherData"]["ring"]["layer_seconds"] == timeline_of("ring").total


def test_events_of_any_origin_are_written_and_overlaps_get_tracks() -> None:
    """As clocks of a real run give them: other threads, overlapping, in no order."""
    events = [
        TraceEvent(4, "optimizer", "step", 5.0, 0.5, "optimizer"),
        TraceEvent(4, "receive", "b", 0.5, 1.0, "keys", {"bytes": 7}),
        TraceEvent(4, "receive", "a", 0.0, 1.0, "keys"),
        TraceEvent(4, "receive", "c", 1.0, 1.0, "keys"),
        TraceEvent(4, "compute", "kernel", 0.0, 0.0, "attention"),
    ]
    converted = list(trace_events([Recording("measured", events)]))
    check_form(converted)
    named = [e["args"]["name"] for e in converted if e["name"] == "thread_name"]
    assert named == ["compute", "receive", "receive 2", "optimizer"]
    lane = {e["name"]: e["tid"] for e in converted if e["ph"] == "X"}
    assert lane["a"] == lane["c"] != lane["b"]
    (b,) = (e for e in converted if e["name"] == "b")
    assert (b["ts"], b["dur"], b["args"], b["cat"]) == (500_000, 1_000_000, {"bytes": 7}, "keys")


def test_of_very_many_ranks_some_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = timeline_of("ring")
    monkeypatch.setattr(recorded, "RECORDED_RANK_LIMIT", 4)
    shown = ranks_to_draw(timeline, 4)
    assert len(shown) <= 4 and int(timeline.waiting.argmax()) in shown
    assert int((timeline.compute + timeline.linear).argmax()) in shown
    assert {event.rank for event in timeline_recording(timeline, "ring").events} == set(shown)
