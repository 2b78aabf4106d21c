"""Carries tensors between ranks, on HCCL, NCCL and gloo, or within one process."""

from mindspeed_cp.comm.directional_groups import (
    DirectionalGroups,
    close_directional_groups,
    open_directional_groups,
    warm_up,
)
from mindspeed_cp.comm.group_transport import GroupTransport
from mindspeed_cp.comm.groups import comm_library, failure_reason, group_rank, group_size, has_library, resolve_group
from mindspeed_cp.comm.in_memory import InMemoryNetwork, InMemoryPending, InMemoryTransport
from mindspeed_cp.comm.redistribution import (
    RankRedistribution,
    RedistributionsInFlight,
    as_row_index,
    rank_redistribution,
    start_redistributions,
)
from mindspeed_cp.comm.transport import (
    DEFAULT_TIMEOUT,
    Pending,
    Transfer,
    Transport,
    checked_timeout,
    staging_buffer,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "DirectionalGroups",
    "GroupTransport",
    "InMemoryNetwork",
    "InMemoryPending",
    "InMemoryTransport",
    "Pending",
    "RankRedistribution",
    "RedistributionsInFlight",
    "Transfer",
    "Transport",
    "as_row_index",
    "checked_timeout",
    "close_directional_groups",
    "comm_library",
    "failure_reason",
    "group_rank",
    "group_size",
    "has_library",
    "open_directional_groups",
    "rank_redistribution",
    "resolve_group",
    "staging_buffer",
    "start_redistributions",
    "warm_up",
]
