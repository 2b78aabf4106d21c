"""Four gloo processes that have transformers' models imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import preload
from tests.workers import GlooPool


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Four processes; the server that forks them imports transformers once."""
    preload("tests.integrations.huggingface.preload")
    pool = GlooPool(4)
    yield pool
    pool.close()
