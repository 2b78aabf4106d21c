"""The device that a rank trains on, and one line for whatever keeps it from being used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from typing import TYPE_CHECKING, Any

from mindspeed_cp.devices import device_type
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    import torch

_REMEDY = "install CANN for this driver and `source .../ascend-toolkit/set_env.sh`"


def pick_device(name: str, local_rank: int, local_ranks: int) -> torch.device:
    """The device of a rank; an NPU becomes this process's current one.

    Args:
        name: train.device.
        local_rank: number of the rank on its machine.
        local_ranks: ranks on this machine.

    Raises:
        ConfigError: the NPU was asked for, or found, and cannot be used; names the cause and the remedy.
    """
    import torch

    if device_type(name) == "cpu":
        return torch.device("cpu")
    npu = load_npu(f"train.device = {name}")
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


def load_npu(setting: str = "device npu", instead: str = "train.device: cpu") -> Any:
    """torch.npu, after importing torch_npu.

    Args:
        setting: what asks for it, for the error.
        instead: what to give instead of it.

    Raises:
        ConfigError: torch_npu is not installed, is not the one for this torch, or its libraries are missing.
    """
    import torch

    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            f"{setting}: torch_npu is not installed; pip install torch-npu=={_release(torch.__version__)}, or {instead}"
        )
    theirs, ours = importlib.metadata.version("torch-npu"), torch.__version__
    if _release(theirs) != _release(ours):
        raise ConfigError(
            f"{setting}: torch_npu is {theirs} and torch is {ours}; they must be of one release: pip install "
            f"torch-npu=={_release(ours)}"
        )
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{setting}: torch_npu cannot be loaded ({why_not(error)}); {_REMEDY}, or {instead}"
        ) from None
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        raise ConfigError(
            f"{setting}: torch_npu finds no NPU; check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES, or {instead}"
        )
    return npu


def memory_of(device: torch.device) -> int:
    """Bytes of an NPU's memory."""
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]
    return int(npu.get_device_properties(device).total_memory)


def why_not(error: BaseException) -> str:
    """What keeps torch_npu from loading, in one line: mostly a library of CANN."""
    text = " ".join(str(error).split())
    library = re.search(r"(lib\w+\.so[.\d]*): cannot open shared object file", text)
    return f"{library[1]}, a library of CANN, is not found" if library else text[:200]


def _release(version: str) -> str:
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else version
