"""Choice of the device, and the only import of torch_npu, with a one-line error for every reason why it cannot be used.

Importing this module imports neither torch nor torch_npu; the functions that need them do.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from typing import Any

from mindspeed_cp.device.npu_profile import NpuIdentity
from mindspeed_cp.errors import ConfigError

#: Minimum CANN (major, minor) from a release of torch on. The READMEs in the wheels of torch-npu pair 2.7.1 and 2.8.0
#: with CANN 8.3.RC1 and later, and nothing above 2.8.0 with one older than 8.5.0.
_MIN_CANN = (((2, 9), (8, 5)), ((0, 0), (8, 3)))

_REMEDY = "install CANN for this driver and `source .../ascend-toolkit/set_env.sh`"


def resolve_device_type(name: str) -> str:
    """Return "cpu", "npu" or "cuda" for train.device; "auto" is "npu" if torch_npu is installed, else "cpu"."""
    if name != "auto":
        return name
    return "cpu" if importlib.util.find_spec("torch_npu") is None else "npu"


def require_torch_npu(setting: str, instead: str) -> None:
    """Raise ConfigError unless torch_npu is installed, in the release of torch; imports neither, so that it is quick.

    Args:
        setting: setting that requires it, for the error.
        instead: alternative, for the error.
    """
    torch_version = _torch_version()
    if importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            f"{setting}: torch_npu is not installed; pip install torch-npu=={_release(torch_version)}, or {instead}"
        )
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a source tree; load_torch_npu asks the module
        _check_release(setting, importlib.metadata.version("torch-npu"), torch_version)


def load_torch_npu(setting: str, instead: str) -> Any:
    """Import and return torch_npu, which must be the one for this torch.

    Args:
        setting: setting that requires it, for the error.
        instead: alternative, for the error.

    Raises:
        ConfigError: torch_npu is not installed, is not the one for this torch, or its libraries are missing.
    """
    require_torch_npu(setting, instead)
    import torch

    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{setting}: torch_npu cannot be loaded ({_why_not(error)}); {_REMEDY}, or {instead}"
        ) from None
    _check_release(setting, str(getattr(torch_npu, "__version__", torch.__version__)), torch.__version__)
    return torch_npu


def load_npu(setting: str = "device npu", instead: str = "train.device: cpu") -> Any:
    """Return torch.npu with at least one NPU.

    Args:
        setting: setting that requires it, for the error.
        instead: alternative, for the error.

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


def load_cuda(setting: str, instead: str = "train.device: cpu") -> Any:
    """Return torch.cuda with at least one GPU.

    Args:
        setting: setting that requires it, for the error.
        instead: alternative, for the error.

    Raises:
        ConfigError: torch was built without CUDA, it finds no GPU, or NCCL is not there.
    """
    import torch
    import torch.distributed as dist

    if not torch.backends.cuda.is_built():
        raise ConfigError(
            f"{setting}: torch {torch.__version__} was built without CUDA; install a build of torch for CUDA, or "
            f"{instead}"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"{setting}: torch finds no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or {instead}")
    if not dist.is_nccl_available():
        raise ConfigError(f"{setting}: this build of torch has no NCCL; install one that has it, or {instead}")
    return torch.cuda


def cann_version(module: str = "CANN") -> str | None:
    """Return the version of CANN, or of its module "HCCL", "RUNTIME" and so on, by torch_npu; None if it is unknown."""
    from torch_npu.npu.utils import get_cann_version

    try:
        return get_cann_version(module) or None
    except RuntimeError:
        return None


def npu_identity() -> NpuIdentity:
    """Return the name of the first NPU, and the versions of torch-npu and CANN."""
    import torch
    import torch_npu

    npu: Any = torch.npu  # type: ignore[attr-defined]
    try:
        version = importlib.metadata.version("torch-npu")  # with .post1, which has other host code
    except importlib.metadata.PackageNotFoundError:  # a source tree
        version = str(torch_npu.__version__)
    return NpuIdentity(str(npu.get_device_name(0)), version, cann_version())


def min_cann(torch_version: str | None = None) -> str:
    """Return the oldest CANN, such as "8.5", that torch-npu of this release needs; default: the installed torch's."""
    release = _major_minor(torch_version or _torch_version()) or (0, 0)
    return ".".join(map(str, next(oldest for first, oldest in _MIN_CANN if release >= first)))


def cann_problem(version: str | None) -> str | None:
    """Return one line with version, minimum and remedy if CANN is too old for the installed torch-npu; None if it is
    not, or if its version is unknown."""
    release, needed = _major_minor(version), min_cann()
    if release is None or release >= (_major_minor(needed) or release):
        return None
    remedy = f"install CANN {needed} or later with its driver, and `source .../ascend-toolkit/set_env.sh`"
    return f"CANN is {version}, needed is {needed} or later; {remedy}"


def unknown_cann_note(version: str | None) -> str | None:
    """Return one line if the version of CANN is unknown, else None. An unknown version is no error: operators that it
    lacks raise their own."""
    if _major_minor(version) is not None:
        return None
    finding = "torch_npu finds no version" if version is None else f"the version is {version!r}"
    return f"CANN: {finding}, so it was not compared with {min_cann()}, the oldest that is needed"


def set_hccl_timeouts(seconds: float) -> None:
    """Set the timeouts of HCCL to 9/10 of a limit, unless the environment sets them: HCCL then reports the cause
    before the watchdog of torch_npu, whose timeout is the limit, ends the process.

    Connections get at least 120 s, the minimum of HCCL.
    """
    sooner = int(seconds * 9 / 10)
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(max(sooner, 1)))
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(min(max(sooner, 120), 7200)))


def _major_minor(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return None if match is None else (int(match[1]), int(match[2]))


def _torch_version() -> str:
    return getattr(sys.modules.get("torch"), "__version__", None) or importlib.metadata.version("torch")


def _check_release(setting: str, npu_version: str, torch_version: str) -> None:
    if _release(npu_version) != _release(torch_version):
        raise ConfigError(
            f"{setting}: torch_npu is {npu_version} and torch is {torch_version}; they must be of one release: pip "
            f"install torch-npu=={_release(torch_version)}"
        )


def _why_not(error: BaseException) -> str:
    """Return the reason why torch_npu cannot be loaded in one line: mostly a missing library of CANN."""
    text = " ".join(str(error).split())
    library = re.search(r"(lib\w+\.so[.\d]*): cannot open shared object file", text)
    return f"{library[1]}, a library of CANN, is not found" if library else text[:200]


def _release(version: str) -> str:
    match = re.match(r"\d+\.\d+\.\d+", version)
    return match[0] if match else version
