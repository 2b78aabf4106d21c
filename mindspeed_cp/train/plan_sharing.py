"""Plans of a training: which ranks of a machine share them (`train.planner`), and the choice of pools among them.

All of this runs in the threads that make batches; :mod:`mindspeed_cp.plan_sharing` has what travels, and how.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import Dispatcher
from mindspeed_cp.data.dispatch import DispatchedBatch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan_sharing import rule, sharing
from mindspeed_cp.plan_sharing.node_sockets import Patience
from mindspeed_cp.train.world import World

SETTING = "train.planner"

#: Ranks of a machine that share work: all, those of a pipeline stage (the pool), of one of several pools in it, or of a
#: replica in it.
Scope = Literal["node", "pool", "subpool", "replica"]


def may_share_plans(settings: Settings) -> bool:
    """Return True if these settings let the ranks of a machine share plans."""
    return rule.may_share_plans(settings.train.planner, settings.context_parallel_suite)


def shares_plans(settings: Settings, world: World) -> bool:
    """Return True if the ranks of this machine share plans; equal on all of them.

    Raises:
        ConfigError: `train.planner` is "node", and the ranks of this machine cannot share plans.
    """
    if not may_share_plans(settings):
        return False
    problem = rule.sharing_problem(world.node)
    if problem is not None:
        if settings.train.planner == "node":
            raise ConfigError(f"{SETTING} is 'node', but {problem}; valid here: replicated, or auto")
        return False
    assert world.node is not None
    scope: Scope = "replica" if world.pool is None else "pool"
    if all(len(ranks_that_share(world, rank, scope)) == 1 for rank in world.node.ranks):
        return False
    return rule.wants_to_share(settings.train.planner, world.node)


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


class PlanSharing(sharing.PlanSharing[Scope]):
    """The shared work of one loader. Every rank makes one.

    Args:
        world: this rank among all.
        is_ended: returns True once the loader has ended.

    Raises:
        ConfigError: this rank is a planner, and cannot be reached.
    """

    def __init__(self, world: World, is_ended: Callable[[], bool]) -> None:
        scopes: tuple[Scope, ...] = ("replica",) if world.pool is None else ("node", "pool", "subpool", "replica")
        shared = {scope: ranks_that_share(world, world.rank, scope) for scope in scopes}
        super().__init__(world.rank, shared, Patience(is_ended), SETTING)
        self._world = world

    @staticmethod
    def open(settings: Settings, world: World, is_ended: Callable[[], bool]) -> PlanSharing | None:
        """Return the shared work of this rank, or None if it plans alone; a collective of all ranks.

        Raises:
            ConfigError: as for :func:`shares_plans` and the class.
        """
        if not may_share_plans(settings):
            return None
        shared, failure = None, None
        try:
            shared = PlanSharing(world, is_ended) if shares_plans(settings, world) else None
        except ConfigError as error:  # raised once the other ranks know that no path is coming
            failure = error
        paths = world.gather_json(None if shared is None else shared.path)
        if failure is not None:
            raise failure
        if shared is not None:
            shared.paths = dict(enumerate(paths))
        return shared

    def encode_plans(self, number: int, plans: Sequence[Plan], pools: int, ranks: Sequence[int]) -> Iterable[bytes]:
        """Yield for each of some ranks a number, and its slices of plans with the fingerprints of the whole ones."""
        return self.encode_slices(number, plans, (plan_rank(self._world, rank, pools) for rank in ranks))


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
