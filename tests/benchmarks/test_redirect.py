"""What runs in Python around torch in a step: the few calls that make or move a tensor, and no operator."""

from __future__ import annotations

from pathlib import Path

from benchmarks.redirect import measure
from tests.train.conftest import fresh_ranks
from tests.train.fresh_ranks import FreshRanks

__all__ = ["fresh_ranks"]


def test_few_calls_of_a_step_are_redirected(fresh_ranks: FreshRanks, tmp_path: Path) -> None:
    [counted] = fresh_ranks.run(1, measure, str(tmp_path), 1, 1)
    assert 0 < counted["replaced_calls"] < counted["mode_calls"] / 5
