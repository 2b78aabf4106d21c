"""Four gloo processes that have transformers' models imported: once, by the server that forks them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import preload
from tests.workers import GlooPool

preload("tests.integrations.huggingface.preload")


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Four processes."""
    pool = GlooPool(4)
    yield pool
    pool.close()
