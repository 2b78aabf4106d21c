"""The tables of docs/algorithms.md on the links of a mesh are what the simulator says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.links import VARIANTS, table

PAGE = Path(__file__).parent.parent.parent / "docs" / "algorithms.md"


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_the_page_has_the_simulated_times(kv_heads: int) -> None:
    """The columns of 18,432 tokens per node; if they differ, run python -m benchmarks.links and copy its tables."""
    rows = PAGE.read_text().split(f"| {kv_heads} key/value heads |")[1].split("\n\n")[0].splitlines()[2:]
    cells = {label.strip(): [cell.strip() for cell in row] for label, *row in (re.split(r"\|", r)[1:-1] for r in rows)}
    simulated = table("a2", [(1, 18432), (2, 18432)], kv_heads)
    assert {label: [row[0], row[3]] for label, row in cells.items()} == simulated
    assert len(simulated) == len(VARIANTS)
