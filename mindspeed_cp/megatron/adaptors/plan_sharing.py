"""Plans that one rank of a machine makes for the others of its pipeline stage, in Megatron's groups.

::

    shared = open_plan_sharing(suite, "node")                                   # once; a collective
    batch, params = planned_batch_from(whole, config, suite, sharing=shared)    # for each micro-batch, on all ranks

Ranks with the same micro-batches have the same plans: the context- and tensor-parallel ranks of a replica's stage, or
of the pool those of all replicas. Stages run at different times, so each has planners of its own.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_cp.algorithms.plan_cache import PlanCache
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.sections import Planner
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.megatron.adaptors.packed import plan_cache
from mindspeed_cp.plan import AttentionConfig, Plan, Topology, verify_plan
from mindspeed_cp.plan_sharing.node_ranks import NodeRanks, node_ranks, rank_row, usable_cores
from mindspeed_cp.plan_sharing.node_sockets import Patience
from mindspeed_cp.plan_sharing.rule import may_share_plans, sharing_problem, wants_to_share
from mindspeed_cp.plan_sharing.sharing import PlanSharing, ReceivedPlan, decode_plans, read_or_build

#: Ranks of a machine that share work: those of a replica's stage, or of the stage of all replicas.
Scope = Literal["replica", "pool"]

#: What launchers say of a rank.
LAUNCHER_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")

_PATH_BYTES = 128  # more than the system allows for the path of a socket
_open: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], StageSharing | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _StageRank:
    """A rank of this pipeline stage: its replica, and its numbers in the plans of this and of the pool."""

    replica: int
    numbers: Mapping[Scope, int]


class StageSharing(PlanSharing[Scope]):
    """Shared plans of the ranks of this machine in this pipeline stage; all of them make the same calls in one order.

    Args:
        rank: this rank.
        ranks: those of this machine and stage.
        pooled: micro-batches may be those of the pool.
        verify: prove every new plan, on the rank that makes it.
        patience: how long to wait for another rank.
        setting: name of the setting by which ranks share plans.
    """

    def __init__(
        self,
        rank: int,
        ranks: Mapping[int, _StageRank],
        pooled: bool,
        verify: bool,
        patience: Patience,
        setting: str,
    ) -> None:
        replica = [other for other in sorted(ranks) if ranks[other].replica == ranks[rank].replica]
        scopes: dict[Scope, Sequence[int]] = {"replica": replica}
        if pooled:
            scopes["pool"] = sorted(ranks)
        super().__init__(rank, scopes, patience, setting)
        self._ranks, self._verify = ranks, verify
        self._cache = PlanCache(self._prove, build=self._build)
        self._received: Mapping[AttentionConfig, ReceivedPlan] = {}  # of the micro-batch that is being planned
        self._makes = False  # this rank plans that micro-batch

    def plans(
        self,
        documents: Documents,
        topology: Topology,
        attentions: Sequence[AttentionConfig],
        algorithm: str,
        options: Mapping[str, Any],
        pooled: bool = False,
    ) -> list[Plan]:
        """Return the plans of a micro-batch, one for each attention: whole on the rank that makes them, else the slices
        of this rank.

        A rank that has other documents or settings than its planner plans for itself: ranks compare their plans before
        they run, and name what differs.

        Args:
            documents, topology, algorithm, options: arguments of build_plan.
            attentions: attention of layers, each once.
            pooled: the micro-batch is one of the pool.

        Raises:
            ConfigError: as build_plan; on all ranks that share the plans.
            PlanError: a proof failed; on all of them.
            PeerError: another rank is gone, or does not answer.
        """
        scope: Scope = "pool" if pooled else "replica"
        settings = topology, tuple(attentions), algorithm, sorted(options.items())
        number = zlib.crc32(repr(settings).encode())

        def cached() -> list[Plan]:
            return [
                self._cache.get(documents, topology, attention, algorithm, dict(options)) for attention in attentions
            ]

        def make() -> list[Plan]:
            self._received = {}
            return cached()

        def encode(plans: list[Plan], ranks: Sequence[int]) -> Iterable[bytes]:
            return self.encode_slices(number, plans, (self._ranks[rank].numbers[scope] for rank in ranks))

        def decode(content: bytes) -> list[Plan]:
            sent, received = decode_plans(content)
            self._received = dict(zip(attentions, received, strict=True)) if sent == number else {}
            return cached()

        self._makes = self.is_planner(scope)
        return self.share(scope, make, encode, decode)

    def share_choice(self, make: Callable[[], bool]) -> bool:
        """Return a choice that one rank makes for the pool's ranks of this machine; errors as for `share`."""
        return self.share(
            "pool", make, lambda choice, ranks: [bytes([choice])] * len(ranks), lambda sent: sent != b"\0"
        )

    def _build(self, *problem: Any, **options: Any) -> Plan:
        """Return the plan that this rank's planner has sent, or a new one; arguments as for build_plan."""
        return read_or_build(self._received, *problem, **options)

    def _prove(self, plan: Plan) -> None:
        """Prove a new plan, if it is whole and plans are to be proved."""
        if self._verify and self._makes:
            verify_plan(plan)


def micro_batch_plans(
    documents: Documents,
    topology: Topology,
    attentions: Sequence[AttentionConfig],
    suite: SuiteSettings,
    options: Mapping[str, Any],
    sharing: StageSharing | None = None,
    pooled: bool = False,
) -> list[Plan]:
    """Return the plans of a micro-batch whose rows are cut by them, one for each attention.

    Args:
        documents, topology, options: arguments of build_plan; its algorithm is that of `suite`.
        attentions: attention of layers, each once.
        suite: the section context_parallel_suite.
        sharing: result of :func:`open_plan_sharing`; None: this rank plans alone.
        pooled: the micro-batch is one of the pool.
    """
    if sharing is not None:
        return sharing.plans(documents, topology, attentions, suite.algorithm, options, pooled)
    cache = plan_cache(None, suite.verify_plans)
    return [cache.get(documents, topology, attention, suite.algorithm, dict(options)) for attention in attentions]


def open_plan_sharing(
    suite: SuiteSettings,
    planner: Planner = "auto",
    *,
    pooled: bool = False,
    seconds: float | None = None,
    setting: str = "planner",
) -> StageSharing | None:
    """Return the shared plans of this rank, or None if it plans alone.

    The first call is a collective of the context- and tensor-parallel ranks of this replica's stage, with `pooled` of
    all replicas; a later call with the same arguments but `seconds` returns the same object, as long as Megatron's
    groups live.

    Args:
        suite: the section context_parallel_suite, the same on all ranks.
        planner: "replicated": every rank plans; "node": of the ranks of a machine that have the same plans, the first
            one; "auto": "node" where plans are searched for and a rank has fewer than 2 cores, without verify_plans
            (:mod:`mindspeed_cp.plan_sharing.rule`).
        pooled: micro-batches may be those of the pool of all replicas.
        seconds: how long to wait for another rank; None: ``suite.timeout_seconds``.
        setting: name of `planner` in errors.

    Raises:
        ConfigError: `planner` is "node", and the ranks of a machine cannot share plans.
        PeerError: another rank is gone, or does not answer.
    """
    if not may_share_plans(planner, suite):
        return None
    group = parallel_state.get_context_parallel_group()
    by_arguments = _open.setdefault(group, {})
    key = planner, pooled, suite.verify_plans, setting
    if key not in by_arguments:
        patience = Patience(lambda: False, suite.timeout_seconds if seconds is None else seconds)
        by_arguments[key] = sharing = _open_stage(planner, pooled, suite.verify_plans, patience, setting)
        if sharing is not None:
            finalize(group, sharing.close)
    return by_arguments[key]


def launcher_problem() -> str | None:
    """Return what the launcher does not say of this rank, or None."""
    missing = [name for name in LAUNCHER_VARIABLES if not os.environ.get(name, "").isdigit()]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} of launchers such as torchrun {are} not in the environment"


def _open_stage(planner: Planner, pooled: bool, verify: bool, patience: Patience, setting: str) -> StageSharing | None:
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = (0, 0) if launcher_problem() else (int(os.environ[name]) for name in LAUNCHER_VARIABLES)
    wide = parallel_state.get_data_parallel_group(with_context_parallel=True)
    numbers = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank(), dist.get_rank(wide)
    own = [rank, *numbers, *rank_row(rank, local_rank, local_size, usable_cores())]
    rows = _gathered(torch.tensor(own), pooled).tolist()
    stage = {
        other: _StageRank(replica, {"replica": cp_rank, "pool": pool_rank})
        for other, replica, cp_rank, pool_rank, *_ in rows
    }
    table = {row[0]: row[4:] for row in rows}
    nodes = {other: node_ranks(table, other, size) for other in table}
    problem = launcher_problem() or next(filter(None, map(sharing_problem, nodes.values())), None)
    if problem is not None and planner == "node":
        raise ConfigError(f"{setting} is 'node', but {problem}; valid here: replicated, or auto")
    sharing, failure = None, None
    node = nodes[rank]
    if node is not None and _shares(planner, node):
        try:
            own_machine = {other: stage[other] for other in node.ranks}
            sharing = StageSharing(rank, own_machine, pooled, verify, patience, setting)
        except ConfigError as error:  # raised once the other ranks know
            failure = error
    path = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    if sharing is not None and sharing.path is not None:
        content = sharing.path.encode()
        path[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    paths = [bytes(row).rstrip(b"\0").decode() for row in _gathered(path, pooled).tolist()]
    if failure is not None:
        raise failure
    if sharing is not None:
        sharing.paths = {row[0]: text or None for row, text in zip(rows, paths, strict=True)}
        sharing.connect()
    return sharing


def _shares(planner: Planner, node: NodeRanks) -> bool:
    """Return True if the ranks of a machine share plans; equal on all of them."""
    return len(node.ranks) > 1 and sharing_problem(node) is None and wants_to_share(planner, node)


def _gathered(own: Tensor, pooled: bool) -> Tensor:
    """Return the rows of all ranks of this stage, of one replica or of the pool's, [ranks, n].

    Gathered over groups that the model uses anyway: a new group would take memory of the device.
    """
    plan_group = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if pooled
        else parallel_state.get_context_parallel_group()
    )
    rows = own[None]
    for group in (plan_group, parallel_state.get_tensor_model_parallel_group()):
        on_host = dist.get_backend(group) == "gloo"
        rows = rows if on_host else rows.to(torch.device("cuda", torch.cuda.current_device()))
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    return rows.cpu()
