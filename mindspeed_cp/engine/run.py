"""Runs one program on one rank: slots of keys and values, their gradients, and the messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.comm import Pending, Transfer, Transport, staging
from mindspeed_cp.engine.agenda import Agenda, Post
from mindspeed_cp.engine.clock import COMPUTE, LAND, Track

Compute = Callable[[int, Any], None]

#: By number of the message: its transfers, and what to do when they have arrived.
Flying = dict[int, tuple[list[Pending], Callable[[], None] | None]]


class Run:
    """Buffers of one program while it runs.

    Args:
        agenda: what the rank does.
        k, v: the rank's own shard.
        transport: to the other ranks; None for one rank.
        tag: the first of the messages' tags.
        track: what is told of kernels, messages and waits; None: nobody records.

    Attributes:
        k, v: rows of each slot; slot 0 is the rank's own shard.
        dk, dv: fp32 gradients of each slot; None until `gradient` is asked for the slot.
    """

    def __init__(
        self,
        agenda: Agenda,
        k: Tensor,
        v: Tensor,
        transport: Transport | None,
        tag: int = 0,
        track: Track | None = None,
    ) -> None:
        self._agenda, self._transport, self._tag, self._track = agenda, transport, tag, track
        self.k = [k, *(staging(k, rows, k.dtype) for rows in agenda.capacity[1:])]
        self.v = [v, *(staging(v, rows, v.dtype) for rows in agenda.capacity[1:])]
        self._gradients: list[tuple[Tensor, Tensor] | None] = [None] * len(self.k)

    def gradient(self, slot: int) -> tuple[Tensor, Tensor]:
        """dK and dV of a slot in fp32, zero where nothing was added since the slot was filled."""
        found = self._gradients[slot]
        if found is None:
            k, v = self.k[slot], self.v[slot]
            found = self._gradients[slot] = (
                torch.zeros_like(k, dtype=torch.float32),
                torch.zeros_like(v, dtype=torch.float32),
            )
        return found

    def steps(self, compute: Compute) -> Iterator[None]:
        """All steps: post, compute while messages travel, finish. Yields after each step's computation: what the caller
        does then hides what still travels.

        Args:
            compute: called with a slot and its calls.

        Raises:
            PeerError: a peer died or did not answer in time.
        """
        flying: Flying = {}
        track = self._track
        for number, step in enumerate(self._agenda.steps):
            began = None if track is None else track.mark()
            if step.posts:
                flying.update(self._post(step.posts))
                if track is not None:
                    began = track.posted(began, number, step.posts, self.k[0], self.v[0])
            for slot, calls in step.compute:
                compute(slot, calls)
            if track is not None and step.compute:
                track.lap(COMPUTE, began, number)
            yield
            if step.finish:
                _finish(flying, step.finish, number, track)

    def _post(self, posts: Sequence[Post]) -> Flying:
        assert self._transport is not None, "a plan for one rank has no messages"
        transfers: list[Transfer] = []
        landings: list[Callable[[], None] | None] = []
        for post in posts:
            pair, land = self._outgoing(post) if post.sends else self._incoming(post)
            landings.append(land)
            transfers.extend(
                Transfer(tensor, post.peer, post.sends, self._tag + 2 * post.number + part, post.what)
                for part, tensor in enumerate(pair)
            )
        pending = self._transport.post(transfers)
        return {post.number: (pending[2 * i : 2 * i + 2], landings[i]) for i, post in enumerate(posts)}

    def _outgoing(self, post: Post) -> tuple[tuple[Tensor, Tensor], None]:
        """Rows to send: in place when they are one run, else gathered."""
        k, v = self.gradient(post.slot) if post.reduces else (self.k[post.slot], self.v[post.slot])
        if isinstance(post.rows, slice):
            return (k[post.rows], v[post.rows]), None
        pair = staging(k, post.count, k.dtype), staging(v, post.count, v.dtype)
        for source, target in zip((k, v), pair, strict=True):
            torch.index_select(source, 0, post.rows, out=target)
        return pair, None

    def _incoming(self, post: Post) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
        """Where rows arrive, and what to do when they have: keys and values of one run arrive in place."""
        k, v, rows, slot = self.k[post.slot], self.v[post.slot], post.rows, post.slot
        if post.reduces:
            pair = staging(k, post.count, torch.float32), staging(v, post.count, torch.float32)
            return pair, lambda: self._add(slot, rows, *pair)
        if isinstance(rows, slice):
            return (k[rows], v[rows]), lambda: self._reset(slot, rows)
        pair = staging(k, post.count, k.dtype), staging(v, post.count, v.dtype)

        def land() -> None:
            k[rows], v[rows] = pair
            self._reset(slot, rows)

        return pair, land

    def _add(self, slot: int, rows: slice | Tensor, dk: Tensor, dv: Tensor) -> None:
        for total, part in zip(self.gradient(slot), (dk, dv), strict=True):
            if isinstance(rows, slice):
                total[rows] += part
            else:
                total.index_add_(0, rows, part)

    def _reset(self, slot: int, rows: slice | Tensor) -> None:
        """New rows begin with no gradient."""
        found = self._gradients[slot]
        if found is not None:
            for total in found:
                total[rows] = 0


def _finish(flying: Flying, numbers: Sequence[int], step: int, track: Track | None) -> None:
    """Wait for messages of a step. A function of its own, so that what they hold apart goes before the next step's
    messages are posted."""
    began = None if track is None else track.mark()
    landed = []
    for number in numbers:
        pending, land = flying.pop(number)
        for transfer in pending:
            transfer.wait()
        if land is not None:
            landed.append(land)
    if track is not None:
        began = track.arrived(began, step, numbers)
    for land in landed:  # after every send of the step is out: a landing may reuse the rows that were sent
        land()
    if track is not None and landed:
        track.lap(LAND, began, step)
