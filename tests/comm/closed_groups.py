"""Closes directional groups, for tests that open several."""

import torch.distributed as dist

from mindspeed_cp.comm.directional_groups import OPEN_GROUPS


def close_directional_groups(group: dist.ProcessGroup | None = None) -> None:
    """Destroy the directional groups of a group, if any. Every rank of the group must call it.
    (destroy_process_group() without a group, at the end of a program, destroys them as well.)"""
    parent = group if group is not None else dist.group.WORLD
    directional = None if parent is None else OPEN_GROUPS.pop(parent, None)
    if directional is not None:
        dist.destroy_process_group(directional.to_higher)
        dist.destroy_process_group(directional.to_lower)
