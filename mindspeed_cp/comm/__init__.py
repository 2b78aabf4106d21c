"""Carries tensors between ranks, on HCCL, NCCL and gloo, or within one process."""

from mindspeed_cp.comm.directional_groups import open_directional_groups, warm_up
from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT
from mindspeed_cp.comm.groups import group_size, resolve_group

__all__ = ["DEFAULT_TIMEOUT", "group_size", "open_directional_groups", "resolve_group", "warm_up"]
