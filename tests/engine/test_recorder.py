"""The recorder: what the engine did and when, on every rank; nothing where nobody records."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp.algorithms.linear_layout import with_linear_layout
from mindspeed_cp.comm import GroupTransport
from mindspeed_cp.engine import recorder as clock
from mindspeed_cp.engine.agreement import COMPARISON
from mindspeed_cp.engine.hidden_states import hidden_redistribution, redistribute_hidden
from mindspeed_cp.engine.recorder import COMPUTE, POST, UNPACK, WAIT, RankTimings, Recorder, recording, timed_span
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.plan import traffic
from mindspeed_cp.plan.transfers import KINDS
from tests.engine.cases import Case, attend, local, run

CASES = (
    Case((64, 31, 0, 7), 2, 4, 2, algorithm="ring"),
    Case((64, 31, 0, 7), 3, 4, 2, dtype=torch.bfloat16, algorithm="direct", options=(("prefetch", 3),)),
    Case((129, 3, 50), 2, 4, 1, 24, 16, algorithm="ulysses"),  # kv heads are copied, their gradients summed in fp32
    Case(
        (600, 30, 20, 5, 9, 60),
        2,
        4,
        2,
        algorithm="hierarchical",
        options=(("remap", "qkv"), ("simulated_placements", 1)),  # of two parts
    ),
)


def recorded(rank: int, group: Any, case: Case, late: float = 0.0) -> tuple[RankTimings, list[torch.Tensor]]:
    """Forward and backward while somebody records; rank 1 comes so many seconds late."""
    plan, leaves, dout = local(rank, case)
    torch.distributed.barrier(group)
    recorder = Recorder()
    recorder.micro_batch, recorder.layer = 3, 7
    with recording(recorder):
        time.sleep(late if rank == 1 else 0.0)
        out = attend(case, plan, leaves, group)
        recorder.layer = 8  # the backward belongs to the layer of its forward
        gradients = torch.autograd.grad(out, leaves, dout)
    return recorder.read(), [out.detach(), *gradients]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.algorithm)
def test_messages_and_kernels_are_those_of_the_plan(workers, case):
    plan, records = case.plan(), workers.run(case.ranks, recorded, case)
    plain = workers.run(case.ranks, run, case)
    assert len(plan.parts_or_self) == (2 if case.algorithm == "hierarchical" else 1)
    said = traffic(plan, case.dtype.itemsize)
    sent: Counter[tuple[Any, ...]] = Counter()  # by sender, receiver, kind, place and steps
    got: Counter[tuple[Any, ...]] = Counter()
    for rank, (record, results) in enumerate(records):
        assert all(torch.equal(a, b) for a, b in zip(results, plain[rank], strict=True))
        counts: Counter[tuple[str, str]] = Counter()
        for message in record.messages:
            assert message.kind in KINDS and message.peer != rank
            assert 0 <= message.begin <= message.end <= record.seconds
            ends = (rank, message.peer) if message.sends else (message.peer, rank)
            (sent if message.sends else got)[(*ends, *message[:2], *message[4:6])] += message.bytes
            counts[message.kind, message.origin.direction] += message.bytes * message.sends
        assert counts["keys", "forward"] == said["fetch_forward"][rank]
        assert counts["keys", "backward"] == said["fetch_backward"][rank]
        assert counts["gradients", "backward"] == said["reduce"][rank]
        assert counts["redistribution", "forward"] == said["redistribution_forward"][rank]
        assert counts["redistribution", "backward"] == said["redistribution_backward"][rank]
        for number, part_plan in enumerate(plan.parts_or_self):
            for direction in ("forward", "backward"):
                program, place = getattr(part_plan, direction), (3, 7, direction, number)
                computed = [span.step for span in record.spans if span.activity == COMPUTE and span.origin == place]
                assert computed == sorted(set(program.tiles(rank)["step"].tolist()))
                kept = [
                    message
                    for message in record.messages
                    if message.origin == place and message.kind != "redistribution"
                ]
                items = [messages.items for messages in (program.fetch, program.reduce)]
                steps = [(i["start"], i["done"]) for item in items for i in item if rank in (i["src"], i["dst"])]
                assert sorted((message.start_step, message.done_step) for message in kept) == sorted(steps)
    assert sent and sent == got


def test_spans_follow_each_other_and_are_no_more_than_the_whole(workers):
    for case in CASES:
        for record, _ in workers.run(case.ranks, recorded, case):
            spans = sorted(record.spans, key=lambda span: span.begin)
            assert {span.activity for span in spans} <= {COMPUTE, POST, WAIT, UNPACK, COMPARISON} and len(spans) > 4
            for before, after in pairwise(spans):
                assert before.begin <= before.end <= after.begin
            assert 0 < sum(span.end - span.begin for span in spans) <= record.seconds
            assert sum(span.end - span.begin for span in spans if span.activity == COMPUTE) > 0


def test_who_waits_for_a_late_rank_is_seen_to_wait(workers):
    case = Case((200,), 2, algorithm="ring")
    workers.run(2, recorded, case)  # connections are made
    (early, _), (late, _) = workers.run(2, recorded, case, 0.3)
    waits = (COMPARISON, WAIT)
    waited = [sum(span.end - span.begin for span in record.spans if span.activity in waits) for record in (early, late)]
    assert waited[0] > 0.15 and waited[1] < waited[0] - 0.1
    longest = max((span for span in early.spans), key=lambda span: span.end - span.begin)
    assert longest.activity == COMPARISON, "before the first message of the call"


def hidden(rank: int, group: Any, case: Case) -> RankTimings:
    """Hidden states to attention's rows and back, and their gradients."""
    plan = with_linear_layout(case.plan(), "hidden")
    assert plan.linear_layout is not None
    remap = hidden_redistribution(plan, rank, torch.device("cpu"))
    x = torch.randn(int(plan.linear_layout.token_counts[rank]), 3, 5, requires_grad=True)
    with recording(Recorder()) as recorder:
        moved = redistribute_hidden(x, remap, GroupTransport(group, 60.0))
        back = redistribute_hidden(moved, remap.reversed, GroupTransport(group, 60.0))
        torch.autograd.grad(back.sum(), x)
    return recorder.read()


def test_moves_of_hidden_states_are_told_apart(workers):
    case = Case((129, 3, 0, 50, 7, 211), 2, algorithm="direct", options=(("layout", "balanced"),))
    plan = with_linear_layout(case.plan(), "hidden")
    move = Redistribution.between(plan.linear_layout, plan.layout, 1)
    rows = move.send_volume() + move.send_volume(adjoint=True)
    for rank, record in enumerate(workers.run(2, hidden, case)):
        assert {message.kind for message in record.messages} == {"hidden_states"}
        for direction in ("forward", "backward"):
            sent = [
                message.bytes for message in record.messages if message.sends and message.origin.direction == direction
            ]
            assert sum(sent) == rows[rank] * 15 * 4
        assert [span.activity for span in record.spans] == [POST, WAIT] * 4


def unseen(rank: int, group: Any, case: Case) -> list[torch.Tensor]:
    """Forward and backward where reading a clock, or making anything that records, fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nobody records")

    names = ("perf_counter", "Recorder", "RecordedCall", "PartRecorder", "TimeSpan", "MessageTiming")
    before = {name: getattr(clock, name) for name in names}
    try:
        for name in names:
            setattr(clock, name, refuse)
        return run(rank, group, case)
    finally:
        for name, value in before.items():
            setattr(clock, name, value)


def test_nothing_is_recorded_where_nobody_asks(workers):
    assert clock.recorded_call() is None
    assert timed_span("gather") is timed_span("optimizer")  # nothing is made for it either
    for case in CASES:
        assert all(torch.isfinite(x).all() for x in workers.run(case.ranks, unseen, case)[0])


def test_a_recording_ends_with_its_block_and_there_is_one_at_a_time():
    with pytest.raises(ValueError, match="broken"), recording(Recorder()) as recorder:
        assert clock.recorded_call().recorder is recorder
        with timed_span("gather"):
            time.sleep(0.01)
        with pytest.raises(AssertionError, match="another recorder is active"), recording(Recorder()):
            pass
        raise ValueError("broken")
    assert clock.recorded_call() is None
    record = recorder.read()
    assert [(span.activity, span.origin) for span in record.spans] == [("gather", None)]
    assert 0.01 <= record.spans[0].end - record.spans[0].begin <= record.seconds


class FakeEvent:
    """An event of a device on which a stream comes by 2 ms after another."""

    now = 0.0
    waited: list[float] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 2.0
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        self.waited.append(self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.waited, "the stream has not come by"
        return end.at - self.at


def test_on_a_device_marks_are_events_and_only_reading_them_waits(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(Event=FakeEvent))
    monkeypatch.setattr(clock, "perf_counter", lambda: pytest.fail("the host's clock says nothing of a stream"))
    with recording(Recorder("cuda:0")) as recorder:
        for what in ("gather", "optimizer"):
            with timed_span(what):
                pass
        assert not FakeEvent.waited
    record = recorder.read()
    assert len(FakeEvent.waited) == 1
    assert np.allclose([(span.begin, span.end) for span in record.spans], [(0.002, 0.004), (0.006, 0.008)])
    assert record.seconds == pytest.approx(0.010)
