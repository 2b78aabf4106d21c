"""Kernels run as torch everywhere, and in Triton's interpreter where `make test-triton` has made its environment."""

from __future__ import annotations

import pytest

from tests.ascend_kernels.has import triton_runs


@pytest.fixture(params=["torch", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Both implementations of a kernel's contract."""
    if request.param == "triton" and not triton_runs():
        pytest.skip(
            "Triton's interpreter is not here (package triton and TRITON_INTERPRET=1); `make test-triton` has it"
        )
    return str(request.param)
