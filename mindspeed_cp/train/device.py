"""The device that a rank trains on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mindspeed_cp.device.select import cann_problem, cann_version, load_cuda, load_npu, resolve_device_type
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: Library that carries bytes between devices of a type; the CPU's is gloo.
COLLECTIVE_LIBRARIES = {"npu": "hccl", "cuda": "nccl"}
_PLURALS = {"npu": "NPUs", "cuda": "GPUs"}
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def pick_device(name: str, local_rank: int, local_ranks: int) -> torch.device:
    """Return the device of a rank; an NPU or a GPU becomes the current device of this process.

    Args:
        name: train.device.
        local_rank: number of the rank on its machine.
        local_ranks: ranks on this machine.

    Raises:
        ConfigError: the device that was requested or found cannot be used, or CANN is too old; names cause and remedy.
    """
    import torch

    kind, setting = resolve_device_type(name), f"train.device = {name}"
    if kind == "cpu":
        return torch.device("cpu")
    module: Any
    if kind == "npu":
        module = load_npu(setting)
        problem = cann_problem(cann_version())
        if problem is not None:
            raise ConfigError(f"{setting}: {problem}, or train.device: cpu")
    else:
        module = load_cuda(setting)
    count = module.device_count()
    if local_ranks > count:
        visible = f"; {_VISIBLE[kind]} hides the others" * bool(os.environ.get(_VISIBLE[kind]))
        raise ConfigError(
            f"{setting}: {local_ranks} ranks on this machine, which has {count} {_PLURALS[kind]}{visible}; start at "
            f"most {count} ranks on it, or use more machines"
        )
    device = torch.device(kind, local_rank)
    module.set_device(device)
    return device


def device_memory(device: torch.device) -> int:
    """Return the bytes of the memory of an NPU or a GPU."""
    import torch

    return int(torch.get_device_module(device).get_device_properties(device).total_memory)
