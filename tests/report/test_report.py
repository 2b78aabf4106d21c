"""Reports of plans: the numbers are those of the plan, and the map shows every tile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.report import plan_tables, summarize, tilemap
from mindspeed_cp.report.text import MOST_RANKS, count


def plan_of(lengths: list[int], ranks: int, **options: object) -> Plan:
    return build_plan(Documents(lengths), Topology(1, ranks), AttentionConfig(heads=4, head_dim=16), **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_numbers_are_those_of_the_plan(ranks: int) -> None:
    lengths = [500, 37, 0, 3, 121]
    plan = plan_of(lengths, ranks)
    summary = summarize(plan)
    assert summary.tokens.sum() == sum(lengths)
    assert (summary.work == plan.work()).all()
    assert summary.work.sum() == sum(n * (n + 1) // 2 for n in lengths)
    assert summary.tiles.sum() == sum(len(plan.forward.tiles(rank)) for rank in range(ranks))
    assert summary.sent.sum() == summary.received.sum() == plan.forward.fetch.items["rows"].sum()
    assert summary.imbalance >= 1 and summary.step_imbalance >= summary.imbalance - 1e-12
    assert summary.as_dict()["per_rank"][ranks - 1]["tokens"] == plan.layout.token_counts[ranks - 1]


def test_contiguous_layout_is_seen_to_be_uneven() -> None:
    even, uneven = (summarize(plan_of([4096], 4, layout=layout)) for layout in ("zigzag", "contiguous"))
    assert even.imbalance < 1.01
    assert uneven.imbalance == pytest.approx(7 / 4, rel=0.01)  # the last of 4 quarters of a triangle
    assert uneven.token_imbalance == 1.0


def test_an_empty_batch_has_tables_too() -> None:
    summary = summarize(plan_of([0, 0], 2))
    assert summary.imbalance == summary.step_imbalance == summary.token_imbalance == 1.0
    for table in plan_tables(summary):
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_tables_have_a_row_for_each_rank_or_the_extremes() -> None:
    for ranks, rows in ((5, 5), (MOST_RANKS + 4, 8)):
        _, holdings, tiles, work = plan_tables(summarize(plan_of([4000, 99], ranks)))
        for table in (holdings, tiles, work):
            assert len(table.rows) == rows and all(len(row) == len(table.columns) for row in table.rows)
        assert len(tiles.columns) <= 20


def test_counts_read_well() -> None:
    assert [count(n) for n in (0, 999, 9_999_999, 12_345_678, 3e9, 2.5e12)] == [
        *("0", "999", "9,999,999", "12.3 M", "3.0 G", "2.5 T"),
    ]


def test_the_map_has_a_polygon_for_every_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.collections import PolyCollection

    plan = plan_of([300, 41, 0, 7], 3)
    drawn: list[np.ndarray] = []
    make = PolyCollection.__init__

    def note(self: PolyCollection, polygons: list[np.ndarray], **options: object) -> None:
        drawn.extend(polygons)
        make(self, polygons, **options)

    monkeypatch.setattr(PolyCollection, "__init__", note)
    tilemap.draw_tile_map(plan, tmp_path / "map.png")
    frames = plan.ranks * plan.forward.steps
    assert len(drawn) == frames + summarize(plan).tiles.sum()
    for corners in drawn:  # each inside the cell of one rank and step
        low, high = np.floor(corners.min(0)), np.ceil(corners.max(0))
        assert (high - low == 1).all() and (low >= 0).all() and (high <= [plan.forward.steps, plan.ranks]).all()


def test_maps_of_very_many_tiles_are_shaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilemap, "MOST_TILES", 1)
    assert tilemap.draw_tile_map(plan_of([300, 41], 3), tmp_path / "map.png").stat().st_size > 1000


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name, says in (("missing/map.png", "cannot be written"), ("folder.png", "cannot be written"), ("map.pdf", "valid")):
        with pytest.raises(ConfigError, match=says):
            tilemap.draw_tile_map(plan_of([30], 2), tmp_path / name)
