"""The memory table of benchmarks/results/ascend.md is what its command prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.npu.memory_table import RANKS, SIZES, cells, rows

PAGE = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results" / "ascend.md"


@pytest.mark.parametrize(
    ("sizes", "biased_ranks"),
    [(("32K",), (RANKS - 1,)), pytest.param(tuple(SIZES), range(RANKS), marks=pytest.mark.thorough)],
    ids=["32K", "all sizes"],
)
def test_the_table_of_the_documentation(sizes: tuple[str, ...], biased_ranks: Sequence[int]) -> None:
    text = PAGE.read_text("utf-8")
    for row in rows(sizes, biased_ranks):
        assert cells(row) in text, "run: python -m tests.npu.memory_table"


@pytest.mark.thorough
def test_no_mask_of_ours_grows_with_the_context() -> None:
    table = rows()
    counted = {row.name: row.bytes for row in table if row.counted and "document ids" not in row.name}
    assert len(counted) == 3 and all(len(set(row.values())) == 1 for row in counted.values())
    [by_ids] = [row.bytes for row in table if "document ids" in row.name]
    assert all(count <= 1.01 * (SIZES[name] / 8) ** 2 for name, count in by_ids.items())
