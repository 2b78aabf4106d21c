"""Tests of tests/npu run under the real torch_npu, over the stand-in for CANN: `make test-npu`.

Without torch_npu (the environment of the other tests) each file is one skip, and is not imported. With it, the stand-in is
loaded once, before the first file is imported, so that tests may say `torch.npu` and `device="npu"` as any program does.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = "torch_npu is not installed (package torch-npu, requirements/npu.txt); `make test-npu` runs these tests"

if importlib.util.find_spec("torch_npu") is not None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # before anything imports torch
    from tests.npu import queue_ends
    from tests.npu.ranks import ranks  # noqa: F401  a fixture


class Skipped(pytest.Module):
    """A test file that is not even imported."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("torch_npu") is None:
        return Skipped.from_parent(parent, path=module_path)
    from tests import host_cann

    host_cann.load()
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that end torch_npu's queue run in processes of their own (queue_ends.py)."""
    if importlib.util.find_spec("torch_npu") is None or not queue_ends.needs_process(pyfuncitem):
        return None
    queue_ends.run_alone(pyfuncitem)
    return True


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """Every test starts and ends with idle streams, without a delay, and without an error that nobody asked for."""
    import torch

    from tests.host_cann import control

    yield

    control.jitter(0)
    torch.npu.synchronize()


@pytest.fixture(scope="session", autouse=True)
def nothing_missing() -> Iterator[None]:
    """All functions of the runtime that tests made torch_npu call are in the stand-in."""
    yield
    from tests.host_cann import control

    # The old way to operators describes an operator before it is refused: test_runtime.py goes it once.
    missing = [name for name in control.missing() if not name.startswith(("aclop", "aclSetTensor", "aclGetTensorDesc"))]
    assert not missing, f"torch_npu called {missing}, which tests/host_cann does not have"
