"""Which device a setting means, and torch_npu: loaded here alone, with one line for whatever keeps it from being used.

Importing this module imports nothing; `torch` and `torch_npu` are imported by the functions that need them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from typing import Any

from mindspeed_cp.errors import ConfigError

#: The oldest CANN (major, minor) that torch-npu 2.13 is used with here. The README in its wheel pairs torch-npu 2.9.0
#: to 2.12.0rc1 with CANN 8.5.0, and nothing above 2.8.0 with an older one; it has no line for 2.13 itself.
LEAST_CANN = (8, 5)

_REMEDY = "install CANN for this driver and `source .../ascend-toolkit/set_env.sh`"


def device_type(name: str) -> str:
    """ "cpu" or "npu", of train.device: "auto" is the NPU where torch_npu is installed."""
    if name != "auto":
        return name
    return "cpu" if importlib.util.find_spec("torch_npu") is None else "npu"


def load_torch_npu(setting: str, instead: str) -> Any:
    """The package torch_npu, which must be the one for this torch.

    Args:
        setting: what asks for it, for the error.
        instead: what to give instead of it.

    Raises:
        ConfigError: torch_npu is not installed, is not the one for this torch, or its libraries are missing.
    """
    import torch

    ours = torch.__version__
    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            f"{setting}: torch_npu is not installed; pip install torch-npu=={_release(ours)}, or {instead}"
        )
    try:
        theirs = importlib.metadata.version("torch-npu")
    except importlib.metadata.PackageNotFoundError:  # a source tree, or an installation without its metadata
        theirs = None
    if theirs is not None:
        _check_release(setting, theirs, ours)
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{setting}: torch_npu cannot be loaded ({_why_not(error)}); {_REMEDY}, or {instead}"
        ) from None
    if theirs is None:
        _check_release(setting, str(getattr(torch_npu, "__version__", ours)), ours)
    return torch_npu


def load_npu(setting: str = "device npu", instead: str = "train.device: cpu") -> Any:
    """torch.npu, with at least one NPU.

    Args:
        setting: what asks for it, for the error.
        instead: what to give instead of it.

    Raises:
        ConfigError: as for `load_torch_npu`, or there is no NPU.
    """
    load_torch_npu(setting, instead)
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        raise ConfigError(
            f"{setting}: torch_npu finds no NPU; check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES, or {instead}"
        )
    return npu


def cann_version(module: str = "CANN") -> str | None:
    """Version of CANN, or of its module "HCCL", "RUNTIME" and so on, as torch_npu tells it; None if it does not."""
    from torch_npu.npu.utils import get_cann_version

    try:
        return get_cann_version(module) or None
    except RuntimeError:
        return None


def check_cann(version: str | None) -> str | None:
    """What is wrong with a version of CANN, in one line with found, needed and remedy; None if nothing is, or if the
    version is not known."""
    found = _major_minor(version)
    if found is None or found >= LEAST_CANN:
        return None
    needed = ".".join(map(str, LEAST_CANN))
    remedy = f"install CANN {needed} or later with its driver, and `source .../ascend-toolkit/set_env.sh`"
    return f"CANN is {version}, needed is {needed} or later; {remedy}"


def unknown_cann(version: str | None) -> str | None:
    """That a version of CANN is not known, in one line; None if it is. It stops nothing: what a CANN does not have, its
    operators refuse."""
    if _major_minor(version) is not None:
        return None
    told = "torch_npu finds no version" if version is None else f"the version is {version!r}"
    return f"CANN: {told}, so it was not compared with {'.'.join(map(str, LEAST_CANN))}, the oldest that is needed"


def hccl_time_outs(seconds: float) -> None:
    """Have HCCL give up at 9/10 of a limit, for what the environment does not say: it then names the cause before the
    watchdog of torch_npu, whose time-out the limit is, ends the process.

    Sockets have 120 s at least, the least that HCCL takes.
    """
    sooner = int(seconds * 9 / 10)
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(max(sooner, 1)))
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(min(max(sooner, 120), 7200)))


def _major_minor(version: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return None if found is None else (int(found[1]), int(found[2]))


def _check_release(setting: str, theirs: str, ours: str) -> None:
    if _release(theirs) != _release(ours):
        raise ConfigError(
            f"{setting}: torch_npu is {theirs} and torch is {ours}; they must be of one release: pip install "
            f"torch-npu=={_release(ours)}"
        )


def _why_not(error: BaseException) -> str:
    """What keeps torch_npu from loading, in one line: mostly a library of CANN."""
    text = " ".join(str(error).split())
    library = re.search(r"(lib\w+\.so[.\d]*): cannot open shared object file", text)
    return f"{library[1]}, a library of CANN, is not found" if library else text[:200]


def _release(version: str) -> str:
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else version
