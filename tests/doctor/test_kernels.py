"""The doctor's table of kernels: every cell of the cuda backend is in it, and its text is what the backend says."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.cli.main import run
from mindspeed_cp.config import capabilities
from mindspeed_cp.doctor import cuda_kernels as table
from mindspeed_cp.doctor import run_checks
from mindspeed_cp.doctor.operator import DTYPES, LONG_CASES, SHORT_CASES, applies
from mindspeed_cp.doctor.tables import report_tables
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from tests.engine.draw import problem

CELLS = [cell for cell in capabilities.all_cells() if cell.backend == "cuda" and cell.keys == "own"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_says_what_the_backend_does(dtype: str) -> None:
    rows = [row for row in table.kernel_table() if row["dtype"] == dtype]
    backend = CudaAttention()
    for cell in CELLS:
        (row,) = [row for row in rows if all(getattr(cell, x.split(": ")[0]) == x.split(": ")[1] for x in row["where"])]
        attention = problem(cell, 1, Random(str(cell))).attention
        try:
            backend.check(attention, DTYPES[dtype])
        except ConfigError:
            assert row["kernel"].startswith("refused: ")
            continue
        flash = backend.kernel_for(attention, DTYPES[dtype]) == "flash"
        assert row["kernel"].startswith(("torch.ops.aten._flash", "FlashAttention 3") if flash else "mindspeed_cp.")


def test_a_feature_that_a_kernel_depends_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_kernel", lambda cell, dtype: f"for {cell.window}")
    rows = [row for row in table.kernel_table() if row["dtype"] == "bf16"]
    assert [(row["where"], row["kernel"]) for row in rows] == [
        (["window: none"], "for none"),
        (["window: sliding"], "for sliding"),
    ]


def test_every_kernel_is_checked_by_some_case() -> None:
    asked = {
        CudaAttention().kernel_for(case.attention, DTYPES[dtype])
        for dtype in DTYPES
        for case in (*SHORT_CASES, *LONG_CASES)
        if applies("cuda", dtype, case)
    }
    assert asked == {"flash", "tiles"}


def test_the_printed_table() -> None:
    report = {
        "machine": {"system": "x", "cores": 1, "threads": 1, "open_files": 1024}, "versions": {}, "requirements": [], "devices": {},
        "checks": [], "communication": {}, "links": [], "network": {"launchers": [], "addresses": []},
        "kernels": [{"where": ["bias: none"], "dtype": "bf16", "kernel": "one"}, {"where": [], "dtype": "fp16", "kernel": "two"}],
    }  # fmt: skip
    (table,) = [candidate for candidate in report_tables(report) if candidate.title.startswith("Kernels")]
    assert table.rows == (("bias: none", "bf16", "one"), ("everything", "fp16", "two"))


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, older than any that the kernels run on."""
    for name, value in {
        "is_available": True, "device_count": 1, "get_device_name": "Tesla T4", "get_device_capability": (7, 5),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.usefixtures("old_gpu")
def test_a_gpu_that_is_too_old_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert "error: --device cuda: " in line and "Tesla T4 of compute capability 7.5; valid: 8.0 or later" in line


@pytest.mark.usefixtures("old_gpu")
def test_no_kernel_serves_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other devices it is refused in the table of devices."""
    monkeypatch.setattr("mindspeed_cp.doctor.check", lambda *_: {"ok": True})
    report = run_checks()
    assert report["ok"] and report["kernels"] == []
    assert "7.5; valid: 8.0 or later" in report["backends"]["cuda"]["why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "cuda"]) == 2
    assert "error: --device cuda: " in capsys.readouterr().err


def test_one_thread_is_one_and_a_reason_is_given_once() -> None:
    from mindspeed_cp.doctor.tables import report_tables

    reason = "torch_npu is not installed; pip install torch-npu"
    report = {
        "machine": {"system": "Linux", "cores": 2, "threads": 1, "open_files": 1024}, "versions": {}, "requirements": [], "checks": [],
        "communication": {}, "kernels": [], "links": [], "network": {"launchers": [], "addresses": []},
        "devices": {"npu": {"count": 0, "names": [], "why": reason}},
        "backends": {"npu": {"available": False, "why": reason}},
    }  # fmt: skip
    versions, devices, *_ = report_tables(report)
    assert ("machine", "Linux, 2 cores, 1 thread") in versions.rows
    assert devices.rows == (("npu", "0", reason, "no"),)
