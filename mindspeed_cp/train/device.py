"""The device that a rank trains on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mindspeed_cp.device.select import cann_problem, cann_version, load_npu, resolve_device_type
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    import torch


def pick_device(name: str, local_rank: int, local_ranks: int) -> torch.device:
    """Return the device of a rank; an NPU becomes the current device of this process.

    Args:
        name: train.device.
        local_rank: number of the rank on its machine.
        local_ranks: ranks on this machine.

    Raises:
        ConfigError: the NPU that was requested or found cannot be used, or CANN is too old; names cause and remedy.
    """
    import torch

    if resolve_device_type(name) == "cpu":
        return torch.device("cpu")
    npu = load_npu(f"train.device = {name}")
    problem = cann_problem(cann_version())
    if problem is not None:
        raise ConfigError(f"train.device = {name}: {problem}, or train.device: cpu")
    count = npu.device_count()
    if local_ranks > count:
        hidden = bool(os.environ.get("ASCEND_RT_VISIBLE_DEVICES"))
        visible = "; ASCEND_RT_VISIBLE_DEVICES hides the others" * hidden
        raise ConfigError(
            f"train.device = {name}: {local_ranks} ranks on this machine, which has {count} NPUs{visible}; start "
            f"at most {count} ranks on it, or use more machines"
        )
    device = torch.device("npu", local_rank)
    npu.set_device(device)
    return device


def npu_memory(device: torch.device) -> int:
    """Return the bytes of an NPU's memory."""
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]
    return int(npu.get_device_properties(device).total_memory)
