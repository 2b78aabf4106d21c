"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import Workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cuda", type=int, metavar="GPUS",
        help="fail at once where the cuda backend has fewer GPUs, and do not skip the tests that need them",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("require_cuda")
    if wanted is None:
        return
    if wanted < 1:
        raise pytest.UsageError(f"--require-cuda {wanted}: valid: 1 or more")
    from mindspeed_cp.doctor.machine import backend, device  # torch, which some tests want to be the first to import

    found = device("cuda")
    serves = backend("cuda", found)
    if not serves["available"]:
        raise pytest.UsageError(f"--require-cuda {wanted}: {serves['why']}")
    if found["count"] < wanted:
        raise pytest.UsageError(f"--require-cuda {wanted}: fewer CUDA devices are visible, {found['count']}")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of gloo processes; started by the first test that uses it."""
    pool = Workers()
    yield pool
    pool.close()
