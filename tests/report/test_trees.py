"""Trees of documents in tables and pictures."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.report.notebook import show
from mindspeed_cp.report.tile_map import computed_squares, visible


def test_the_table_counts_trees_and_trajectories() -> None:
    documents = Documents([1300, 700, 100, 900, 2, 1, 2], [-1, 0, 0, 2, -1, 4, 4])
    text = show(build_plan(documents, Topology(1, 3), AttentionConfig(1), "ring")).html
    assert "2, up to 3 documents deep; as trajectories 4 documents, 4,307 tokens" in text


@pytest.mark.parametrize("window", [None, (400, 0)])
def test_the_picture_has_all_that_is_computed(window: tuple[int, int] | None) -> None:
    documents = Documents([300, 120, 80, 200], [-1, 0, 0, 2], [(20, 90), (310, 400)])
    plan = build_plan(documents, Topology(1, 3), AttentionConfig(1, window=window), "ring")
    tokens = np.arange(documents.tokens)
    seen = visible(plan, tokens, tokens)
    drawn = sum((computed_squares(plan, rank, tokens, tokens, seen) >= 0).sum() for rank in range(3))
    assert drawn == seen.sum() == plan.work().sum()
    assert "trees" in show(plan).html and "2, of 160 tokens that see both ways" in show(plan).html
