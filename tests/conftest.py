"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of gloo processes; started by the first test that uses it."""
    pool = Workers()
    yield pool
    pool.close()
