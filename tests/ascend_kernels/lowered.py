"""What triton-ascend lowers a kernel to, run on this CPU: MLIR and LLVM 19 compile it, and it takes the place of the kernel.

It shows that the lowered text computes what the kernel says. Not that CANN's compiler takes it, nor what a device computes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.ascend_kernels.launches import SHORT
from tests.ascend_kernels.variants import Variant

HERE = Path(__file__).resolve().parent

#: From linalg to what mlir-translate takes.
PASSES = (
    "--allow-unregistered-dialect",
    "--canonicalize",
    "--convert-elementwise-to-linalg",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-math-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-func-to-llvm",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


def tools() -> Callable[..., None] | None:
    """Runs a program of LLVM 19 with arguments; None where mlir-opt is not there. Debian has it in mlir-19-tools and
    llvm-19; MLIR_PREFIX names another place, also one that packages were unpacked to."""
    prefix = Path(os.environ.get("MLIR_PREFIX", "/usr/lib/llvm-19"))
    if not all((prefix / "bin" / name).exists() for name in ("mlir-opt", "mlir-translate", "llc")) or not shutil.which(
        "gcc"
    ):
        return None
    multi = subprocess.run(["gcc", "-print-multiarch"], capture_output=True, text=True, check=True).stdout.strip()
    folders = [
        prefix / "lib",
        prefix.parent.parent / "lib" / multi,
        prefix.parent / multi,
    ]  # of unpacked packages
    paths = ":".join([*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])

    def run(name: str, *arguments: str) -> None:
        program = [str(prefix / "bin" / name), *arguments]
        done = subprocess.run(program, env={**os.environ, "LD_LIBRARY_PATH": paths}, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"

    return run


def compiled(text: Path, folder: Path) -> Path:
    """A shared library of a lowered kernel."""
    run = tools()
    assert run is not None
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / text.stem
    run("mlir-opt", str(text), *PASSES, "-o", f"{stem}.mlir")
    run("mlir-translate", "--mlir-to-llvmir", f"{stem}.mlir", "-o", f"{stem}.ll")
    run("llc", "-O2", "--relocation-model=pic", "-filetype=obj", f"{stem}.ll", "-o", f"{stem}.o")
    link = ["gcc", "-O2", "-fPIC", "-shared", f"{stem}.o", str(HERE / "lowered_support.c"), "-lm", "-o", f"{stem}.so"]
    subprocess.run(link, check=True, capture_output=True)
    return Path(f"{stem}.so")


class Lowered:
    """Stands where a kernel stands, for one variant: called with a grid and the kernel's arguments, it runs the library."""

    def __init__(self, variant: Variant, library: Path) -> None:
        self.variant = variant
        self.launches = 0
        self._run = getattr(ctypes.CDLL(str(library)), variant.kernel)
        self._run.restype = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            assert constants == self.variant.constants, "another variant than the one that was lowered"
            types = [f"*{SHORT[x.dtype]}" if isinstance(x, torch.Tensor) else None for x in arguments]
            for actual, wanted in zip(types, self.variant.signature.values(), strict=True):
                assert actual in (None, wanted), "other types than those that were lowered"
            self.launches += 1
            spare = torch.zeros(64, dtype=torch.int8)  # the first two arguments: a lock and a workspace
            words = [w for x in (spare, spare, *arguments) for w in _words(x)]
            sizes = [*grid, 1, 1][:3]
            for z in range(sizes[2]):
                for y in range(sizes[1]):
                    for x in range(sizes[0]):
                        self._run(*words, *(ctypes.c_int32(n) for n in (*sizes, x, y, z)))

        return launch


def _words(x: Any) -> list[Any]:
    """A tensor is a memref of one dimension: allocated, aligned, offset, size, stride."""
    if isinstance(x, torch.Tensor):
        address = ctypes.c_void_p(x.data_ptr())
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return [address, address, ctypes.c_int64(0), ctypes.c_int64(size), ctypes.c_int64(1)]
    return [ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int32(x)]
