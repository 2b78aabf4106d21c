"""A rank among all: how it meets the others, its device, its process groups, and its numbers in them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.comm.directional_groups import PAIR_BUFFER_VARIABLE, open_directional_groups
from mindspeed_cp.comm.groups import process_group_options
from mindspeed_cp.config.rules import data_parallel_size, pool_topology
from mindspeed_cp.config.sections import POOL
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device.open_files import check_open_files
from mindspeed_cp.device.select import (
    cann_problem,
    cann_version,
    load_cuda,
    load_npu,
    resolve_device_type,
    set_hccl_timeouts,
)
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.megatron import megatron_imports, megatron_on
from mindspeed_cp.megatron.patches.compat import replaced
from mindspeed_cp.ops.attention.backends import check_npu_profile
from mindspeed_cp.plan import Topology
from mindspeed_cp.train.failures import is_lost_rank_error

with megatron_imports():
    from megatron.core import parallel_state

EXPERT_TENSOR_PARALLEL = 1  # an expert is never cut: its ranks would gather unequal numbers of tokens, and gloo cannot
JOIN_SECONDS = 300.0  # until every rank has to be there; ranks import Megatron before they join
#: Library that carries bytes between devices of a type; the CPU's is gloo.
COLLECTIVE_LIBRARIES = {"npu": "hccl", "cuda": "nccl"}
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class World:
    """One rank among all ranks.

    Attributes:
        settings: settings of the run.
        rank, size: its number, and the number of all ranks.
        device: its device.
        replicas, replica: number of data-parallel replicas, and its replica.
        cp_size, cp_rank: number of context-parallel ranks, and its number among them.
        tp_size: number of tensor-parallel ranks; ranks with the same rank // tp_size hold the same tokens.
        pool: context-parallel ranks of all replicas, numbered replica by replica, which may share plans; None without
            data.balance: pool.
        store: the key-value store through which the ranks found each other.
    """

    settings: Settings
    rank: int
    size: int
    device: torch.device
    replicas: int
    replica: int
    cp_size: int
    cp_rank: int
    tp_size: int
    store: dist.Store
    pool: Topology | None = None

    def plan_ranks(self, pooled: bool) -> tuple[Topology, int]:
        """Return the ranks of a step's plans, on the pool or on replicas, and the number of this one among them."""
        if not pooled:
            return self.settings.context_parallel_suite.topology, self.cp_rank
        assert self.pool is not None
        return self.pool, self.replica * self.cp_size + self.cp_rank

    def plan_group(self, pooled: bool) -> dist.ProcessGroup:
        """Return the process group of the ranks of the plans of a step, on the pool or on replicas."""
        if pooled:
            return parallel_state.get_data_parallel_group(with_context_parallel=True)
        return parallel_state.get_context_parallel_group()

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

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks; every rank must call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([0.0])


def check_nodes(settings: Settings, local_size: int, size: int) -> None:
    """Raise ConfigError if the settings put more ranks on a node than were started on this machine and the algorithm
    depends on nodes."""
    suite, tp = settings.context_parallel_suite, settings.train.tensor_model_parallel_size
    node_size = suite.topology.ranks_per_node * tp
    if suite.algorithm == "hierarchical" and min(node_size, size) > local_size:
        nodes = -(-suite.context_parallel_size * tp // local_size)
        raise ConfigError(
            f"context_parallel_suite.nodes = {suite.nodes}: puts {node_size} ranks on a node, but {local_size} were "
            f"started on this machine; valid: nodes = {nodes}, or start as many on each"
        )


@contextmanager
def join_ranks(
    settings: Settings, environment: Mapping[str, str] | None = None, store_file: Path | None = None
) -> Iterator[World]:
    """Join the other ranks, redirect CUDA to this rank's device, and make Megatron's process groups.

    Args:
        settings: settings of the run.
        environment: RANK, WORLD_SIZE and so on, as torchrun sets them; default: that of this process.
        store_file: file through which the ranks of one machine meet; None: by MASTER_ADDR and MASTER_PORT (env://).

    Raises:
        ConfigError: the number of ranks does not fit the settings, the device cannot be used, or the environment is not
            that of a launcher.
        PeerError: not all ranks came.
    """
    environment = os.environ if environment is None else environment
    rank, size, local_size, local_rank = _read_ranks(environment)
    train, suite = settings.train, settings.context_parallel_suite
    replicas = data_parallel_size(settings, size)
    check_nodes(settings, local_size, size)
    pool = None
    if settings.data.balance == POOL:
        pool = pool_topology(suite, replicas, min(local_size, size), train.tensor_model_parallel_size)
    check_open_files(size)
    if train.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is opened; else cuBLAS refuses
    device = pick_device(train.device, local_rank, local_size)
    if device.type == "npu" and suite.npu_profile is not None:
        check_npu_profile(suite.npu_profile)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(train.threads_per_rank or max(1, cores // local_size))
    timeout = timedelta(seconds=suite.timeout_seconds)
    library = COLLECTIVE_LIBRARIES.get(device.type, "gloo")
    options = suite.hccl_options if library == "hccl" else {}
    cp = suite.context_parallel_size
    if library == "hccl":
        set_hccl_timeouts(timeout.total_seconds())
        if "buffer_mb" in options:
            os.environ.setdefault(PAIR_BUFFER_VARIABLE, str(options["buffer_mb"]))
    libraries = library if device.type == "cpu" else f"cpu:gloo,{device.type}:{library}"
    group_options = process_group_options(library, options)
    store = _meet(timeout, environment, store_file, rank, size, backend=libraries, pg_options=group_options)
    with ExitStack() as stack:
        if device.type == "cpu":
            stack.callback(dist.destroy_process_group)
        else:
            stack.push(_destroy_groups)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(megatron_on(device))
        with megatron_groups_with(timeout, library, options):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=train.tensor_model_parallel_size,
                context_parallel_size=cp,
                expert_model_parallel_size=train.expert_model_parallel_size,
                expert_tensor_parallel_size=EXPERT_TENSOR_PARALLEL if settings.model.num_moe_experts else None,
            )
        if device.type != "cpu" and cp > 1 and suite.uses_directional_groups:
            open_directional_groups(parallel_state.get_context_parallel_group(), device, timeout)
        yield World(
            settings=settings,
            rank=rank,
            size=size,
            device=device,
            replicas=replicas,
            replica=parallel_state.get_data_parallel_rank(),
            cp_size=cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            tp_size=train.tensor_model_parallel_size,
            store=store,
            pool=pool,
        )


def _meet(
    timeout: timedelta, environment: Mapping[str, str], store_file: Path | None, rank: int, size: int, **options: Any
) -> dist.Store:
    """Make the group of all ranks, and return the store through which they met.

    Raises:
        ConfigError: there is no address to meet at, or rank 0 cannot listen there.
        PeerError: the others cannot be reached, or did not come.
    """
    joining = max(timeout, timedelta(seconds=JOIN_SECONDS))
    place, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if store_file is None and (not place or not port.isdigit()):
        raise ConfigError(
            f"MASTER_ADDR = {place!r}, MASTER_PORT = {port!r} in the environment: the ranks need the first one's "
            "host name and a port; start them with torchrun, or unset RANK and WORLD_SIZE to have the ranks of this "
            "machine started"
        )
    try:
        if store_file is not None:
            store: dist.Store = dist.FileStore(str(store_file), size)
        else:
            if rank and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                _wait_for_rank_0(place, int(port), joining.total_seconds())
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=joining))
            # torchrun may restart ranks over the same store, which still has the addresses of their first attempt.
            store = dist.PrefixStore(f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set_timeout(joining)
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=timeout, **options)
    except (dist.DistError, RuntimeError, OSError) as error:
        text = " ".join(str(error).split())
        if not (isinstance(error, (dist.DistError, OSError)) or is_lost_rank_error(error) or "socket" in text.lower()):
            raise
        where = "on this machine" if store_file is not None else f"at {place}:{port}"
        if "EADDRINUSE" in text or "already in use" in text:
            raise ConfigError(f"{where}: another program listens on MASTER_PORT; give one that is free") from None
        raise PeerError(
            f"rank {rank} did not meet the other {size - 1} ranks {where} within {joining.total_seconds():g} s; are "
            f"all started, with the same WORLD_SIZE, and is it the address of rank 0? ({text[:200]})"
        ) from None
    return store


def _wait_for_rank_0(name: str, port: int, seconds: float) -> None:
    """Wait until somebody listens there, as torch does, which prints its stack where nobody comes.

    Raises:
        ConfigError: nobody knows the name.
        OSError: nobody listens within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((name, port), max(1.0, deadline - time.monotonic())).close()
            return
        except socket.gaierror as error:
            text = f"MASTER_ADDR = {name}: cannot be found ({error.strerror}); give the address of rank 0 itself"
            raise ConfigError(text) from None
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _destroy_groups(kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
    """Destroy all groups of a device, unless a peer is lost: its library may wait for it, and the process ends."""
    if isinstance(error, PeerError):
        return
    try:
        dist.destroy_process_group()
    except RuntimeError:
        if error is None:  # else the first error is the cause
            raise


@contextmanager
def megatron_groups_with(timeout: timedelta, library: str, options: Mapping[str, int]) -> Iterator[None]:
    """Give all of Megatron's groups within the block this time-out, where it leaves some at 30 minutes, and those on
    devices these options, as for process_group_options; its own options of a group are NCCL's."""
    create = parallel_state.create_group

    def create_with_options(*arguments: Any, **named: Any) -> Any:
        named["timeout"] = timeout
        if options and named.get("backend") != "gloo":
            # New options for each group, as torch writes the name of the group into them.
            named["pg_options"] = process_group_options(library, options)
        return create(*arguments, **named)

    with replaced(parallel_state, "create_group", create_with_options):
        yield


def pick_device(name: str, local_rank: int, local_ranks: int) -> torch.device:
    """Return the device of a rank; an NPU or a GPU becomes the current device of this process.

    Args:
        name: train.device.
        local_rank: number of the rank on its machine.
        local_ranks: ranks on this machine.

    Raises:
        ConfigError: the device that was requested or found cannot be used, or CANN is too old; names cause and remedy.
    """
    kind, setting = resolve_device_type(name), f"train.device = {name}"
    if kind == "cpu":
        return torch.device("cpu")
    module: Any
    if kind == "npu":
        module = load_npu(setting)
        problem = cann_problem(cann_version())
        if problem is not None:
            raise ConfigError(f"{setting}: {problem}, or train.device: cpu")
    else:
        module = load_cuda(setting)
    count = module.device_count()
    if local_ranks > count:
        visible = f"; {_VISIBLE[kind]} hides the others" * bool(os.environ.get(_VISIBLE[kind]))
        raise ConfigError(
            f"{setting}: {local_ranks} ranks on this machine, which has {count} {'NPUs' if kind == 'npu' else 'GPUs'}"
            f"{visible}; start at most {count} ranks on it, or use more machines"
        )
    device = torch.device(kind, local_rank)
    module.set_device(device)
    return device


def _read_ranks(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return rank, ranks, ranks on this machine, and the number among these."""
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        if not 0 <= rank < size or local_size < 1:
            raise ValueError
        return rank, size, local_size, int(environment.get("LOCAL_RANK", rank % local_size))
    except (KeyError, ValueError):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = ", ".join(f"{name} = {environment.get(name)}" for name in names)
        raise ConfigError(
            f"{given} in the environment: a launcher such as torchrun sets them, RANK below WORLD_SIZE; unset them to "
            "have the ranks of this machine started"
        ) from None
