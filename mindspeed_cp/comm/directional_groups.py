"""Directional groups: two process groups over the ranks of a group, one for each direction of messages.

HCCL and NCCL give every pair of ranks one communicator per group in which they exchange messages, with one stream that
runs the messages in order. In a single group, a rank of a ring of two would first send and then receive. Directional
groups carry messages to higher ranks in one group and messages to lower ranks in the other. Each direction of each
pair then has its own stream, in rings of any size, odd sizes included, and no order of sends and receives blocks
another. (Groups chosen by even and odd ranks would put the two ends of an odd ring's closing edge into different
groups.)

Each pair and direction costs a communicator with its buffers, which pays off where a rank has few neighbors, as in
rings. Without directional groups, the messages of a step that are due at once are one launch in the group
itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_cp.comm.groups import comm_library, resolve_group
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Plan

#: Environment variable with the buffer size in MB of pairwise communicators; the only setting torch-npu reads for them.
PAIR_BUFFER_VARIABLE = "P2P_HCCL_BUFFSIZE"


@dataclass(frozen=True)
class DirectionalGroups:
    """The two groups.

    Attributes:
        to_higher: carries messages to a higher rank of the group.
        to_lower: carries messages to a lower rank.
    """

    to_higher: dist.ProcessGroup
    to_lower: dist.ProcessGroup

    def group_for(self, source: int, target: int) -> dist.ProcessGroup:
        """Return the group that carries messages from ``source`` to ``target``; the same at both ends."""
        return self.to_higher if source < target else self.to_lower


#: The directional groups of each group that has any.
OPEN_GROUPS: WeakKeyDictionary[dist.ProcessGroup, DirectionalGroups] = WeakKeyDictionary()


def open_directional_groups(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: timedelta | None = None,
) -> DirectionalGroups:
    """Create the directional groups of a group, once. Later transfers over the group use them.

    Every process of the default group must call it, with the group that the process belongs to: torch names groups by
    a counter that has to agree on all processes. (`use_local_synchronization`, which involves only the members, names
    a group by the number of groups a process is in; members for which this number differs never meet.)

    HCCL creates pairwise communicators for them. Group options (ProcessGroupHCCL.Options.hccl_config) do not apply to
    those: P2P_HCCL_BUFFSIZE sets their buffers in MB, HCCL_RDMA_TC and HCCL_RDMA_SL their class and level of service.

    Args:
        group: group of this process; None for the default group.
        device: device of the tensors to transfer; its library carries the groups.
        timeout: timeout of the new groups; None for torch's default.

    Raises:
        ConfigError: there is no group, this process is not in it, or P2P_HCCL_BUFFSIZE disables pairwise
            communicators.
    """
    parent = resolve_group(group)
    library = comm_library(parent, device)
    if library == "hccl":
        _check_pair_buffer(os.environ.get(PAIR_BUFFER_VARIABLE))
    own_ranks = tuple(dist.get_process_group_ranks(parent))
    all_ranks: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own_ranks if parent not in OPEN_GROUPS else ())
    for ranks in sorted(set(all_ranks) - {()}):
        to_higher, to_lower = (dist.new_group(list(ranks), timeout, library) for _ in range(2))
        if ranks == own_ranks:
            OPEN_GROUPS[parent] = DirectionalGroups(to_higher, to_lower)
    return OPEN_GROUPS[parent]


def _check_pair_buffer(text: str | None) -> None:
    """Refuse 0 and whatever torch-npu reads as 0: a pair would then use the communicator of the group, and wait for all
    of its ranks."""
    if text is not None and not re.fullmatch(r"\s*\+?0*[1-9][0-9]*\s*", text):
        raise ConfigError(
            f"{PAIR_BUFFER_VARIABLE} = {text!r} in the environment: directional groups need pairwise communicators, "
            "without which ranks would wait for ever; valid: 1 or more (MB; default: 20), or "
            "context_parallel_suite.p2p_groups: batched"
        )


def warm_up(plan: Plan, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
    """Create the communicators that a plan needs before the first step. Every rank of the group must call it.

    A sum over all ranks creates the communicator of the group (ranks without messages would miss the first coalesced
    launch), and one message per edge of the plan creates those of the directional groups. All ranks connect edges in
    the same order, so no two ranks wait for each other.

    Args:
        plan: a plan like those that will run, for the ranks of the group. Edges of later plans are connected when they
            first occur, in the same order (:class:`mindspeed_cp.comm.group_transport.GroupTransport`).
        group: None for the default group.
        device: device of the tensors to transfer.

    Raises:
        ConfigError: there is no group, this process is not in it, or the plan has another number of ranks.
    """
    parent = resolve_group(group)
    if plan.ranks != dist.get_world_size(parent):
        raise ConfigError(
            f"warm_up: the plan is for {plan.ranks} ranks, but the group has {dist.get_world_size(parent)}; build the "
            "plan for the group's size"
        )
    device = torch.device(device)
    dist.all_reduce(torch.ones(1, device=device), group=parent)
    directional = OPEN_GROUPS.get(parent)
    if directional is None:
        return
    rank, ranks = dist.get_rank(parent), dist.get_process_group_ranks(parent)
    token = torch.zeros(1, device=device)
    for source, target in connection_order(message_pairs(plan), len(ranks)):
        edge_group = directional.group_for(source, target)
        if rank == source:
            dist.send(token, ranks[target], edge_group)
        elif rank == target:
            dist.recv(token, ranks[source], edge_group)


def message_pairs(plan: Plan) -> set[tuple[int, int]]:
    """Return (source, target) of all messages of a plan's programs, forward and backward."""
    pairs: set[tuple[int, int]] = set()
    for program in (program for part in plan.parts_or_self for program in (part.forward, part.backward)):
        for messages in (program.fetch, program.reduce):
            ends = np.unique(messages.items[["src", "dst"]])
            pairs.update(zip(ends["src"].tolist(), ends["dst"].tolist(), strict=True))
    return pairs


def connection_order(pairs: Iterable[tuple[int, int]], ranks: int) -> list[tuple[int, int]]:
    """Sort edges into the order in which to connect them: by distance, and every second edge of a distance first, so
    that many pairs connect at a time."""

    def key(pair: tuple[int, int]) -> tuple[int, int, int]:
        distance = (pair[1] - pair[0]) % ranks
        return distance, pair[0] // max(distance, 1) % 2, pair[0]

    return sorted(pairs, key=key)
