"""Where a rank stands: its process groups and its place in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_cp.comm import open_lanes
from mindspeed_cp.comm.lanes import PAIR_BUFFER, group_options
from mindspeed_cp.config import Settings
from mindspeed_cp.config_checks import data_parallel_size
from mindspeed_cp.config_variants import variants
from mindspeed_cp.devices import hccl_time_outs
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.megatron import megatron_imports, megatron_on
from mindspeed_cp.ops.host_memory import keep_freed_memory
from mindspeed_cp.train.device import memory_of, pick_device
from mindspeed_cp.train.groups import groups_with
from mindspeed_cp.train.memory import check_memory

with megatron_imports():
    from megatron.core import parallel_state

EXPERT_TENSOR_PARALLEL = 1  # an expert is never cut: its ranks would gather unequal numbers of tokens, and gloo cannot
LIBRARIES = {"npu": "hccl"}  # that carry bytes between devices
JOIN_SECONDS = 300.0  # until every rank has to be there; ranks import Megatron before they join


@dataclass(frozen=True)
class World:
    """One rank among all of them.

    Attributes:
        rank, size: of all ranks.
        device: where this rank computes.
        replicas, replica: data-parallel ranks, and which of them this is.
        cp, cp_rank: context-parallel ranks, and which of them this is.
        tp: tensor-parallel ranks; ranks with the same rank // tp hold the same tokens.
        store: the key-value store through which the ranks found each other.
    """

    rank: int
    size: int
    device: torch.device
    replicas: int
    replica: int
    cp: int
    cp_rank: int
    tp: int
    store: dist.Store

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The context-parallel ranks."""
        return parallel_state.get_context_parallel_group()

    @property
    def is_first(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """The numbers of every rank, fp64 [size, numbers]; every rank must call it with as many."""
        own = torch.tensor(values, dtype=torch.float64)
        out = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(out, own)
        return torch.stack(out)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([0.0])


def check_nodes(settings: Settings, local_size: int, size: int) -> None:
    """ConfigError where the settings put more ranks on a node than were started on this machine, and the algorithm
    decides by what is on a node."""
    suite, tp = settings.context_parallel_suite, settings.train.tensor_model_parallel_size
    here = suite.topology.ranks_per_node * tp
    placed = any(one.context_parallel_suite.algorithm == "hierarchical" for one in variants(settings))
    if placed and here > local_size and size > local_size:
        nodes = -(-suite.context_parallel_size * tp // local_size)
        raise ConfigError(
            f"context_parallel_suite.nodes = {suite.nodes}: puts {here} ranks on a node, but {local_size} were started "
            f"on this machine; valid: nodes = {nodes}, or start as many on each"
        )


@contextmanager
def join(settings: Settings, environment: Mapping[str, str] | None = None) -> Iterator[World]:
    """Join the other ranks, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, take this rank's device, on which
    Megatron then runs whatever it asks of CUDA, and make Megatron's process groups.

    Raises:
        ConfigError: the number of ranks does not fit the settings, they do not fit into this machine's memory, the
            device cannot be used, or the environment is not that of a launcher.
    """
    environment = os.environ if environment is None else environment
    rank, size, local_size = _place(environment)
    replicas = data_parallel_size(settings, size)
    check_nodes(settings, local_size, size)
    check_memory(settings, local_size, ranks=size)
    device = pick_device(settings.train.device, _number(environment, "LOCAL_RANK", rank % local_size), local_size)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        check_memory(settings, local_size, memory_of(device) * local_size, size)
    torch.set_num_threads(settings.train.threads_per_rank or max(1, _cores() // local_size))
    timeout = timedelta(seconds=settings.context_parallel_suite.timeout_seconds)
    joining = max(timeout, timedelta(seconds=JOIN_SECONDS))
    store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=joining))
    # torchrun may start ranks again over the same store, where their first attempt's addresses still are.
    store = dist.PrefixStore(f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    libraries = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{LIBRARIES[device.type]}"
    suite = settings.context_parallel_suite
    library = LIBRARIES.get(device.type, "gloo")
    options = suite.group_options if library == "hccl" else {}
    made = group_options(library, options)
    if library == "hccl":
        hccl_time_outs(timeout.total_seconds())
        if "buffer_mb" in options:
            os.environ.setdefault(PAIR_BUFFER, str(options["buffer_mb"]))
    dist.init_process_group(libraries, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=made)
    with ExitStack() as stack:
        if device.type == "cpu":
            stack.callback(dist.destroy_process_group)
        else:
            stack.push(_destroy_groups)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(megatron_on(device))
        train, cp = settings.train, suite.context_parallel_size
        with groups_with(timeout, library, options):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=train.tensor_model_parallel_size,
                context_parallel_size=cp,
                expert_model_parallel_size=train.expert_model_parallel_size,
                expert_tensor_parallel_size=EXPERT_TENSOR_PARALLEL if settings.model.num_moe_experts else None,
            )
        if device.type != "cpu" and cp > 1 and suite.uses_lanes:
            open_lanes(parallel_state.get_context_parallel_group(), device, timeout)
        yield World(
            rank=rank,
            size=size,
            device=device,
            replicas=replicas,
            replica=parallel_state.get_data_parallel_rank(),
            cp=cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            tp=train.tensor_model_parallel_size,
            store=store,
        )


def _destroy_groups(kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
    """Destroy all groups of a device. Those with a lost peer are left: the process ends, and HCCL may wait for it."""
    if isinstance(error, PeerError):
        return
    try:
        dist.destroy_process_group()
    except RuntimeError:
        if error is None:  # else what came first is the cause
            raise


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unused_device(device: torch.device) -> str | None:
    """An accelerator of this machine, on which this version does not train."""
    if device.type == "cpu" and torch.cuda.is_available():
        return "a CUDA device"
    return None


def _place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, ranks, and ranks on this machine.  ConfigError if the ranks could never meet."""
    rank, size, local_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if rank >= size:
        raise ConfigError(f"RANK = {rank} in the environment: must be less than WORLD_SIZE = {size}")
    if local_size < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE = {local_size} in the environment: must be at least 1")
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
