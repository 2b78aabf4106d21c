"""Every kernel, as it is launched, goes through the compilers: triton-ascend to linalg MLIR, triton to PTX and cubin. Nothing
here runs on a device, and nothing of what comes out is run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp.ascend_kernels.launch import has_triton
from tests.ascend_kernels.variants import ATTENTION, NAMES, is_default, written
from tests.limits import HANG

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ARCHITECTURES = {"A2": "Ascend910B1", "A3": "Ascend910_9391"}
#: Channels of what is lowered for NPUs; `test_lowered.py` runs it.
DIM = 64
DTYPES = ("fp32", "bf16", "fp16")
#: Of what is lowered for NPUs, fp16 only with --thorough: it is lowered like bf16.
LOWERED = [*DTYPES[:2], pytest.param("fp16", marks=pytest.mark.thorough)]

#: Bytes of shared memory that a program may have.
SHARED = {80: 163 << 10, 90: 227 << 10}

#: Bytes of registers that a program may store and load again for want of room, in all; none elsewhere: what the choices
#: by time spill (benchmarks/results/kernels.md), which are faster than others that spill nothing. At 128 channels, of
#: tensors that begin at a multiple of 16 bytes, where fp32 has the most; and of wide heads, where 256 channels in two
#: bytes have.
SPILLED, SPILLED_WIDE = 3072, 1024

#: The same of tensors that do not, as views may: served, slowly.
SPILLED_UNALIGNED = 8192


def lines(command: list[str], cache: Path) -> list[dict[str, Any]]:
    """What a program prints, a line of JSON each."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def lowered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel by triton-ascend, for both architectures."""
    python = os.environ.get("TRITON_ASCEND_PYTHON")
    if not python:
        pytest.skip("TRITON_ASCEND_PYTHON names no Python with triton-ascend; `make test-triton` makes one")
    if not has_triton():
        pytest.skip(
            "the package triton is not installed, without which no launch is recorded; `make test-triton` has it"
        )
    from tests.ascend_kernels.launches import variants

    folder = tmp_path_factory.mktemp("lowered")
    dtypes = DTYPES if request.config.getoption("thorough") else DTYPES[:2]
    every = [variant for dtype in dtypes for variant in variants(dtype, DIM, "npu")]
    what = str(written(every, folder / "variants.json"))
    return lines([python, str(HERE / "lower_ascend.py"), str(folder), what, *ARCHITECTURES.values()], folder / "cache")


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("dtype", LOWERED)
def test_every_kernel_lowers_to_linalg(lowered: list[dict[str, Any]], dtype: str, arch: str) -> None:
    """Down to linalg the name of the architecture makes no difference, which the next test shows: that A2 and A3 are
    both lowered says no more than one of them. What depends on it is CANN's compiler, which is not here."""
    kernels = {kernel["name"]: kernel for kernel in lowered if (kernel["dtype"], kernel["arch"]) == (dtype, arch)}
    assert set(kernels) == set(NAMES)
    assert {name: kernel["error"] for name, kernel in kernels.items() if "error" in kernel} == {}
    for name, kernel in kernels.items():
        assert Path(kernel["file"]).read_text().count("func.func") >= 1
        assert ("linalg.matmul" in kernel["operations"]) == name.startswith(ATTENTION), name


def test_linalg_is_the_same_for_every_architecture(lowered: list[dict[str, Any]]) -> None:
    texts: dict[tuple[str, str], set[str]] = {}
    for kernel in lowered:
        texts.setdefault((kernel["dtype"], kernel["name"]), set()).add(Path(kernel["file"]).read_text())
    assert {what for what, texts_of_it in texts.items() if len(texts_of_it) != 1} == set()


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel by triton, for sm_80 and sm_90."""
    if not has_triton():
        pytest.skip("the package triton is not installed; `make test-triton` has it")
    more = ["--all"] if request.config.getoption("thorough") else []
    command = [sys.executable, "-m", "tests.ascend_kernels.compile_cuda", *more, *map(str, SHARED)]
    return lines(command, tmp_path_factory.mktemp("cuda"))


def compiled_kernels(dims: tuple[int, ...], aligned: bool = True) -> list[Any]:
    """Types, SMs and numbers of channels that are compiled."""
    return [
        pytest.param(dtype, sm, dim, marks=() if is_default(dtype, dim, sm, aligned) else pytest.mark.thorough)
        for dtype in DTYPES
        for sm in SHARED
        for dim in dims
    ]


@pytest.mark.parametrize(("dtype", "sm", "dim"), compiled_kernels((128,)))
def test_every_kernel_compiles_for_gpus(compiled: list[dict[str, Any]], dtype: str, sm: int, dim: int) -> None:
    kernels = chosen(compiled, dtype=dtype, sm=sm, dim=dim, aligned=True)
    assert set(kernels) == set(NAMES) - (set(ATTENTION) if dtype == "fp32" else set())
    check_fits(kernels, sm, SPILLED)
    for name, kernel in kernels.items():
        if dtype != "fp32":
            assert (kernel["matrix"] is not None) == name.startswith(ATTENTION), (name, kernel)


@pytest.mark.parametrize("sm", [pytest.param(80, marks=pytest.mark.thorough), 90])
def test_every_kernel_compiles_for_tensors_at_any_address(compiled: list[dict[str, Any]], sm: int) -> None:
    """Without what Triton's JIT knows of torch's own memory: other code, which is launched for views alone."""
    kernels = chosen(compiled, dtype="bf16", sm=sm, dim=128, aligned=False)
    assert set(kernels) == set(NAMES)
    check_fits(kernels, sm, SPILLED_UNALIGNED)
    aligned = chosen(compiled, dtype="bf16", sm=sm, dim=128, aligned=True)
    assert kernels["merge"]["registers"] > 2 * aligned["merge"]["registers"]


@pytest.mark.parametrize(("dtype", "sm", "dim"), compiled_kernels((256, 512)))
def test_wide_heads_fit(compiled: list[dict[str, Any]], dtype: str, sm: int, dim: int) -> None:
    kernels = chosen(compiled, dtype=dtype, sm=sm, dim=dim, aligned=True)
    assert set(kernels) == {"forward_alibi", "dq_alibi", "dkdv_alibi"}
    check_fits(kernels, sm, SPILLED_WIDE)


def test_documentation_has_these_numbers(compiled: list[dict[str, Any]]) -> None:
    from tests.ascend_kernels.compile_cuda import table

    documented = cells((ROOT / "benchmarks" / "results" / "kernels.md").read_text())
    assert cells(table(compiled)) <= documented, (
        "python -m tests.ascend_kernels.compile_cuda --table 80 90 prints what belongs there"
    )


def cells(text: str) -> set[tuple[str, ...]]:
    """Kernel and target, heading of the column, and text of every cell of tables with a row for each kernel and target."""
    cells, head = set(), []
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[:2] == ["kernel, channels", "target"]:
            head = row
        elif len(row) == len(head):
            cells |= {(*row[:2], name, cell) for name, cell in zip(head[2:], row[2:], strict=True) if cell}
    return cells


def chosen(compiled: list[dict[str, Any]], **wanted: object) -> dict[str, dict[str, Any]]:
    """Those of whom all this holds, by name."""
    return {kernel["name"]: kernel for kernel in compiled if {key: kernel[key] for key in wanted} == wanted}


def check_fits(kernels: dict[str, dict[str, Any]], sm: int, spilled: int) -> None:
    """All were compiled, a program's shared memory is there, and little is spilled by attention, and by nothing else."""
    assert {name: kernel["error"] for name, kernel in kernels.items() if "error" in kernel} == {}
    for name, kernel in kernels.items():
        assert kernel["cubin"] > 0 and kernel["shared"] <= SHARED[sm], (name, kernel)
        assert kernel["spilled"] <= (spilled if name.startswith(ATTENTION) or not kernel["aligned"] else 0), (
            name,
            kernel,
        )
