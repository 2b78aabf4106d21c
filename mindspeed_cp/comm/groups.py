"""Process groups: their size and rank, the communication library behind them, and options for new ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.device.npu_errors import TOO_MANY_FILES
from mindspeed_cp.errors import ConfigError

#: Options of a group that HCCL accepts, and their names in ProcessGroupHCCL.Options.hccl_config. They apply to the
#: communicators of whole groups, which coalesced launches use, but not to the pairwise communicators that isend and
#: irecv create: directional groups are not affected.
HCCL_GROUP_OPTIONS = {
    "buffer_mb": "hccl_buffer_size",
    "traffic_class": "qos_traffic_class",
    "service_level": "qos_service_level",
}


def group_size(group: dist.ProcessGroup | None, caller: str | None = None, ranks: int | None = None) -> int:
    """Return the number of ranks of a group; 1 if torch.distributed is not initialized and no group is given; -1 if
    this process is not in the group.

    Args:
        group: a group, or None for all processes.
        caller: name of a function that only ranks of the group may call.
        ranks: number of ranks of a plan, which the group must have.

    Raises:
        ConfigError: the argument is not a group; or, with a caller, this process is not in it, or it has another size.
    """
    # NON_GROUP_MEMBER is what new_group returns to a process outside the group.
    if not (group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise ConfigError(f"group is {group!r}; valid: a torch.distributed.ProcessGroup, or None for all processes")
    size = 1 if _is_single_process(group) else dist.get_world_size(group)
    if caller is not None and size < 0:
        raise ConfigError(f"this process is not in the group; only the group's own ranks call {caller}")
    if ranks is not None and size != ranks:
        raise ConfigError(
            f"the plan is for {ranks} ranks, but the group has {size}; build the plan for the group's size"
        )
    return size


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return the rank of this process in a group; 0 if torch.distributed is not initialized and no group is given."""
    return 0 if _is_single_process(group) else dist.get_rank(group)


def _is_single_process(group: object) -> bool:
    return group is None and not (dist.is_available() and dist.is_initialized())


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the default group for None.

    Raises:
        ConfigError: there is no group, or this process is not in it.
    """
    resolved = group if group is not None else dist.group.WORLD
    if resolved is None:
        raise ConfigError("torch.distributed is not initialised; call init_process_group first, or give a group")
    if not isinstance(resolved, dist.ProcessGroup):
        raise ConfigError(
            f"group is {resolved!r}; valid: a torch.distributed.ProcessGroup that this process is in, or None for all "
            "processes"
        )
    return resolved


def comm_library(group: dist.ProcessGroup, device: torch.device | str) -> str:
    """Return the library that carries a device's tensors in a group: "gloo", "hccl" or "nccl". (dist.get_backend
    returns "undefined" or "cpu:gloo" for groups that serve several kinds of device.)"""
    return group._get_backend(torch.device(device)).name().lower()


def failure_reason(error: RuntimeError, limit: float) -> str:
    """Return why gloo failed: no answer, with the seconds that it says it waited (a group's own time-out may be
    shorter than that of a call), too many open files, or a connection that failed.

    Args:
        error: gloo's error.
        limit: seconds that the call would have waited.
    """
    text = " ".join(str(error).split())
    if "too many open files" in text.lower():
        return f"{TOO_MANY_FILES} ({text[:160]})"
    if "timed out" in text.lower() or "timeout" in text.lower():
        waited = re.search(r"(\d+) ?ms\b", text)
        return f"no answer within {int(waited[1]) / 1000 if waited else limit:g} s"
    return f"the connection failed ({text[:160]})"


def has_library(group: dist.ProcessGroup, device: torch.device | str) -> bool:
    """Return True if a group carries a device's tensors."""
    try:
        comm_library(group, device)
    except RuntimeError:
        return False
    return True


def process_group_options(library: str, options: Mapping[str, int] | None) -> Any:
    """Return ProcessGroupHCCL.Options for new groups, or None without options.

    Raises:
        ConfigError: an option is unknown, or the library is not HCCL.
    """
    if not options:
        return None
    for name in options:
        if name not in HCCL_GROUP_OPTIONS:
            raise ConfigError(f"group option {name!r}: unknown; valid: {', '.join(HCCL_GROUP_OPTIONS)}")
    if library != "hccl":
        raise ConfigError(
            f"group options {', '.join(options)}: are HCCL's, and this group is {library}; leave them out"
        )
    import torch_npu

    hccl_options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    hccl_options.hccl_config = {HCCL_GROUP_OPTIONS[name]: value for name, value in options.items()}
    return hccl_options
