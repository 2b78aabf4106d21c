"""Runs programs and redistributions on one rank: slots of keys and values, their gradients, and the messages.

A computation is a generator. It yields after its redistributions are posted, after the computation of each step, and
after the redistributions of its results are posted; other parts of the plan then continue. The yielded value is the
list of transfers that it waits for when it is resumed, so that whoever runs all ranks in one process knows which of
them can be resumed. A rank of its own ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mindspeed_cp.comm.group_transport import Pending, Transfer, Transport, staging_buffer
from mindspeed_cp.comm.redistribution import RankRedistribution, start_redistributions
from mindspeed_cp.engine.profile_ranges import profile_range
from mindspeed_cp.engine.rank_context import P2POp, RankSchedule
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator
from mindspeed_cp.ops.attention.contract import AttentionBackend, BackwardState, ForwardState
from mindspeed_cp.ops.attention.latent import LatentExpansion
from mindspeed_cp.ops.rows import RowIndex, put_rows, take_rows
from mindspeed_cp.plan import AttentionConfig

Result = TypeVar("Result")

#: A computation that yields the transfers that it waits for next.
Run = Generator[Sequence[Pending], None, Result]

#: By message number: the operation, its transfers, and their tensors.
InFlight = dict[int, tuple[P2POp, Sequence[Pending], Sequence[Tensor]]]


class ProgramRun:
    """Buffers of one program while it runs.

    Args:
        schedule: what the rank does.
        k, v: shard of this rank.
        transport: transport to the other ranks; None for a single rank.
        tag: first tag of the messages.
        reduce_dtype: type in which gradients of keys and values travel.

    Attributes:
        k, v: rows of each slot; slot 0 is the shard of this rank.
        gradients: dK and dV of each slot: what was added since the slot was filled.
    """

    def __init__(
        self,
        schedule: RankSchedule,
        k: Tensor,
        v: Tensor,
        transport: Transport | None,
        tag: int = 0,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._schedule, self._transport, self._tag = schedule, transport, tag
        self._reduce_dtype = reduce_dtype
        self.k = [k, *(k.new_empty((rows, *k.shape[1:])) for rows in schedule.capacity[1:])]
        self.v = [v, *(v.new_empty((rows, *v.shape[1:])) for rows in schedule.capacity[1:])]
        self.gradients = [(GradientAccumulator(k), GradientAccumulator(v)) for k, v in zip(self.k, self.v, strict=True)]

    def steps(self, compute: Callable[[ProgramRun, int, Any, RowIndex | None], None]) -> Run[None]:
        """Run all steps: post messages, compute while they travel, wait for those that are due. Yields after the
        computation of each step, so that the caller can overlap other work with the messages in flight.

        Args:
            compute: called with this run, a slot, its kernel calls, and the rows of the slot that they count keys among
                (`RankStep.rows_read`); None: all.

        Raises:
            PeerError: a peer died or did not answer in time.
        """
        in_flight: InFlight = {}
        for step in self._schedule.steps:
            if step.p2p_ops:
                with profile_range("post messages"):
                    self._post(step.p2p_ops, in_flight)
            with profile_range("attention"):
                for slot, calls in step.compute:
                    compute(self, slot, calls, step.rows_read.get(slot))
            yield [transfer for message in step.wait_for for transfer in in_flight[message][1]]
            if step.wait_for:
                with profile_range("wait for messages"):
                    self._wait(step.wait_for, in_flight)

    def _post(self, p2p_ops: Sequence[P2POp], in_flight: InFlight) -> None:
        assert self._transport is not None, "a plan for a single rank has no messages"
        transfers: list[Transfer] = []
        for op in p2p_ops:
            tag = self._tag + 2 * op.number
            for i, x in enumerate(self._buffers(op)):
                transfers.append(Transfer(x, op.peer, op.sends, tag + i, op.label, op.due))
        pending = self._transport.post(transfers)
        for i, op in enumerate(p2p_ops):
            pair = slice(2 * i, 2 * i + 2)
            in_flight[op.number] = op, pending[pair], [transfer.tensor for transfer in transfers[pair]]

    def _buffers(self, op: P2POp) -> tuple[Tensor, ...]:
        """Return the two tensors that a message reads or writes: views of the slot where its rows are contiguous,
        otherwise copies. Gradients always arrive in buffers, from which they are added."""
        if op.sends:
            return self._rows_sent(op, 0), self._rows_sent(op, 1)
        k, v = self.k[op.slot], self.v[op.slot]
        if op.reduces:
            return staging_buffer(k, op.count, self._reduce_dtype), staging_buffer(v, op.count, self._reduce_dtype)
        if isinstance(op.rows, slice):
            return k[op.rows], v[op.rows]
        return staging_buffer(k, op.count), staging_buffer(v, op.count)

    def _rows_sent(self, op: P2POp, index: int) -> Tensor:
        """Return the rows of K (index 0) or V (1), or of their gradient, that a message sends; a view if it can be."""
        if op.reduces:
            return self.gradients[op.slot][index].rows(op.rows, self._reduce_dtype)
        return take_rows((self.k, self.v)[index][op.slot], op.rows)

    def _wait(self, numbers: Sequence[int], in_flight: InFlight) -> None:
        """Wait for messages, and unpack them. A function of its own, so that staging buffers are freed before the next
        step's messages are posted."""
        received = []
        for number in numbers:
            op, pending, buffers = in_flight.pop(number)
            for transfer in pending:
                transfer.wait()
            if not op.sends:
                received.append((op, buffers))
        for op, buffers in received:  # after all sends of the step: unpacking may overwrite the rows that they send
            self._unpack(op, buffers)

    def _unpack(self, op: P2POp, buffers: Sequence[Tensor]) -> None:
        """Add received gradients to those of the slot, or put received keys and values, which have no gradient yet,
        where they belong, if they did not arrive there."""
        if op.reduces:
            for gradient, buffer in zip(self.gradients[op.slot], buffers, strict=True):
                gradient.add_arrived(op.rows, buffer)
            return
        if not isinstance(op.rows, slice):
            for slot, buffer in zip((self.k[op.slot], self.v[op.slot]), buffers, strict=True):
                put_rows(slot, op.rows, buffer)
        for gradient in self.gradients[op.slot]:
            gradient.clear(op.rows)


class SlotReader:
    """Runs the kernel calls of a slot on its keys and values, which it makes from latents if the slot holds these.

    Keys and values that were made are freed after the calls, and made again where a later step or the backward reads
    the same rows.

    Args:
        backend: backend of the attention operator.
        attention: attention of the part.
        expansion: expansion of latents to the heads of this rank; None where slots hold keys and values.
        dkv_up: gradient of the weight of the expansion, fp32; None in the forward.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        attention: AttentionConfig,
        expansion: LatentExpansion | None,
        dkv_up: Tensor | None = None,
    ) -> None:
        self._backend, self._attention = backend, attention
        self._expansion, self._dkv_up = expansion, dkv_up

    def forward(self, run: ProgramRun, slot: int, calls: Any, rows: RowIndex | None, state: ForwardState) -> None:
        """Run calls of the forward; `rows` as in `RankStep.rows_read`."""
        k, v = run.k[slot], run.v[slot]
        if self._expansion is not None:
            assert rows is not None
            k, v = self._expansion.expand(take_rows(k, rows), take_rows(v, rows))
        self._backend.forward(calls, self._attention, state, k, v)

    def backward(self, run: ProgramRun, slot: int, calls: Any, rows: RowIndex | None, state: BackwardState) -> None:
        """Run calls of the backward, and add the gradients of the slot's rows to the slot's."""
        if self._expansion is None:
            self._backend.backward(calls, self._attention, state, run.k[slot], run.v[slot], *run.gradients[slot])
            return
        assert rows is not None and self._dkv_up is not None
        shared, latent = take_rows(run.k[slot], rows), take_rows(run.v[slot], rows)
        k, v = self._expansion.expand(shared, latent)
        dk, dv = GradientAccumulator(k), GradientAccumulator(v)
        self._backend.backward(calls, self._attention, state, k, v, dk, dv)
        parts = self._expansion.gradient(dk.fp32(), dv.fp32(), latent, self._dkv_up)
        for gradient, part in zip(run.gradients[slot], parts, strict=True):
            gradient.add(rows, part)


def redistribute(
    tensors: Sequence[Tensor],
    redistributions: Sequence[RankRedistribution | None],
    transport: Transport | None,
    label: str,
    tag: int = 0,
) -> Run[list[Tensor]]:
    """Redistribute several tensors at once and return them. Tensors without a redistribution are returned unchanged.
    Yields once, after all transfers are posted.

    Raises:
        PeerError: a peer died or did not answer in time.
    """
    work = [(x, item) for x, item in zip(tensors, redistributions, strict=True) if item is not None]
    with profile_range("post messages"):
        in_flight = start_redistributions(work, transport, label, tag)
    yield in_flight.pending
    with profile_range("wait for messages"):
        outputs = iter(in_flight.finish())
    return [x if item is None else next(outputs) for x, item in zip(tensors, redistributions, strict=True)]


def run_interleaved(runs: Sequence[Run[Result]], step_order: Sequence[int]) -> Run[list[Result]]:
    """Run all parts of a plan on one rank to their ends and return their results.

    Args:
        runs: one computation for each part.
        step_order: see :class:`mindspeed_cp.engine.rank_context.RankContext`.
    """
    if len(runs) == 1:
        return [(yield from runs[0])]
    awaited: list[Sequence[Pending]] = [next(run) for run in runs]
    for index in step_order:
        yield awaited[index]
        awaited[index] = ()  # holds no buffer while the part continues
        awaited[index] = next(runs[index])
    results = []
    for index, run in enumerate(runs):
        yield awaited[index]
        awaited[index] = ()
        results.append(run_to_end(run, max_yields=0))
    return results


def run_to_end(run: Run[Result], max_yields: int | None = None) -> Result:
    """Run a computation to its end and return its result. Its waits block."""
    yields = 0
    try:
        while True:
            next(run)
            yields += 1
            assert max_yields is None or yields <= max_yields, "a part has a step left"
    except StopIteration as end:
        result: Result = end.value
        return result
