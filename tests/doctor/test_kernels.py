"""The doctor on GPUs: its cases ask every kernel, and one that cannot be used is a line; and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_cp.cli.main import run
from mindspeed_cp.doctor import run_checks
from mindspeed_cp.doctor.findings import report_tables
from mindspeed_cp.doctor.operator import DTYPES, LONG_CASES, SHORT_CASES, applies, reference_inputs
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.ops.attention.cuda.flash4 import flash_4_unavailable_reason
from mindspeed_cp.ops.attention.cuda.flash_attention import check_device


def test_every_kernel_is_checked_by_some_case() -> None:
    asked = {
        kernel
        for dtype in DTYPES
        for case in (*SHORT_CASES, *LONG_CASES)
        if applies("cuda", dtype, case)
        for kernel in CudaAttention().kernels_for(case.attention, DTYPES[dtype])
    }
    assert asked == {"flash", "tiles"}


def test_every_type_holds_the_inputs() -> None:
    inputs = reference_inputs(SHORT_CASES[0].reference_key)
    for dtype in DTYPES.values():
        assert all(torch.equal(x.to(dtype).float(), x) for x in inputs)
    assert max(float(x.abs().max()) for x in inputs) > 2 and len(torch.unique(inputs[0])) > 80


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One GPU, older than any that the kernels run on."""
    caches = check_device, flash_4_unavailable_reason  # other tests' GPUs have the same number
    for name, value in {
        "is_available": True, "device_count": 1, "get_device_name": "Tesla T4", "get_device_capability": (7, 5),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


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
    assert report["ok"] and "7.5; valid: 8.0 or later" in report["backends"]["cuda"]["why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "cuda"]) == 2
    assert "error: --device cuda: " in capsys.readouterr().err


REASON = (
    "torch_npu is not installed; pip install torch-npu==2.13.0, or --device cpu; and a word-that-no-line-can-hold" * 2
)


def a_report() -> dict[str, Any]:
    row = {"limit": 1e-5, "differences": {"out": 1e-7, "dq": 3e-7}, "seconds": 0.1, "ok": True, "error": None}
    checks = [{"backend": "cpu", "case": "sliding window", "dtype": dtype, **row} for dtype in ("fp32", "bf16")]
    failed = {"backend": "cpu", "case": "full mask", "dtype": "fp32", **row, "differences": {"dv": 0.5}, "ok": False}
    gpu = {"backend": "cuda", "case": "full mask", "dtype": "fp32", **row, "kernel": "tiles"}
    hung = {**failed, "dtype": "bf16", "differences": {}, "error": "gave no result within 60 s"}
    return {
        "machine": {"system": "Linux", "cores": 2, "threads": 1, "open_files": 1024}, "versions": {"torch": "2.13.0"},
        "version_status": [], "requirements": [], "checks": [*checks, failed, gpu, hung],
        "npu_profile": None, "ok": False,
        "devices": {"npu": {"count": 0, "names": [], "why": REASON}},
        "backends": {"npu": {"available": False, "why": REASON}},
    }  # fmt: skip


def test_one_thread_is_one_and_a_reason_is_given_once() -> None:
    versions, devices, checks = report_tables(a_report())
    assert ("machine", "Linux, 2 cores, 1 thread") in versions.rows
    assert devices.rows == (("npu", "0", REASON, "no"),)
    assert checks.rows == (
        ("cpu", "sliding window", "3.0e-07", "-", "3.0e-07"),
        ("cpu", "full mask", "FAILED dv 5.0e-01, limit 1e-05", "-", "FAILED gave no result within 60 s"),
        ("cuda", "full mask", "3.0e-07 tiles", "-", "-"),
    )
