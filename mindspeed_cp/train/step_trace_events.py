"""Events of a traced step, made of what the recorder has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_cp.engine.call_agreement import COMPARISON
from mindspeed_cp.engine.recorder import COMPUTE, POST, UNPACK, WAIT, MessageTiming, RankTimings, TimeSpan
from mindspeed_cp.report.run.step_traces import (
    CATEGORY_ATTENTION,
    CATEGORY_BATCH,
    CATEGORY_COMMUNICATION,
    CATEGORY_OPTIMIZER,
    CATEGORY_RANK_SYNC,
    CATEGORY_STEP,
    CATEGORY_WAIT,
)
from mindspeed_cp.report.trace_events import TraceEvent

#: Activities of spans outside the engine.
GATHER, REDUCTION, NEXT_BATCH, UPDATE = "gather", "reduction", "batch", "optimizer"

#: Name and category of the event of a span.
_SPANS = {
    COMPUTE: ("attention", CATEGORY_ATTENTION),
    POST: ("posts messages", CATEGORY_COMMUNICATION),
    WAIT: ("waits for messages", CATEGORY_WAIT),
    UNPACK: ("puts rows in place", CATEGORY_COMMUNICATION),
    COMPARISON: ("waits for ranks to compare plans", CATEGORY_RANK_SYNC),
    GATHER: ("waits for all ranks", CATEGORY_RANK_SYNC),
    REDUCTION: ("reduces gradients", CATEGORY_RANK_SYNC),
    NEXT_BATCH: ("waits for a batch", CATEGORY_BATCH),
    UPDATE: ("optimizer", CATEGORY_OPTIMIZER),
}


def step_trace_events(record: RankTimings, step: int, rank: int, peers: dict[str, list[int]]) -> Iterator[TraceEvent]:
    """Yield the events of a rank's step.

    Args:
        record: recorded time spans and messages.
        step: number of the step.
        rank: this rank among all.
        peers: by kind of message, the ranks of the group in which it is sent.
    """
    yield TraceEvent(rank, CATEGORY_STEP, f"step {step}", 0.0, record.seconds, CATEGORY_STEP)
    for span in record.spans:
        name, category = _SPANS[span.activity]
        if span.origin is not None:
            name = f"{name} {span.origin.direction}"
        yield TraceEvent(rank, "compute", name, span.begin, span.end - span.begin, category, _origin(span))
    groups: dict[MessageTiming, list[MessageTiming]] = {}  # posted together and waited for together
    for message in record.messages:
        groups.setdefault(message._replace(peer=0, bytes=0), []).append(message)
    for messages in groups.values():
        yield _message_event(messages, rank, peers)


def _message_event(messages: Sequence[MessageTiming], rank: int, peers: dict[str, list[int]]) -> TraceEvent:
    first = messages[0]
    others = sorted({peers[first.kind][message.peer] for message in messages})
    details = {
        "kind": first.kind,
        "sends": first.sends,
        "bytes": sum(message.bytes for message in messages),
        "messages": len(messages),
        "src": rank if first.sends else others,
        "dst": others if first.sends else rank,
        **_origin(first),
        **({} if first.done_step is None else {"due_in_step": first.done_step}),
    }
    thread = "send" if first.sends else "receive"
    name = f"{first.kind} {first.origin.direction}"
    return TraceEvent(rank, thread, name, first.begin, first.end - first.begin, first.kind, details)


def _origin(record: TimeSpan | MessageTiming) -> dict[str, Any]:
    """Return where in the step a span or message belongs; `step` is that of the plan."""
    if record.origin is None:
        return {}
    step = record.step if isinstance(record, TimeSpan) else record.start_step
    origin = {"micro_batch": record.origin.micro_batch, "layer": record.origin.layer, "part": record.origin.part}
    return origin if step is None else {**origin, "step": step}
