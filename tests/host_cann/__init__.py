"""A stand-in for CANN and an Ascend NPU, under the real torch_npu.  A test double: nothing outside tests/ may import it.

    torch_npu = tests.host_cann.load()        # before anything imports torch_npu
    x = torch.ones(3, device="npu")

See README.md for what it proves and what it does not.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = (
    ROOT / ".venv-npu" / "host_cann"
)  # of the libraries, unless load() is given another or HOST_CANN_BUILD names one

_libraries: dict[str, ctypes.CDLL] = {}


class NotAvailable(Exception):
    """torch_npu is not installed, or the libraries cannot be built."""


def load(folder: str | Path | None = None) -> ModuleType:
    """Builds what is not up to date, loads it, imports torch_npu on top and returns it.

    Must come before anything imports torch_npu. `folder` defaults to the environment's HOST_CANN_BUILD, then to FOLDER.
    Sets TORCH_DEVICE_BACKEND_AUTOLOAD=0, and TASK_QUEUE_ENABLE=1, as on a device, unless it is set. A second call returns
    the same module.

    Raises NotAvailable without torch_npu or compilers, RuntimeError if torch_npu was imported before, ValueError if
    TASK_QUEUE_ENABLE is not 0, 1 or 2.
    """
    if _libraries:
        return sys.modules["torch_npu"]
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "torch_npu is already imported; set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch is imported"
        )
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from tests.host_cann import task_queue
    from tests.host_cann.build import BuildError, build

    os.environ["TASK_QUEUE_ENABLE"] = str(task_queue.mode())

    try:
        paths = build(Path(folder or os.environ.get("HOST_CANN_BUILD") or FOLDER))
    except BuildError as error:
        raise NotAvailable(str(error)) from error
    # Found again by their names when torch_npu is loaded, and their functions by all that comes after: hence global.
    loaded = {path.name: ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths}
    import torch_npu

    from tests.host_cann import cann_batches, fallback, oracle_abi

    _libraries.update(loaded)
    oracle_abi.connect(loaded["libopapi.so"])
    cann_batches.connect(loaded["libhccl.so"])
    fallback.install(loaded["libascendcl.so"])
    return torch_npu


def library(name: str) -> ctypes.CDLL:
    """One of the loaded libraries: "acl" (host_cann.h and the runtime), "opapi" or "hccl"."""
    return _libraries["libascendcl.so" if name == "acl" else f"lib{name}.so"]
