"""The picture of a plan: it shows each tile at its place in the attention matrix, and its words do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.report.plan import tile_map as tilemap
from mindspeed_cp.report.plan import tile_map_canvas as page
from mindspeed_cp.report.plan.tile_map import draw_tile_map, tile_map
from mindspeed_cp.report.plan.tile_map_content import mask_outlines, tile_polygons
from tests.plan.parts import mixed_plan

LENGTHS = [700, 30, 0, 4100]
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (500, 0)},
    "full": {"mask": "full"},
    "window both sides": {"mask": "full", "window": (300, 90)},
    "alibi": {"alibi": True},
}


def plan_of(algorithm: str = "ring", lengths: list[int] = LENGTHS, ranks: int = 4, **more: Any) -> Plan:
    """A plan; what is not an option of the algorithm or `nodes` is about attention."""
    nodes, options = more.pop("nodes", 1), {k: more.pop(k) for k in ("layout", "kv_documents") if k in more}
    attention = AttentionConfig(**{"heads": 6, "kv_heads": 2, "head_dim": 16, **more})
    return build_plan(Documents(lengths), Topology(nodes, ranks // nodes), attention, algorithm, **options)


def area(corners: np.ndarray) -> float:
    x, y = corners.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_areas_are_work_and_lie_where_the_mask_lets_queries_see(algorithm: str, kind: str) -> None:
    check_areas(plan_of(algorithm, **KINDS[kind]))


def check_areas(plan: Plan) -> None:
    left, right = plan.attention.reach
    drawn, count = np.zeros_like(plan.work(), float), np.zeros_like(plan.work())
    for rank in range(4):
        for step, owner, corners in tile_polygons(plan, rank):
            part_plan = plan.parts_or_self[plan.step_order()[step][0]]
            heads = np.diff(part_plan.q_layout_compute.head_range(rank, 6))[0]
            drawn[rank, step] += area(corners) * heads
            count[rank, step] += heads
            tokens = np.floor(corners.mean(0)).astype(int)  # of the middle: the same document, seen, held by the owner
            doc, other = plan.documents.document_of(tokens)
            assert doc == other and -right <= tokens[1] - tokens[0] <= left
            there = tokens - plan.documents.offsets[doc] + part_plan.documents.offsets[doc]
            assert there[0] in part_plan.kv_layout_compute.tokens(owner) and there[
                1
            ] in part_plan.q_layout_compute.tokens(rank)
    assert (
        np.abs(drawn - plan.work()).max() <= count.max() / 2
    )  # a polygon lacks at most an eighth of a pair at a corner
    shown = sum(area(corners) for corners in mask_outlines(plan))
    assert shown * 6 == pytest.approx(plan.work().sum(), abs=6)


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_are_in_a_plan_of_parts(kind: str) -> None:
    check_areas(mixed_plan(Documents([700, 230, 0, 410, 333]), 4, AttentionConfig(6, 2, 16, **KINDS[kind])))


def test_the_picture_of_a_plan_of_parts_names_parts_and_heads() -> None:
    plan = mixed_plan(Documents([700, 230, 400, 410]), 4, AttentionConfig(6, 2, 16))
    words = {text.get_text() for text in tile_map(plan).axes[0].texts}
    assert {"step 0.0", "step 1.0", "step 2.0", "step 0.1"} <= words
    assert "heads 0-2: K/V of ranks 0-1" in words and "heads 3-5: K/V of ranks 2-3" in words
    assert any("0 by direct; 1 by head_split; 2 by head_split" in text for text in words)


def test_in_a_ring_the_owner_goes_round_and_in_the_hybrid_it_has_the_same_heads() -> None:
    owners = {(rank, step): {a.owner for a in tile_polygons(plan_of(), rank) if a.step == step}
              for rank in range(4) for step in range(4)}  # fmt: skip
    assert all(actual == {(rank - step) % 4} for (rank, step), actual in owners.items())
    hybrid = plan_of("hybrid", ranks=4)
    for rank in range(4):
        assert {a.owner for a in tile_polygons(hybrid, rank)} == {rank, (rank + 2) % 4}


def words(figure: Any) -> list[tuple[str, Any]]:
    """Texts of a figure and their boxes in pixels."""
    figure.canvas.draw()
    return [(t.get_text(), t.get_window_extent()) for t in figure.axes[0].texts if t.get_text()]


CASES: dict[str, dict[str, Any]] = {
    **{algorithm: {"algorithm": algorithm} for algorithm in ALGORITHMS},
    "nodes": {"algorithm": "double_ring", "nodes": 2},
    "unequal heads": {"algorithm": "ulysses", "heads": 5, "kv_heads": 5, "ranks": 7, "lengths": [3, 90]},
    "window": {"algorithm": "direct", "window": (500, 0)},
    "balanced": {
        "algorithm": "direct", "layout": "balanced",
        "lengths": [900, 400, 120, 3100, 64, 800, 30, 250, 1500, 77, 600, 340],
    },
    "cross": {"algorithm": "all_gather", "mask": "full", "kv_documents": Documents([3, 900, 17, 2000])},
    "cross, heads": {"algorithm": "ulysses", "mask": "full", "kv_documents": Documents([3, 900, 17, 2000])},
    "cross, small squares": {"mask": "full", "kv_documents": Documents([3, 9, 17, 20]), "ranks": 11},
    "many ranks": {"ranks": 11},
    "small squares": {"ranks": 11},
    "one rank": {"ranks": 1},
    "empty": {"lengths": [0]},
    "no documents": {"lengths": []},
    "large numbers": {"lengths": [900_000_000, 700_000_000]},
}  # fmt: skip


#: Cases whose words stand in other places than those of the others; all run in the full matrix.
DEFAULT = (
    *(
        "ring",
        "hierarchical",
        "unequal heads",
        "cross, heads",
        "cross, small squares",
        "many ranks",
        "one rank",
        "empty",
    ),
    *("no documents", "large numbers"),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.thorough) for case in CASES]
)
def test_words_neither_overlap_nor_leave_the_page(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.endswith("small squares"):
        monkeypatch.setattr(page, "MAX_WIDTH", 11.0)
    figure = tile_map(plan_of(**CASES[case]))
    boxes = words(figure)
    width, height = figure.canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for (first, a), (other, b) in combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, f"{first!r} overlaps {other!r}"
    captions = any("K/V of" in text for text, _ in boxes)
    assert captions == (case not in ("small squares", "cross, small squares", "one rank", "empty", "no documents"))


def texts(**case: Any) -> list[str]:
    return [text for text, _ in words(tile_map(plan_of(**case)))]


def test_the_words_say_who_computes_what() -> None:
    ring = texts(algorithm="ring")
    assert {"rank 3", "own K/V", "K/V of rank 2", "step 3", "holds", "work / mean"} <= set(ring)
    assert any(text.startswith("← ") and text.endswith(" rows from rank 3") for text in ring)
    ulysses = texts(algorithm="ulysses")
    assert {"computes head 0 (kv 0)", "computes heads 1-2 (kv 0)", "heads 1-2: K/V of all ranks"} <= set(ulysses)
    bands = {"all-to-all: tokens → heads (Q, K, V)", "all-to-all: heads → tokens (output)"}
    assert bands <= set(ulysses)
    hybrid = texts(algorithm="hybrid")
    assert bands <= set(hybrid) and hybrid.count("all-to-all: heads → tokens (output)") == 2
    assert {"heads 0-2: K/V of ranks 0-1", "heads 3-5: K/V of ranks 2-3"} <= set(hybrid)
    assert "K/V of ranks 0, 2-3" not in ring and "K/V of ranks 0, 2, 3" in texts(algorithm="all_gather")
    assert {"node 0", "node 1"} <= set(texts(algorithm="double_ring", nodes=2))
    assert any("whole document" in text for text in texts(algorithm="direct", layout="balanced"))
    assert "nothing to compute" in texts(lengths=[0])


def test_there_is_a_polygon_for_every_area_each_in_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray] = []
    fill = tilemap.TileMapCanvas.draw_polygons

    def note(page: tilemap.TileMapCanvas, corners: Sequence[np.ndarray], rank_colours: Any, line: float = 0.0) -> None:
        drawn.extend(corners if line else [])  # only tiles have an outline
        fill(page, corners, rank_colours, line)

    monkeypatch.setattr(tilemap.TileMapCanvas, "draw_polygons", note)
    plan = plan_of("direct", ranks=3)
    figure = tile_map(plan)
    assert len(drawn) == sum(len(list(tile_polygons(plan, rank))) for rank in range(3))
    frames: list[Any] = [patch for patch in figure.axes[0].patches if patch.get_zorder() == 3]
    squares = np.array([(*frame.get_xy(), frame.get_width()) for frame in frames])
    assert len(squares) == plan.work().size
    first, last = squares[:, :2] - 1e-6, squares[:, :2] + squares[:, 2:] + 1e-6
    for corners in drawn:
        assert ((first <= corners.min(0)) & (corners.max(0) <= last)).all(1).sum() == 1


def test_maps_of_very_many_tiles_are_shaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilemap, "DRAWN_TILE_LIMIT", 1)
    texts_drawn = texts(lengths=[300, 41], ranks=3)
    assert any("too many to draw" in text for text in texts_drawn) and not any(
        "attention matrix" in text for text in texts_drawn
    )


@pytest.mark.parametrize(
    ("case", "shaded"),
    [
        pytest.param({"ranks": 16, "lengths": [32768]}, False, marks=pytest.mark.thorough),  # chunks of 6 pixels
        pytest.param({"ranks": 32, "lengths": [32768]}, True, marks=pytest.mark.thorough),  # of 1.8
        pytest.param({"ranks": 64, "lengths": [32768]}, True, marks=pytest.mark.thorough),
        ({"ranks": 32, "lengths": [32768], "algorithm": "ulysses", "heads": 32, "kv_heads": 32}, False),
        ({"ranks": 4, "lengths": [20] * 300}, True),
        ({"ranks": 4, "lengths": [*[3] * 300, 9000]}, False),  # most of the work is in large tiles
    ],
    ids=["16", "32", "64", "ulysses", "small documents", "small and large"],
)
def test_squares_are_shaded_where_typical_tiles_are_too_small_to_be_seen(case: dict[str, Any], shaded: bool) -> None:
    texts_drawn = texts(**case)
    assert any("pixels wide, too small to draw" in text for text in texts_drawn) == shaded
    assert any("attention matrix" in text for text in texts_drawn) != shaded


def test_a_shaded_square_has_its_work_and_the_colours_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilemap, "MIN_TILE_PIXELS", 1e9)
    plan = plan_of("all_gather", lengths=[300, 41], ranks=3)
    frames: list[Any] = list(tile_map(plan).axes[0].patches)
    work, palette = plan.work(), page.rank_colours(3)
    squares = [frame for frame in frames if frame.get_zorder() == 1 and frame.get_width() == frame.get_height() > 1]
    expected = [page.shade_of(float(share)) for share in (work / work.max()).flat]
    assert [square.get_facecolor()[:3] for square in squares] == [pytest.approx(colour) for colour in expected]
    marks = [palette.index(frame.get_facecolor()[:3]) for frame in frames if frame.get_zorder() == 2]
    assert marks == [0, 1, 2, 1, 0, 2, 2, 0, 1], "the own keys, then those of both others, rank by rank"


def test_cross_attention_shows_the_lengths_of_keys_and_who_holds_them() -> None:
    case: dict[str, Any] = {"mask": "full", "kv_documents": Documents([3, 900, 17, 2000])}
    texts_drawn = texts(algorithm="direct", **case)
    assert "direct: 4 documents (700, 30, 0, 4,100 queries; 3, 900, 17, 2,000 keys) over 4 ranks" in texts_drawn
    assert any(" queries, " in text and text.endswith(" keys") for text in texts_drawn)
    assert "What ranks hold: queries in the upper strip, keys and values in the lower." in texts_drawn
    plain = texts(algorithm="direct", mask="full")
    assert "direct: 4 documents (700, 30, 0, 4,100 tokens) over 4 ranks" in plain
    assert not any("strip" in text for text in plain)
    many, long = Documents([5] * 9), Documents([70])
    assert "ring: 9 documents, 180 queries and 45 keys over 4 ranks" in texts(
        lengths=[20] * 9, mask="full", kv_documents=many
    )
    assert "ring: 1 document of 20 queries; 70 keys over 4 ranks" in texts(lengths=[20], mask="full", kv_documents=long)


def test_strips_are_what_ranks_hold_of_queries_and_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        tilemap.TileMapCanvas, "draw_rank", lambda page, rank, *arguments: drawn.append((rank, arguments[-1]))
    )
    keys = Documents([3, 900, 17, 2000])
    plan = plan_of("direct", mask="full", kv_documents=keys)
    tile_map(plan)
    assert [rank for rank, _ in drawn] == [0, 1, 2, 3]
    for rank, strips in drawn:
        for (pieces, borders), layout in zip(strips, (plan.layout, plan.kv_layout_in), strict=True):
            tokens = layout.documents.tokens
            spans = [(start, stop) for _, _, start, stop in layout.rank_spans(rank).tolist()]
            assert np.allclose(pieces * tokens, spans)
            assert np.allclose(borders * tokens, layout.documents.offsets[1:-1])
    drawn.clear()
    tile_map(plan_of("direct"))
    assert all(len(strips) == 1 for _, strips in drawn)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name, says in (
        ("missing/map.png", "there is no folder .*missing; create it"),
        ("folder.png", "cannot be written"),
        ("map.pdf", "valid"),
    ):
        with pytest.raises(ConfigError, match=says):
            draw_tile_map(plan_of(ranks=2), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
    assert draw_tile_map(plan_of(ranks=2), tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
