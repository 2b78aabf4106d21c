"""Moves bytes between ranks, on HCCL, NCCL and gloo."""

from mindspeed_cp.comm.transport import DEFAULT_TIMEOUT, Pending, Transfer, Transport, group_rank, group_size, staging

__all__ = ["DEFAULT_TIMEOUT", "Pending", "Transfer", "Transport", "group_rank", "group_size", "staging"]
