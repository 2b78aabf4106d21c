"""Lanes: two more process groups over the ranks of a group, so that a rank's sends and receives run side by side.

HCCL and NCCL give a pair of ranks one communicator for each group in which it exchanges messages, with one stream that
runs them in order. On one group a rank of a ring of two would first send and then receive. With lanes messages to
higher ranks are in one group and those to lower ranks in another: each direction of each pair has a stream of its
own, in rings of any size, odd ones too, and no order of sends and receives can block another. (Lanes by even and odd
ranks would leave the closing edge of an odd ring with its two ends in different groups.)

Each pair and direction costs the library a communicator with its buffers: worth it where a rank has few neighbours, as
in rings. Without lanes all messages of a step are one launch in the group itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Plan

#: MB of the buffers of the communicators of one pair; all that torch-npu reads for them.
PAIR_BUFFER = "P2P_HCCL_BUFFSIZE"

#: What HCCL can be told about a group, and what each is called there. It reaches the communicators of whole groups, in
#: which coalesced launches run, and never those of one pair, which isend and irecv make: over lanes nothing of it.
GROUP_OPTIONS = {
    "buffer_mb": "hccl_buffer_size",
    "traffic_class": "qos_traffic_class",
    "service_level": "qos_service_level",
}


@dataclass(frozen=True)
class Lanes:
    """The two groups.

    Attributes:
        up: messages to a rank with a higher number in the group.
        down: the others.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def of(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages between two ranks, in that direction; both ends find the same."""
        return self.up if source < target else self.down


_open: WeakKeyDictionary[dist.ProcessGroup, Lanes] = WeakKeyDictionary()


def open_lanes(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: timedelta | None = None,
) -> Lanes:
    """Make the lanes of a group, once. Transfers over the group use them from then on.

    Every process of the default group calls it, with the group that it is in itself: torch names a group by its number,
    which all processes must count alike. (`use_local_synchronization`, which asks only the members, names a group by
    how many groups a process is in: members that differ in that never meet.)

    HCCL makes communicators of pairs for them. Options of a group (ProcessGroupHCCL.Options.hccl_config) never reach
    those: their buffers are P2P_HCCL_BUFFSIZE MB, and their class and level in the network HCCL_RDMA_TC and
    HCCL_RDMA_SL.

    Args:
        group: that this process is in; None for the default group.
        device: of the tensors that will travel: its library carries the lanes.
        timeout: of the new groups; None: torch's default.

    Raises:
        ConfigError: there is no group, this process is not in it, or P2P_HCCL_BUFFSIZE leaves HCCL without
            communicators of pairs.
    """
    world = existing_group(group)
    library = library_of(world, device)
    if library == "hccl":
        _check_pair_buffer(os.environ.get(PAIR_BUFFER))
    mine = tuple(dist.get_process_group_ranks(world))
    everybody: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everybody, mine if world not in _open else ())
    for ranks in sorted(set(everybody) - {()}):
        up, down = (dist.new_group(list(ranks), timeout, library) for _ in range(2))
        if ranks == mine:
            _open[world] = Lanes(up, down)
    return _open[world]


def _check_pair_buffer(text: str | None) -> None:
    """With 0, or what torch-npu reads as 0, a pair would use the group's communicator, for which all ranks must
    come."""
    if text is not None and not re.fullmatch(r"\s*\+?0*[1-9][0-9]*\s*", text):
        raise ConfigError(
            f"{PAIR_BUFFER} = {text!r} in the environment: lanes need communicators of pairs, and ranks would wait for "
            "ever without; valid: 1 or more (MB; 20 where it is not set), or context_parallel_suite.p2p: batched"
        )


def existing_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default group.

    Raises:
        ConfigError: there is none, or this process is not in it.
    """
    world = group if group is not None else dist.group.WORLD
    if world is None:
        raise ConfigError("torch.distributed is not initialised; call init_process_group first, or give a group")
    if not isinstance(world, dist.ProcessGroup):
        raise ConfigError(
            f"group is {world!r}; valid: a torch.distributed.ProcessGroup that this process is in, or None for all "
            "processes"
        )
    return world


def library_of(group: dist.ProcessGroup, device: torch.device | str) -> str:
    """The library of a group for tensors on a device: "gloo", "hccl", "nccl". (dist.get_backend says "undefined" or
    "cpu:gloo" for groups that serve several kinds of device.)"""
    return group._get_backend(torch.device(device)).name().lower()


def lanes_of(group: dist.ProcessGroup) -> Lanes | None:
    """The lanes of a group; None where none were opened."""
    return _open.get(group)


def close_lanes(group: dist.ProcessGroup | None = None) -> None:
    """Destroy the lanes of a group, if it has any; every rank of the group calls it. (destroy_process_group() without a
    group, at the end of a program, ends them too.)"""
    world = group if group is not None else dist.group.WORLD
    lanes = None if world is None else _open.pop(world, None)
    if lanes is not None:
        for one in (lanes.up, lanes.down):
            dist.destroy_process_group(one)


def group_options(library: str, options: Mapping[str, int] | None) -> Any:
    """ProcessGroupHCCL.Options for new groups; None where there are none to give."""
    if not options:
        return None
    for name in options:
        if name not in GROUP_OPTIONS:
            raise ConfigError(f"group option {name!r}: unknown; valid: {', '.join(GROUP_OPTIONS)}")
    if library != "hccl":
        raise ConfigError(
            f"group options {', '.join(options)}: are HCCL's, and this group is {library}; leave them out"
        )
    import torch_npu

    made = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    made.hccl_config = {GROUP_OPTIONS[name]: value for name, value in options.items()}
    return made


def warm_up(plan: Plan, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
    """Make the communicators that a plan needs, before the first step: every rank of the group calls it.

    The group's own is made by a sum over all ranks (in the first coalesced launch, ranks without messages would be
    missing), those of the lanes by a message over each edge of the plan. Edges come in one order on all ranks, so no
    two ranks wait for each other.

    Args:
        plan: any plan of the kind that will run, for the ranks of the group; edges that only later plans have are made
            when they come, in the same order (:class:`mindspeed_cp.comm.Transport`).
        group: None for the default group.
        device: of the tensors that will travel.

    Raises:
        ConfigError: there is no group, this process is not in it, or the plan is for another number of ranks.
    """
    world = existing_group(group)
    if plan.ranks != dist.get_world_size(world):
        raise ConfigError(
            f"warm_up: the plan is for {plan.ranks} ranks, but the group has {dist.get_world_size(world)}; build the "
            "plan for the group's size"
        )
    device = torch.device(device)
    dist.all_reduce(torch.ones(1, device=device), group=world)
    lanes = lanes_of(world)
    if lanes is None:
        return
    rank, ranks = dist.get_rank(world), dist.get_process_group_ranks(world)
    token = torch.zeros(1, device=device)
    for source, target in in_order(edges(plan), len(ranks)):
        lane = lanes.of(source, target)
        if rank == source:
            dist.send(token, ranks[target], lane)
        elif rank == target:
            dist.recv(token, ranks[source], lane)


def edges(plan: Plan) -> set[tuple[int, int]]:
    """(source, target) of all messages between steps, forward and backward."""
    found: set[tuple[int, int]] = set()
    for program in (program for piece in plan.pieces for program in (piece.forward, piece.backward)):
        for messages in (program.fetch, program.reduce):
            pairs = np.unique(messages.items[["src", "dst"]])
            found.update(zip(pairs["src"].tolist(), pairs["dst"].tolist(), strict=True))
    return found


def in_order(pairs: Iterable[tuple[int, int]], ranks: int) -> list[tuple[int, int]]:
    """Edges in the order to connect them: by distance, and of one distance every second first, so that many pairs
    connect at a time."""

    def key(pair: tuple[int, int]) -> tuple[int, int, int]:
        distance = (pair[1] - pair[0]) % ranks
        return distance, pair[0] // max(distance, 1) % 2, pair[0]

    return sorted(pairs, key=key)
