"""Moves bytes between ranks, on HCCL, NCCL and gloo."""

from mindspeed_cp.comm.lanes import Lanes, close_lanes, existing_group, lanes_of, library_of, open_lanes, warm_up
from mindspeed_cp.comm.move import Move, Rows, move_of, rows_at, start_moves
from mindspeed_cp.comm.transport import (
    DEFAULT_TIMEOUT,
    Pending,
    Transfer,
    Transport,
    checked_timeout,
    group_rank,
    group_size,
    staging,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "Lanes",
    "Move",
    "Pending",
    "Rows",
    "Transfer",
    "Transport",
    "checked_timeout",
    "close_lanes",
    "existing_group",
    "group_rank",
    "group_size",
    "lanes_of",
    "library_of",
    "move_of",
    "open_lanes",
    "rows_at",
    "staging",
    "start_moves",
    "warm_up",
]
