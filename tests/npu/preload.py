"""What ranks are forked from: the stand-in and torch_npu loaded, no device touched, no thread started (tests/npu/ranks.py)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child must not need threads that its parent had

from tests import host_cann


def load() -> None:
    """The stand-in, libhcomm.so included."""
    host_cann.load()
    folder = Path(os.environ.get("HOST_CANN_BUILD") or host_cann.FOLDER)
    if "libhcomm.so" not in (folder / "libraries.txt").read_text().split():
        _hcomm(folder)


def _hcomm(folder: Path) -> None:
    """Where torch_npu looks for HcclGroupStart and HcclGroupEnd: a library of no functions of its own that leads to libhccl."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-hcomm-") as made:
        source, target = Path(made) / "empty.c", Path(made) / "libhcomm.so"
        source.write_text("")
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libhcomm.so",
            "-Wl,--no-as-needed",
            source,
            f"-L{folder}",
            "-lhccl",
        ]
        subprocess.run([str(word) for word in [*command, "-o", target]], check=True)
        ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


load()
