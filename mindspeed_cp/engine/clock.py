"""What a rank does and when, in the engine and around it: kernels, messages, waits. Off unless someone asks::

    with recording(Recorder(device)) as recorder:
        ...                                        # a training step, or a call of attention and its backward
    record = recorder.read()

While nobody records, the engine asks once for each call of attention whether somebody does, and carries a None from
there on. What is being recorded belongs to the process and not to a thread: on devices autograd runs the backward in a
thread of its own.

A mark is a reading of `time.perf_counter` on the CPU. On a device it is an event on the current stream, written when
the stream comes by: between two marks is what the compute stream did and what it waited for, and the host waits for
none of them until the record is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mindspeed_cp.comm import Move
    from mindspeed_cp.engine.agenda import Post

#: What a rank does in a span of the engine: kernels of attention; rows are gathered and messages posted; it waits for
#: messages; rows that have arrived are put in their places, or added.
COMPUTE, POST, WAIT, LAND = "compute", "post", "wait", "land"

#: Gradients that are summed travel in fp32.
GRADIENT_BYTES = 4

Mark = Any  # a float, or an event of the device


class Place(NamedTuple):
    """Where in a training step something happened.

    Attributes:
        micro_batch: from 0; as the recorder was told.
        layer: from 1; 0 where the recorder was told none.
        direction: "forward" or "backward".
        part: of the plan.
    """

    micro_batch: int
    layer: int
    direction: str
    part: int


class Span(NamedTuple):
    """Something that took a rank's time.

    Attributes:
        what: COMPUTE, POST, WAIT or LAND; outside the engine whatever :func:`span` was given.
        place: None outside the engine.
        step: of the plan's program; None for moves between layouts, and outside the engine.
        begin, end: seconds since the recorder was made.
    """

    what: str
    place: Place | None
    step: int | None
    begin: Mark
    end: Mark


class Message(NamedTuple):
    """A message as one of its two ends saw it; keys and values, or their gradients, are one.

    Attributes:
        kind: "keys", "gradients", "move" or "remap", as in :data:`mindspeed_cp.cost.transfers.KINDS`.
        place: where it was posted.
        sends: this rank sent it.
        peer: the other rank, in the group.
        step, due: in which it was posted and waited for; None for moves.
        bytes: of all its tensors.
        begin, end: seconds: when it had been posted, and when this rank had waited for it, so that it had arrived by
            then.
    """

    kind: str
    place: Place
    sends: bool
    peer: int
    step: int | None
    due: int | None
    bytes: int
    begin: Mark
    end: Mark


@dataclass(frozen=True)
class Record:
    """What was recorded.

    Attributes:
        seconds: of all of it.
        spans: in the order in which they ended; none is inside another, but one of :func:`span` may hold others.
        messages: in the order in which they were waited for.
    """

    seconds: float
    spans: list[Span]
    messages: list[Message]


class Recorder:
    """Collects spans and messages of one rank.

    Args:
        device: where the rank computes.

    Attributes:
        micro_batch, layer: what comes next belongs to; whoever records sets them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        kind = torch.device(device).type
        self._event = None if kind == "cpu" else torch.get_device_module(kind).Event
        self._spans: list[Span] = []
        self._messages: list[Message] = []
        self.micro_batch = self.layer = 0
        self._start = self.mark()
        self._end: Mark = None

    def mark(self) -> Mark:
        """Now."""
        if self._event is None:
            return perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def add(self, span: Span) -> None:
        """One more, its times as marks."""
        self._spans.append(span)

    def met(self, message: Message) -> None:
        """One more, its times as marks."""
        self._messages.append(message)

    def stop(self) -> None:
        """The end of what :meth:`read` tells the seconds of."""
        self._end = self.mark()

    def read(self) -> Record:
        """What was recorded until :meth:`stop`, in seconds. On a device this waits until its stream has come so far."""
        assert self._end is not None, "read after the recording has ended"
        if self._event is not None:
            self._end.synchronize()
        spans = [one._replace(begin=self._seconds(one.begin), end=self._seconds(one.end)) for one in self._spans]
        messages = [one._replace(begin=self._seconds(one.begin), end=self._seconds(one.end)) for one in self._messages]
        return Record(self._seconds(self._end), spans, messages)

    def _seconds(self, mark: Mark) -> float:
        if self._event is None:
            return float(mark - self._start)
        return float(self._start.elapsed_time(mark)) / 1e3


@dataclass(frozen=True)
class Call:
    """A call of attention, or of a move of hidden states, that is recorded: what its backward has to know."""

    recorder: Recorder
    micro_batch: int
    layer: int


class Track:
    """What the engine reports to while it runs one part of a plan."""

    def __init__(self, recorder: Recorder, place: Place, moves: str) -> None:
        self._recorder, self._place, self._moves = recorder, place, moves
        self._flying: dict[int, tuple[Post, int, int, Mark]] = {}
        self.mark = recorder.mark

    def lap(self, what: str, since: Mark, step: int | None) -> Mark:
        """A span from a mark to now, which is returned."""
        now = self._recorder.mark()
        self._recorder.add(Span(what, self._place, step, since, now))
        return now

    def posted(self, since: Mark, step: int, posts: Sequence[Post], k: Tensor, v: Tensor) -> Mark:
        """Messages of rows like those of k and v were posted."""
        now = self.lap(POST, since, step)
        row = k.shape[1:].numel() + v.shape[1:].numel()
        for post in posts:
            size = post.count * row * (GRADIENT_BYTES if post.reduces else k.element_size())
            self._flying[post.number] = post, size, step, now
        return now

    def arrived(self, since: Mark, step: int, numbers: Iterable[int]) -> Mark:
        """Messages of these numbers were waited for."""
        now = self.lap(WAIT, since, step)
        for number in numbers:
            post, size, posted, begin = self._flying.pop(number)
            kind = "gradients" if post.reduces else "keys"
            self._recorder.met(Message(kind, self._place, post.sends, post.peer, posted, step, size, begin, now))
        return now

    def moved(self, posted: Mark, since: Mark, work: Sequence[tuple[Tensor, Move]]) -> None:
        """Moves that had been posted at a mark were waited for, and their rows put in place."""
        now = self.lap(WAIT, since, None)
        for x, move in work:
            row = x.shape[2:].numel() * x.element_size()
            for sends, parts in ((True, move.give), (False, move.get)):
                for part in parts:
                    size = part.count * (part.heads.stop - part.heads.start) * row
                    self._recorder.met(
                        Message(self._moves, self._place, sends, part.peer, None, None, size, posted, now)
                    )


_recorder: Recorder | None = None
_NOTHING = nullcontext()


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record what this process does in the block; one recorder at a time."""
    global _recorder
    assert _recorder is None, "somebody records already"
    _recorder = recorder
    try:
        yield recorder
    finally:
        _recorder = None
        recorder.stop()


def new_call() -> Call | None:
    """What a call of the engine carries to its parts and its backward; None while nobody records."""
    recorder = _recorder
    return None if recorder is None else Call(recorder, recorder.micro_batch, recorder.layer)


def track_of(call: Call | None, direction: str, part: int = 0, moves: str = "move") -> Track | None:
    """For one part of a plan in one direction; `moves`: kind of the messages of its moves between layouts."""
    if call is None:
        return None
    return Track(call.recorder, Place(call.micro_batch, call.layer, direction, part), moves)


def span(what: str) -> AbstractContextManager[None]:
    """A span around a block outside the engine; nothing while nobody records."""
    recorder = _recorder
    return _NOTHING if recorder is None else _spanned(recorder, what)


@contextmanager
def _spanned(recorder: Recorder, what: str) -> Iterator[None]:
    begin = recorder.mark()
    yield
    recorder.add(Span(what, None, None, begin, recorder.mark()))
