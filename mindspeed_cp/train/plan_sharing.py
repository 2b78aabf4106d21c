"""Work that one rank of a machine does for the others: choosing between pools and replicas, and plans.

Without it every rank plans alone, the same plans as all others that share them. With it, the first of these ranks on
each machine is their planner: it sends each of the others its slice (:mod:`mindspeed_cp.plan.rank_slice`), with the
fingerprints of the whole plan, by which ranks compare it over machines as ever::

    machine 0   rank 0 plans ──► ranks 1 .. 7        nothing crosses machines; the planners make
    machine 1   rank 8 plans ──► ranks 9 .. 15       equal plans, since a plan is a pure function

All of this runs in the threads that make batches. A planner's error is sent in the place of its result, so all ranks
raise it.
"""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import Dispatcher
from mindspeed_cp.data.dispatch import DispatchedBatch
from mindspeed_cp.data.pool import POOL_ALGORITHM
from mindspeed_cp.engine.agreement import adopt_fingerprints, plan_fingerprints
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.plan_bytes import plan_from_bytes, plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan
from mindspeed_cp.train.node_sockets import FrameSocket, Listener, LoaderEnded, connect_ranks
from mindspeed_cp.train.rank_messages import MessageReader, MessageWriter
from mindspeed_cp.train.world import World

#: auto: a rank with fewer cores than this makes its plans on a core that its training needs.
CORES_TO_PLAN_ALONE = 2

#: Ranks of a machine that share work: all, those of a pipeline stage (the pool), of one of several pools in it, or of a
#: replica in it.
Scope = Literal["node", "pool", "subpool", "replica"]

Result = TypeVar("Result")
_RESULT, _ERROR = range(2)  # kinds of frames


def may_share_plans(settings: Settings) -> bool:
    """Return True if these settings let the ranks of a machine share plans by `train.planner`.

    auto: where plans are searched for, which takes longer than to send them. Proofs (`verify_plans`) are also shared by
    ranks that plan alone, so auto leaves these alone.
    """
    planner, suite = settings.train.planner, settings.context_parallel_suite
    if planner != "auto":
        return planner == "node"
    return (suite.algorithm == POOL_ALGORITHM or bool(suite.candidates)) and not suite.verify_plans


def shares_plans(settings: Settings, world: World) -> bool:
    """Return True if the ranks of this machine share plans; equal on all of them.

    auto: where a rank has fewer than `CORES_TO_PLAN_ALONE` cores. With spare cores every rank plans beside its
    training, and has its plan sooner.

    Raises:
        ConfigError: `train.planner` is "node", and the ranks of this machine cannot share plans.
    """
    if not may_share_plans(settings):
        return False
    problem = _problem(world)
    if problem is not None:
        if settings.train.planner == "node":
            raise ConfigError(f"train.planner is 'node', but {problem}; valid here: replicated, or auto")
        return False
    assert world.node is not None
    scope: Scope = "replica" if world.pool is None else "pool"
    if all(len(ranks_that_share(world, rank, scope)) == 1 for rank in world.node.ranks):
        return False
    return settings.train.planner == "node" or world.node.cores_per_rank < CORES_TO_PLAN_ALONE


def _problem(world: World) -> str | None:
    """Return why the ranks of this machine cannot share plans, or None."""
    if world.node is None:
        return "the launcher does not number the ranks of a machine one after the other"
    return None if hasattr(socket, "AF_UNIX") else "this system has no sockets in files"


def ranks_that_share(world: World, rank: int, scope: Scope) -> tuple[int, ...]:
    """Return the ranks of this machine that share work with one of them, ascending; the first does it."""
    assert world.node is not None

    def key(rank: int) -> tuple[int, ...]:
        stage, number = divmod(rank, world.stage_size)
        if scope in ("node", "pool"):
            return () if scope == "node" else (stage,)
        replicas = 1 if scope == "replica" or world.subpools is None else world.replicas_of_plan(world.subpools.count)
        return stage, number // (world.tp_size * world.cp_size * replicas)

    return tuple(other for other in world.node.ranks if key(other) == key(rank))


def plan_rank(world: World, rank: int, pools: int) -> int:
    """Return the number of a rank in its plans, those of a step on so many pools; 0: on replicas."""
    return rank % world.stage_size // world.tp_size % (world.cp_size * world.replicas_of_plan(pools))


class PlanSharing:
    """The shared work of one loader; a context manager of its thread, which connects the ranks. Every rank makes one.

    Args:
        world: this rank among all.
        is_ended: returns True once the loader has ended.

    Raises:
        ConfigError: this rank is a planner, and cannot be reached.
    """

    def __init__(self, world: World, is_ended: Callable[[], bool]) -> None:
        self._world, self._is_ended = world, is_ended
        scopes: tuple[Scope, ...] = ("replica",) if world.pool is None else ("node", "pool", "subpool", "replica")
        assert world.node is not None
        groups = {ranks_that_share(world, rank, scope) for scope in scopes for rank in world.node.ranks}
        self._pairs = sorted({(planner, other) for planner, *others in groups for other in others})
        self._listener = Listener() if any(planner == world.rank for planner, _ in self._pairs) else None
        self._paths: Sequence[str | None] = ()
        self._sockets: dict[int, FrameSocket] = {}
        self._encoded: WeakKeyDictionary[Plan, dict[int, bytes]] = WeakKeyDictionary()

    @staticmethod
    def open(settings: Settings, world: World, is_ended: Callable[[], bool]) -> PlanSharing | None:
        """Return the shared work of this rank, or None if it plans alone; a collective of all ranks.

        Raises:
            ConfigError: as for :func:`shares_plans` and the class.
        """
        if not may_share_plans(settings):
            return None
        sharing = PlanSharing(world, is_ended) if shares_plans(settings, world) else None
        paths = world.gather_json(None if sharing is None or sharing._listener is None else sharing._listener.path)
        if sharing is not None:
            sharing._paths = paths
        return sharing

    def __enter__(self) -> PlanSharing:
        try:
            self._sockets = connect_ranks(self._world.rank, self._pairs, self._paths, self._listener, self._is_ended)
        finally:
            if self._listener is not None:
                self._listener.close()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._sockets.values():
            connection.close()

    def is_planner(self, scope: Scope) -> bool:
        """Return True if this rank does the work of its ranks."""
        return ranks_that_share(self._world, self._world.rank, scope)[0] == self._world.rank

    def share(
        self,
        scope: Scope,
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
            PeerError: another rank is gone.
            Exception: the work failed; on all ranks the same error, of the type of `mindspeed_cp.errors` or of Python.
        """
        planner, *others = ranks_that_share(self._world, self._world.rank, scope)
        if self._world.rank != planner:
            kind, content = self._sockets[planner].receive()
            if kind == _ERROR:
                raise MessageReader(io.BytesIO(content)).load()
            return decode(content)
        try:
            result = make()
        except Exception as error:
            message = io.BytesIO()
            MessageWriter(message).dump(error)
            for other in others:
                with suppress(LoaderEnded, PeerError):  # the first error is the cause
                    self._sockets[other].send(_ERROR, message.getvalue())
            raise
        for other, content in zip(others, encode(result, others), strict=True):
            self._sockets[other].send(_RESULT, content)
        return result

    def encode_plans(self, number: int, plans: Sequence[Plan], pools: int, ranks: Sequence[int]) -> Iterable[bytes]:
        """Yield for each of some ranks a number, and its slices of plans with the fingerprints of the whole ones."""
        for rank in ranks:
            slices = [self._slice(plan, plan_rank(self._world, rank, pools)) for plan in plans]
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


def decode_plans(content: bytes) -> tuple[int, list[ReceivedPlan]]:
    """Return the number and the slices of :meth:`PlanSharing.encode_plans`."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    received = []
    for size, fingerprints in zip(header["bytes"], header["fingerprints"], strict=True):
        received.append(ReceivedPlan(content[begin : begin + size], fingerprints))
        begin += size
    return header["number"], received


@dataclass(frozen=True)
class SharedDispatcher(Dispatcher):
    """A dispatcher of which one rank of each machine compares replicas with pools.

    Attributes:
        sharing: connections to the other ranks.
    """

    sharing: PlanSharing | None = None

    @staticmethod
    def of_dispatcher(dispatcher: Dispatcher, sharing: PlanSharing) -> SharedDispatcher:
        """Share the work of a dispatcher."""
        values = {field.name: getattr(dispatcher, field.name) for field in fields(Dispatcher)}
        return SharedDispatcher(**values, sharing=sharing)

    def __call__(self, rows: Sequence[np.ndarray]) -> DispatchedBatch:
        """Dispatch the rows of one global batch, as Dispatcher does."""
        assert self.sharing is not None
        began = time.perf_counter()

        def make() -> DispatchedBatch:
            return Dispatcher.__call__(self, rows)

        def encode(batch: DispatchedBatch, ranks: Sequence[int]) -> list[bytes]:
            kept = batch.micro_batches[:: self.replicas // batch.pools if batch.pools else 1]
            numbers = [[part.tolist() for part in replica] for replica in kept]
            message = {"micro_batches": numbers, "seconds": batch.seconds.tolist(), "pools": batch.pools}
            return [json.dumps(message).encode()] * len(ranks)

        def decode(content: bytes) -> DispatchedBatch:
            message: dict[str, Any] = json.loads(content)
            micro_batches = [[np.array(part, np.int64) for part in kept] for kept in message["micro_batches"]]
            copies = self.replicas // len(micro_batches)  # replicas of a pool have the same ones
            return DispatchedBatch(
                np.concatenate(rows),
                [own for own in micro_batches for _ in range(copies)],
                np.array(message["seconds"]),
                time.perf_counter() - began,
                message["pools"],
            )

        return self.sharing.share("node", make, encode, decode)
