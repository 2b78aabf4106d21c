"""A rank among all: its process groups, and its numbers in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.comm import open_directional_groups
from mindspeed_cp.comm.directional_groups import PAIR_BUFFER_VARIABLE
from mindspeed_cp.comm.groups import process_group_options
from mindspeed_cp.config.candidates import candidate_settings
from mindspeed_cp.config.data import POOL
from mindspeed_cp.config.pool import Subpools, pool_topology, subpools_of
from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device.open_files import check_open_files
from mindspeed_cp.device.select import batched_launches_problem, cann_version, set_hccl_timeouts
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.megatron import megatron_imports, megatron_on
from mindspeed_cp.megatron.adaptors.pool_groups import PoolGroups
from mindspeed_cp.ops.attention.backends import check_npu_profile
from mindspeed_cp.ops.host_memory import keep_freed_memory
from mindspeed_cp.plan import Topology
from mindspeed_cp.plan_sharing.node_ranks import NodeRanks, node_ranks, rank_row, usable_cores
from mindspeed_cp.train.device import COLLECTIVE_LIBRARIES, device_memory, pick_device
from mindspeed_cp.train.local_agent import STORE_VARIABLE
from mindspeed_cp.train.memory import check_memory
from mindspeed_cp.train.process_groups import megatron_groups_with, open_pool_groups
from mindspeed_cp.train.rank_messages import without_pickles_between_ranks
from mindspeed_cp.train.rendezvous import open_store

with megatron_imports():
    from megatron.core import parallel_state

EXPERT_TENSOR_PARALLEL = 1  # an expert is never cut: its ranks would gather unequal numbers of tokens, and gloo cannot
JOIN_SECONDS = 300.0  # until every rank has to be there; ranks import Megatron before they join


@dataclass(frozen=True)
class World:
    """One rank among all ranks.

    Attributes:
        rank, size: its number, and the number of all ranks.
        device: its device.
        replicas, replica: number of data-parallel replicas, and its replica.
        cp_size, cp_rank: number of context-parallel ranks, and its number among them.
        local_size: number of ranks on this machine, as its launcher says.
        tp_size: number of tensor-parallel ranks; ranks with the same rank // tp_size hold the same tokens.
        stages, stage: number of pipeline stages, and its stage; a stage is consecutive ranks.
        pool: context-parallel ranks of all replicas of a stage, numbered replica by replica, which may share plans;
            None without data.balance: pool.
        subpools: equal pools into which it may be divided; None: it has at most data.pool_ranks ranks.
        pool_groups: process groups of this rank's pool of these; None without them.
        store: the key-value store through which the ranks found each other.
        node: the ranks of this machine; None where the launcher does not number them one after the other.
    """

    rank: int
    size: int
    device: torch.device
    replicas: int
    replica: int
    cp_size: int
    cp_rank: int
    local_size: int
    tp_size: int
    store: dist.Store
    stages: int = 1
    stage: int = 0
    pool: Topology | None = None
    node: NodeRanks | None = None
    subpools: Subpools | None = None
    pool_groups: PoolGroups | None = None

    def replicas_of_plan(self, pools: int) -> int:
        """Return the number of consecutive replicas that share plans in a step on so many pools; 0 pools: 1."""
        return self.replicas // pools if pools else 1

    def plan_rank(self, pools: int) -> int:
        """Return the number of this rank in its plans, those of a step on so many pools."""
        return self.replica % self.replicas_of_plan(pools) * self.cp_size + self.cp_rank

    def pool_topology(self, pools: int) -> Topology:
        """Return the ranks of a plan of a step on so many pools, 1 or more."""
        topology = self.pool if pools == 1 or self.subpools is None else self.subpools.topology
        assert topology is not None
        return topology

    def groups_of_pool(self, pools: int) -> PoolGroups | None:
        """Return the process groups of this rank's pool of several; None where Megatron has those of the plans."""
        return self.pool_groups if pools > 1 else None

    def plan_group(self, pools: int) -> dist.ProcessGroup:
        """Return the ranks of a plan of a step on so many pools; 0: the context-parallel ranks of this replica."""
        groups = self.groups_of_pool(pools)
        if groups is not None:
            return groups.plan
        if pools:
            return parallel_state.get_data_parallel_group(with_context_parallel=True)
        return self.cp_group

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The context-parallel ranks."""
        return parallel_state.get_context_parallel_group()

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage, over all replicas."""
        return self.size // self.stages

    @property
    def replica_ranks(self) -> list[list[int]]:
        """The ranks of each replica: those of its part of every pipeline stage."""
        ranks = torch.arange(self.size).view(self.stages, self.replicas, -1)
        return ranks.transpose(0, 1).reshape(self.replicas, -1).tolist()

    @property
    def is_first(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """Return the values of all ranks, fp64 [size, values]; every rank must call it with equally many."""
        own = torch.tensor(values, dtype=torch.float64)
        out = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(out, own)
        return torch.stack(out)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which travel as JSON; every rank must call it."""
        text = json.dumps(value).encode()
        sizes = self.gather([float(len(text))])[:, 0].long()
        own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        out = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(out, own)
        return [json.loads(bytes(x[:size].tolist())) for x, size in zip(out, sizes.tolist(), strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Return the first rank's value, which travels as JSON; every rank must call it."""
        text = json.dumps(value).encode() if self.is_first else b""
        content = torch.zeros(int(self.gather([float(len(text))])[0, 0]), dtype=torch.uint8)
        if self.is_first:
            content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(content, 0)
        return json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([0.0])


def check_nodes(settings: Settings, local_size: int, size: int) -> None:
    """Raise ConfigError if the settings put more ranks on a node than were started on this machine and the algorithm
    depends on nodes."""
    suite, tp = settings.context_parallel_suite, settings.train.tensor_model_parallel_size
    node_size = suite.topology.ranks_per_node * tp
    algorithms = {variant.context_parallel_suite.algorithm for variant in candidate_settings(settings)}
    if "hierarchical" in algorithms and min(node_size, size) > local_size:
        nodes = -(-suite.context_parallel_size * tp // local_size)
        raise ConfigError(
            f"context_parallel_suite.nodes = {suite.nodes}: puts {node_size} ranks on a node, but {local_size} were "
            f"started on this machine; valid: nodes = {nodes}, or start as many on each"
        )


@contextmanager
def join_ranks(settings: Settings, environment: Mapping[str, str] | None = None) -> Iterator[World]:
    """Join the other ranks by RANK and WORLD_SIZE, and by MASTER_ADDR and MASTER_PORT or the file of our own launcher;
    redirect CUDA to this rank's device, and make Megatron's process groups.

    Raises:
        ConfigError: the number of ranks does not fit the settings, they do not fit into this machine's memory, the
            device cannot be used, or the environment is not that of a launcher.
    """
    environment = os.environ if environment is None else environment
    rank, size, local_size = _read_rank_environment(environment)
    replicas = data_parallel_size(settings, size)
    check_nodes(settings, local_size, size)
    pool = subpools = pool_groups = None
    if settings.data.balance == POOL:
        tensor = settings.train.tensor_model_parallel_size
        pool = pool_topology(settings.context_parallel_suite, replicas, min(local_size, size), tensor)
        subpools = subpools_of(settings.context_parallel_suite, replicas, pool, settings.data.pool_ranks)
    check_memory(settings, local_size, ranks=size)
    check_open_files(size)
    if settings.train.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is opened; else cuBLAS refuses
    local_rank = _number(environment, "LOCAL_RANK", rank % local_size)
    device = pick_device(settings.train.device, local_rank, local_size)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        check_memory(settings, local_size, device_memory(device) * local_size, size)
    if device.type == "npu" and settings.context_parallel_suite.npu_profile is not None:
        check_npu_profile(settings.context_parallel_suite.npu_profile)
    torch.set_num_threads(settings.train.threads_per_rank or max(1, usable_cores() // local_size))
    timeout = timedelta(seconds=settings.context_parallel_suite.timeout_seconds)
    suite = settings.context_parallel_suite
    library = COLLECTIVE_LIBRARIES.get(device.type, "gloo")
    options = suite.hccl_options if library == "hccl" else {}
    if library == "hccl" and suite.context_parallel_size > 1 and suite.uses_batched_launches:
        problem = batched_launches_problem(cann_version(), settings.train.virtual_pipeline_model_parallel_size)
        if problem is not None:
            raise ConfigError(
                f"context_parallel_suite.p2p_groups is {suite.p2p_groups!r}, algorithm {suite.algorithm!r}: {problem}"
            )
    joining = max(timeout, timedelta(seconds=JOIN_SECONDS))
    store = open_store(environment, rank, size, local_size, joining)
    _init_process_group(store, rank, size, device, timeout, library, options)
    with ExitStack() as stack:
        stack.enter_context(without_pickles_between_ranks())
        if device.type == "cpu":
            stack.callback(dist.destroy_process_group)
        else:
            stack.push(_destroy_groups)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(megatron_on(device))
        train, cp = settings.train, suite.context_parallel_size
        with megatron_groups_with(timeout, library, options):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=train.tensor_model_parallel_size,
                pipeline_model_parallel_size=train.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=(
                    train.virtual_pipeline_model_parallel_size
                    if train.virtual_pipeline_model_parallel_size > 1
                    else None
                ),
                context_parallel_size=cp,
                expert_model_parallel_size=train.expert_model_parallel_size,
                expert_tensor_parallel_size=EXPERT_TENSOR_PARALLEL if settings.model.num_moe_experts else None,
            )
            if subpools is not None:
                stages, tensor = train.pipeline_model_parallel_size, train.tensor_model_parallel_size
                pool_groups = open_pool_groups(rank, size, stages, subpools.count, tensor, train.sequence_parallel)
        if device.type != "cpu" and cp > 1 and suite.uses_directional_groups:
            open_directional_groups(parallel_state.get_context_parallel_group(), device, timeout)
        yield World(
            rank=rank,
            size=size,
            device=device,
            replicas=replicas,
            replica=parallel_state.get_data_parallel_rank(),
            cp_size=cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            local_size=local_size,
            tp_size=train.tensor_model_parallel_size,
            store=store,
            stages=train.pipeline_model_parallel_size,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            pool=pool,
            node=_gather_node_ranks(rank, local_rank, local_size, size),
            subpools=subpools,
            pool_groups=pool_groups,
        )


def _init_process_group(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta,
    library: str,
    options: Mapping[str, int],
) -> None:
    """Make the group of all ranks."""
    if library == "hccl":
        set_hccl_timeouts(timeout.total_seconds())
        if "buffer_mb" in options:
            os.environ.setdefault(PAIR_BUFFER_VARIABLE, str(options["buffer_mb"]))
    libraries = library if device.type == "cpu" else f"cpu:gloo,{device.type}:{library}"
    group_options = process_group_options(library, options)
    dist.init_process_group(
        libraries, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=group_options
    )


def _destroy_groups(kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
    """Destroy all groups of a device, unless a peer is lost: its library may wait for it, and the process ends."""
    if isinstance(error, PeerError):
        return
    try:
        dist.destroy_process_group()
    except RuntimeError:
        if error is None:  # else the first error is the cause
            raise


def _gather_node_ranks(rank: int, local_rank: int, local_size: int, size: int) -> NodeRanks | None:
    """Return the ranks of this machine; a collective of all ranks.

    Returns:
        None where the launcher does not number the ranks of a machine one after the other.
    """
    own = torch.tensor(rank_row(rank, local_rank, local_size, usable_cores()))
    table = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(table, own)
    return node_ranks({other: row.tolist() for other, row in enumerate(table)}, rank, size)


def unused_accelerator(device: torch.device) -> str | None:
    """Return an accelerator of this machine that train.device leaves unused, and how to use it; or None."""
    if device.type == "cpu" and torch.cuda.is_available():
        return "this machine has a CUDA device, which is not used; train.device: cuda uses it"
    return None


def _read_rank_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, ranks, and ranks on this machine; raise ConfigError if the ranks can never meet."""
    rank, size, local_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if rank >= size:
        raise ConfigError(f"RANK = {rank} in the environment: must be less than WORLD_SIZE = {size}")
    if local_size < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE = {local_size} in the environment: must be at least 1")
    if STORE_VARIABLE in environment and size == local_size:
        return rank, size, local_size
    if not environment.get("MASTER_ADDR"):
        raise ConfigError(
            "MASTER_ADDR is not in the environment, though RANK is: the ranks need the first one's host name; start "
            "them with torchrun, or unset RANK and WORLD_SIZE to have the ranks of this machine started"
        )
    _number(environment, "MASTER_PORT")
    return rank, size, local_size


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name == "LOCAL_WORLD_SIZE":
        default = 1
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(
            f"{name} = {text!r} in the environment: a launcher such as torchrun sets it to a whole number"
        )
    return int(text)
