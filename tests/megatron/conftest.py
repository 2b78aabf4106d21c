"""Fixtures of the Megatron tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.gpt import one_rank
from tests.megatron.ranks import MegatronRanks


@pytest.fixture(scope="session")
def ranks() -> Iterator[MegatronRanks]:
    """Processes in which Megatron's world is the ranks of the test."""
    pool = MegatronRanks()
    yield pool
    pool.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """Megatron in this process, a world of one rank, on the CPU."""
    with one_rank():
        yield
