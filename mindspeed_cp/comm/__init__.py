"""Moves bytes between ranks, on HCCL, NCCL and gloo."""

from mindspeed_cp.comm.move import Move, move_of, start_moves
from mindspeed_cp.comm.transport import DEFAULT_TIMEOUT, Pending, Transfer, Transport, group_rank, group_size, staging

__all__ = [
    "DEFAULT_TIMEOUT",
    "Move",
    "Pending",
    "Transfer",
    "Transport",
    "group_rank",
    "group_size",
    "move_of",
    "staging",
    "start_moves",
]
