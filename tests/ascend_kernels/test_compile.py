"""Every kernel goes through the compilers: triton-ascend to linalg MLIR, triton to PTX and cubin. Nothing here runs on a
device, and nothing of what comes out is run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.ascend_kernels.launch import has_triton
from tests.ascend_kernels.variants import variants

HERE = Path(__file__).resolve().parent
ARCHITECTURES = {"A2": "Ascend910B1", "A3": "Ascend910_9391"}
NAMES = {variant.name for variant in variants("bf16")}

#: Bytes of shared memory that a program may have.
SHARED = {80: 163 << 10, 90: 227 << 10}

#: Bytes of registers that attention may store and load again for want of room, in all.
SPILLED = 512


def lines(command: list[str], cache: Path) -> list[dict[str, Any]]:
    """What a program prints, a line of JSON each."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel by triton-ascend, for both architectures."""
    python = os.environ.get("TRITON_ASCEND_PYTHON")
    if not python:
        pytest.skip("TRITON_ASCEND_PYTHON names no Python with triton-ascend; `make test-triton` makes one")
    folder = tmp_path_factory.mktemp("lowered")
    return lines([python, str(HERE / "lower_ascend.py"), str(folder), *ARCHITECTURES.values()], folder / "cache")


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_kernel_lowers_to_linalg(lowered: list[dict[str, Any]], dtype: str, arch: str) -> None:
    found = {one["name"]: one for one in lowered if (one["dtype"], one["arch"]) == (dtype, arch)}
    assert set(found) == NAMES
    assert {name: one["error"] for name, one in found.items() if "error" in one} == {}
    for name, one in found.items():
        assert Path(one["file"]).read_text().count("func.func") >= 1
        uses_cube = name.startswith(("forward", "queries", "keys"))
        assert ("linalg.matmul" in one["operations"]) == uses_cube, name


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel by triton, for sm_80 and sm_90."""
    if not has_triton():
        pytest.skip("the package triton is not installed; `make test-triton` has it")
    return lines([sys.executable, str(HERE / "compile_cuda.py"), *map(str, SHARED)], tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_kernel_compiles_for_gpus(compiled: list[dict[str, Any]], dtype: str, sm: int) -> None:
    found = {one["name"]: one for one in compiled if (one["dtype"], one["sm"], one["dim"]) == (dtype, sm, 128)}
    plain = {"forward", "queries", "keys"} if dtype == "fp32" else set()
    assert set(found) == NAMES - plain
    check_fits(found, sm)
    if dtype == "bf16":
        for name, one in found.items():
            uses_matrices = name.startswith(("forward", "queries", "keys"))
            assert (one["matrix"] is not None) == uses_matrices, (name, one)
            assert one["spilled"] <= (SPILLED if uses_matrices else 0), (name, one)


@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_wide_heads_fit(compiled: list[dict[str, Any]], dtype: str, sm: int, dim: int) -> None:
    found = {one["name"]: one for one in compiled if (one["dtype"], one["sm"], one["dim"]) == (dtype, sm, dim)}
    assert set(found) == {"forward_alibi", "queries_alibi", "keys_alibi"}
    check_fits(found, sm)


def check_fits(found: dict[str, dict[str, Any]], sm: int) -> None:
    """All were compiled, and a program's shared memory is there."""
    assert {name: one["error"] for name, one in found.items() if "error" in one} == {}
    for name, one in found.items():
        assert one["cubin"] > 0 and one["shared"] <= SHARED[sm], (name, one)
