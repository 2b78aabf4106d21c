"""Records what a rank does and when: kernels, messages and waits, in the engine and around it. Off by default::

    with recording(Recorder(device)) as recorder:
        ...                                        # a training step, or a call of attention and its backward
    timings = recorder.read()

Without a recorder, the engine makes one check per call of attention and passes None on. The recorder belongs to the
process, not to a thread: on devices, autograd runs the backward in a thread of its own.

A mark is a value of `time.perf_counter` on the CPU. On a device it is an event on the current stream: the time between
two marks is what the compute stream executed and waited for, and the host waits for no event until the timings are
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_cp.comm import RankRedistribution
from mindspeed_cp.engine.rank_schedule import P2POp
from mindspeed_cp.layout.redistribution import is_one_message

#: Activities of the engine: attention kernels; gathering rows and posting messages; waiting for messages; copying or
#: adding received rows to their destination.
COMPUTE, POST, WAIT, UNPACK = "compute", "post", "wait", "unpack"

Mark = Any  # a float, or an event of the device


class Origin(NamedTuple):
    """The part of a training step that a span or a message belongs to.

    Attributes:
        micro_batch: from 0, as set on the recorder.
        layer: from 1, as set on the recorder; 0 if not set.
        direction: "forward" or "backward".
        part: index of the part of the plan.
    """

    micro_batch: int
    layer: int
    direction: str
    part: int


class TimeSpan(NamedTuple):
    """An activity of a rank.

    Attributes:
        activity: COMPUTE, POST, WAIT or UNPACK; outside the engine, the name given to :func:`timed_span`.
        origin: None outside the engine.
        step: step of the program; None for redistributions and outside the engine.
        begin, end: seconds since the recorder was created.
    """

    activity: str
    origin: Origin | None
    step: int | None
    begin: Mark
    end: Mark


class MessageTiming(NamedTuple):
    """A message as one of its two ends saw it. Keys and values, or their gradients, count as one message, as does all
    that travels with them.

    Attributes:
        kind: "keys", "gradients", "redistribution" or "hidden_states", as in :data:`mindspeed_cp.plan.transfers.KINDS`.
        origin: where it was posted.
        sends: True if this rank is the sender.
        peer: rank at the other end, in the group.
        start_step, done_step: steps in which it was posted and waited for; None for redistributions.
        bytes: size of all its tensors.
        begin, end: seconds: when it had been posted, and when this rank had finished waiting for it. The message had
            arrived by then.
    """

    kind: str
    origin: Origin
    sends: bool
    peer: int
    start_step: int | None
    done_step: int | None
    bytes: int
    begin: Mark
    end: Mark


@dataclass(frozen=True)
class RankTimings:
    """The timings of one rank.

    Attributes:
        seconds: length of the recording.
        spans: in the order in which they ended. Spans of the engine do not overlap; spans of :func:`timed_span` may
            contain others.
        messages: in the order in which they were waited for.
    """

    seconds: float
    spans: list[TimeSpan]
    messages: list[MessageTiming]


class Recorder:
    """Collects spans and messages of one rank.

    Args:
        device: device on which the rank computes.

    Attributes:
        micro_batch, layer: origin of the calls that follow; set by the user of the recorder.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        kind = torch.device(device).type
        self._event_type = None if kind == "cpu" else torch.get_device_module(kind).Event
        self._spans: list[TimeSpan] = []
        self._messages: list[MessageTiming] = []
        self.micro_batch = self.layer = 0
        self._start = self.mark()
        self._end: Mark = None

    def mark(self) -> Mark:
        """Return a mark of the current time."""
        if self._event_type is None:
            return perf_counter()
        event = self._event_type(enable_timing=True)
        event.record()
        return event

    def add_span(self, span: TimeSpan) -> None:
        """Add a span whose times are marks."""
        self._spans.append(span)

    def add_message(self, message: MessageTiming) -> None:
        """Add a message whose times are marks."""
        self._messages.append(message)

    def stop(self) -> None:
        """End the recording."""
        self._end = self.mark()

    def read(self) -> RankTimings:
        """Return what was recorded until :meth:`stop`, in seconds. On a device, this waits for its stream."""
        assert self._end is not None, "read after the recording has ended"
        if self._event_type is not None:
            self._end.synchronize()
        spans = [span._replace(begin=self._seconds(span.begin), end=self._seconds(span.end)) for span in self._spans]
        messages = [
            message._replace(begin=self._seconds(message.begin), end=self._seconds(message.end))
            for message in self._messages
        ]
        return RankTimings(self._seconds(self._end), spans, messages)

    def _seconds(self, mark: Mark) -> float:
        if self._event_type is None:
            return float(mark - self._start)
        return float(self._start.elapsed_time(mark)) / 1e3


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call of attention or of a redistribution of hidden states: what its backward needs to know."""

    recorder: Recorder
    micro_batch: int
    layer: int

    def part_recorder(self, direction: str, part: int = 0, redistribution_kind: str = "redistribution") -> PartRecorder:
        """Return the recorder of one part in one direction."""
        return PartRecorder(self.recorder, Origin(self.micro_batch, self.layer, direction, part), redistribution_kind)


class PartRecorder:
    """Records one part of a plan in one direction."""

    def __init__(self, recorder: Recorder, origin: Origin, redistribution_kind: str) -> None:
        self._recorder, self._origin, self._redistribution_kind = recorder, origin, redistribution_kind
        self._in_flight: dict[int, tuple[P2POp, int, int, Mark]] = {}
        self.mark = recorder.mark

    def record_span(self, activity: str, since: Mark, step: int | None) -> Mark:
        """Record a span from a mark to now, and return the mark of now."""
        now = self._recorder.mark()
        self._recorder.add_span(TimeSpan(activity, self._origin, step, since, now))
        return now

    def record_posted(
        self, since: Mark, step: int, p2p_ops: Sequence[P2POp], k: Tensor, v: Tensor, gradient_bytes: int
    ) -> Mark:
        """Record that messages were posted, with rows shaped like those of k and v, and gradients in so many bytes."""
        now = self.record_span(POST, since, step)
        row = k.shape[1:].numel() + v.shape[1:].numel()
        for op in p2p_ops:
            size = op.count * row * (gradient_bytes if op.reduces else k.element_size())
            self._in_flight[op.number] = op, size, step, now
        return now

    def record_arrived(self, since: Mark, step: int, numbers: Iterable[int]) -> Mark:
        """Record that messages were waited for."""
        now = self.record_span(WAIT, since, step)
        for number in numbers:
            op, size, start_step, begin = self._in_flight.pop(number)
            kind = "gradients" if op.reduces else "keys"
            self._recorder.add_message(
                MessageTiming(kind, self._origin, op.sends, op.peer, start_step, step, size, begin, now)
            )
        return now

    def record_redistributed(
        self, posted: Mark, since: Mark, work: Sequence[tuple[Tensor, RankRedistribution]]
    ) -> None:
        """Record that redistributions posted at a mark were waited for and unpacked."""
        now = self.record_span(WAIT, since, None)
        sizes: dict[tuple[bool, int], list[tuple[RankRedistribution, int]]] = {}  # of tensors, by direction and peer
        for x, redistribution in work:
            row = x.shape[2:].numel() * x.element_size()
            for sends, parts in ((True, redistribution.to_send), (False, redistribution.to_receive)):
                for part in parts:
                    size = part.count * (part.heads.stop - part.heads.start) * row
                    sizes.setdefault((sends, part.peer), []).append((redistribution, size))
        kind, place = self._redistribution_kind, self._origin
        for (sends, peer), tensors in sizes.items():
            all_sizes = [size for _, size in tensors]
            apart: dict[int, int] = {}  # k and v have one redistribution
            for redistribution, size in tensors:
                apart[id(redistribution)] = apart.get(id(redistribution), 0) + size
            for size in [sum(all_sizes)] if is_one_message(all_sizes) else apart.values():
                self._recorder.add_message(MessageTiming(kind, place, sends, peer, None, None, size, posted, now))


_recorder: Recorder | None = None
_NO_SPAN = nullcontext()


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record what this process does in the block; one recorder at a time."""
    global _recorder
    assert _recorder is None, "another recorder is active"
    _recorder = recorder
    try:
        yield recorder
    finally:
        _recorder = None
        recorder.stop()


def recorded_call() -> RecordedCall | None:
    """Return what a call of the engine passes to its parts and its backward; None without a recorder."""
    recorder = _recorder
    return None if recorder is None else RecordedCall(recorder, recorder.micro_batch, recorder.layer)


def timed_span(activity: str) -> AbstractContextManager[None]:
    """Record a block outside the engine as a span; does nothing without a recorder."""
    recorder = _recorder
    return _NO_SPAN if recorder is None else _recorded_span(recorder, activity)


@contextmanager
def _recorded_span(recorder: Recorder, activity: str) -> Iterator[None]:
    begin = recorder.mark()
    yield
    recorder.add_span(TimeSpan(activity, None, None, begin, recorder.mark()))
