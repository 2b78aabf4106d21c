"""PlanSharing: work that one rank of a machine does for the others, and slices of plans as it sends them.

A planner's error is sent in the place of its result, so all ranks raise it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.engine.agreement import adopt_fingerprints, plan_fingerprints
from mindspeed_cp.errors import PeerError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Plan, Topology
from mindspeed_cp.plan.plan_bytes import plan_from_bytes, plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan
from mindspeed_cp.plan_sharing.error_messages import error_from_bytes, error_to_bytes
from mindspeed_cp.plan_sharing.node_sockets import FrameSocket, Listener, LoaderEnded, Patience, connect_ranks

Result = TypeVar("Result")
ScopeT = TypeVar("ScopeT", bound=str)
_RESULT, _ERROR = range(2)  # kinds of frames


class PlanSharing(Generic[ScopeT]):
    """The shared work of one rank; a context manager of the thread that plans, which connects the ranks.

    Args:
        rank: this rank.
        scopes: for each kind of work the ranks of this machine that share it, ascending and with this one; the first
            does it. Ranks of a scope give the same ones.
        patience: how long to wait for another rank.
        setting: name of the setting by which ranks share plans.

    Attributes:
        path: where this rank listens; None: nowhere.
        paths: where each of the ranks listens, to be set before the ranks connect.

    Raises:
        ConfigError: this rank is a planner, and cannot be reached.
    """

    def __init__(self, rank: int, scopes: Mapping[ScopeT, Sequence[int]], patience: Patience, setting: str) -> None:
        self._rank, self._scopes, self._patience = rank, dict(scopes), patience
        self._pairs = sorted({(planner, other) for planner, *others in scopes.values() for other in others})
        self._listener = Listener(setting) if any(planner == rank for planner, _ in self._pairs) else None
        self.path = None if self._listener is None else self._listener.path
        self.paths: Mapping[int, str | None] = {}
        self._sockets: dict[int, FrameSocket] = {}
        self._encoded: WeakKeyDictionary[Plan, dict[int, bytes]] = WeakKeyDictionary()

    def __enter__(self) -> PlanSharing[ScopeT]:
        self.connect()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def connect(self) -> None:
        """Connect to the other ranks; a collective of them.

        Raises:
            LoaderEnded: the loader ended first.
            PeerError: another rank is gone, or does not answer.
        """
        try:
            self._sockets = connect_ranks(self._rank, self._pairs, self.paths, self._listener, self._patience)
        finally:
            if self._listener is not None:
                self._listener.close()

    def close(self) -> None:
        """Close the connections; the other ranks still get what was sent."""
        for connection in self._sockets.values():
            connection.close()

    def is_planner(self, scope: ScopeT) -> bool:
        """Return True if this rank does the work of its ranks."""
        return self._scopes[scope][0] == self._rank

    def share(
        self,
        scope: ScopeT,
        make: Callable[[], Result],
        encode: Callable[[Result, Sequence[int]], Iterable[bytes]],
        decode: Callable[[bytes], Result],
    ) -> Result:
        """Return the result of some work, which one rank of the scope does; all of them call it, in one order.

        Args:
            scope: the ranks that share the work.
            make: does the work.
            encode: returns the result as bytes for each of some ranks.
            decode: returns the result of these bytes.

        Raises:
            LoaderEnded: the loader ended while this rank waited.
            PeerError: another rank is gone, or does not answer.
            Exception: the work failed; on all ranks the same error, of the type of `mindspeed_cp.errors` or of Python.
        """
        planner, *others = self._scopes[scope]
        if self._rank != planner:
            kind, content = self._sockets[planner].receive()
            if kind == _ERROR:
                raise error_from_bytes(content)
            return decode(content)
        try:
            result = make()
            contents = list(encode(result, others))
        except Exception as error:
            message = error_to_bytes(error)
            for other in others:
                with suppress(LoaderEnded, PeerError):  # the first error is the cause
                    self._sockets[other].send(_ERROR, message)
            raise
        for other, content in zip(others, contents, strict=True):
            self._sockets[other].send(_RESULT, content)
        return result

    def encode_slices(self, number: int, plans: Sequence[Plan], plan_ranks: Iterable[int]) -> Iterable[bytes]:
        """Yield for each of some ranks, by their numbers in the plans, a number and its slices of plans, with the
        fingerprints of the whole ones."""
        for rank in plan_ranks:
            slices = [self._slice(plan, rank) for plan in plans]
            header = {
                "number": number,
                "fingerprints": [dict(plan_fingerprints(plan)) for plan in plans],
                "bytes": list(map(len, slices)),
            }
            text = json.dumps(header).encode()
            yield b"".join([len(text).to_bytes(8, "little"), text, *slices])

    def _slice(self, plan: Plan, rank: int) -> bytes:
        """Return a slice as bytes; it is kept as long as the plan lives, which may be that of several rows."""
        by_rank = self._encoded.setdefault(plan, {})
        if rank not in by_rank:
            by_rank[rank] = plan_to_bytes(slice_plan(plan, rank))
        return by_rank[rank]


@dataclass(frozen=True)
class ReceivedPlan:
    """A slice of a plan as it arrives.

    Attributes:
        content: result of `plan_to_bytes`.
        fingerprints: those of the whole plan.
    """

    content: bytes
    fingerprints: Mapping[str, str]

    def read(self) -> Plan:
        """Return the slice."""
        plan = plan_from_bytes(self.content)
        adopt_fingerprints(plan, self.fingerprints)
        return plan


def read_or_build(
    received: Mapping[AttentionConfig, ReceivedPlan],
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    algorithm: str,
    **options: Any,
) -> Plan:
    """Read the plan that this rank's planner has sent, by attention, unless it is of other documents; else build it.

    Ranks compare their plans before they run, and name the one whose documents differ.

    Args:
        received: slices of the plans of this micro-batch.
        documents, topology, attention, algorithm, options: as for build_plan.
    """
    if attention in received:
        plan = received[attention].read()
        if plan.documents == documents:
            return plan
    return build_plan(documents, topology, attention, algorithm, **options)


def decode_plans(content: bytes) -> tuple[int, list[ReceivedPlan]]:
    """Return the number and the slices of :meth:`PlanSharing.encode_slices`."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    received = []
    for size, fingerprints in zip(header["bytes"], header["fingerprints"], strict=True):
        received.append(ReceivedPlan(content[begin : begin + size], fingerprints))
        begin += size
    return header["number"], received
