"""The picture of a plan: it shows each computed pair at its place in the attention matrix, and words stay on the page."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.report.files import rank_colours, write_png
from mindspeed_cp.report.plan import PlanSummary
from mindspeed_cp.report.tile_map import GREY, computed_squares, tile_map, visible
from tests.plan.parts import mixed_plan

LENGTHS = [70, 3, 0, 410]
UNEVEN = [900, 400, 120, 3100, 64, 800, 30, 250, 1500, 77, 600, 340]
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (50, 0)},
    "full": {"mask": "full"},
    "window both sides": {"mask": "full", "window": (30, 9)},
    "alibi": {"alibi": True},
}


def plan_of(algorithm: str = "ring", lengths: list[int] = LENGTHS, ranks: int = 4, **more: Any) -> Plan:
    """A plan; what is not an option of the algorithm or `nodes` is about attention."""
    nodes, options = more.pop("nodes", 1), {k: more.pop(k) for k in ("layout", "kv_documents") if k in more}
    attention = AttentionConfig(**{"heads": 6, "kv_heads": 2, "head_dim": 16, **more})
    return build_plan(Documents(lengths), Topology(nodes, ranks // nodes), attention, algorithm, **options)


def picture(plan: Plan) -> Figure:
    return tile_map(PlanSummary(plan))


def check_squares(plan: Plan) -> None:
    """With a pixel for each pair of tokens, coloured pixels times heads are the plan's work, and owners hold the keys."""
    queries, keys = np.arange(plan.documents.tokens), np.arange(plan.kv_documents.tokens)
    seen = visible(plan, queries, keys)
    assert seen.sum() * 6 == plan.work().sum()
    for rank in range(plan.ranks):
        squares = computed_squares(plan, rank, queries, keys, seen)
        for (part, _), work, owners in zip(plan.step_order(), plan.work()[rank], squares, strict=True):
            part_plan = plan.parts_or_self[part]
            heads = int(np.diff(part_plan.q_layout_compute.head_range(rank, 6))[0])
            assert (owners >= 0).sum() * heads == work
            for owner in np.unique(owners[owners >= 0]).tolist():
                doc = plan.kv_documents.document_of(tokens := np.flatnonzero((owners == owner).any(0)))
                shift = part_plan.kv_documents.offsets[doc] - plan.kv_documents.offsets[doc]
                assert np.isin(tokens + shift, part_plan.kv_layout_compute.tokens(owner)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_coloured_pairs_are_the_work_of_each_step(algorithm: str, kind: str) -> None:
    check_squares(plan_of(algorithm, **KINDS[kind]))


def test_coloured_pairs_are_the_work_of_a_plan_of_parts_of_trees_and_of_cross_attention() -> None:
    check_squares(mixed_plan(Documents([70, 23, 0, 41, 33]), 4, AttentionConfig(6, 2, 16, window=(50, 0))))
    check_squares(plan_of("direct", mask="full", kv_documents=Documents([3, 90, 17, 200])))
    trees = Documents([300, 120, 80, 200], [-1, 0, 0, 2], [(20, 90), (310, 400)])
    check_squares(build_plan(trees, Topology(1, 3), AttentionConfig(6, 2, 16, window=(400, 0)), "ring"))


def words(figure: Any) -> list[tuple[str, Any]]:
    """Texts of a figure and their boxes in pixels."""
    figure.canvas.draw()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


CASES: dict[str, dict[str, Any]] = {
    "ring": {},
    "hierarchical": {"algorithm": "hierarchical"},
    "nodes": {"algorithm": "double_ring", "nodes": 2},
    "unequal heads": {"algorithm": "ulysses", "heads": 5, "kv_heads": 5, "ranks": 7, "lengths": [3, 90]},
    "cross, heads": {"algorithm": "ulysses", "mask": "full", "kv_documents": Documents([3, 900, 17, 2000])},
    "many ranks": {"ranks": 11},
    "32 ranks": {"ranks": 32, "nodes": 4},
    "100 ranks": {"ranks": 100},
    "one rank": {"ranks": 1},
    "empty": {"lengths": [0]},
    "no documents": {"lengths": []},
    "large numbers": {"lengths": [900_000_000, 700_000_000]},
}


@pytest.mark.parametrize("case", CASES)
def test_words_neither_overlap_nor_leave_the_page(case: str) -> None:
    figure = picture(plan_of(**CASES[case]))
    boxes = words(figure)
    width, height = figure.canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for (first, a), (other, b) in combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, f"{first!r} overlaps {other!r}"


@pytest.mark.parametrize(
    ("algorithm", "ranks"), [*product(["ring", "ulysses", "hierarchical"], [8, 32, 128]), ("ring", 520)]
)
def test_a_map_fits_a_screen(algorithm: str, ranks: int) -> None:
    figure = picture(plan_of(algorithm, lengths=[9000, 300, 70], ranks=ranks, nodes=ranks // 8, heads=32, kv_heads=8))
    width, height = figure.get_size_inches() * figure.dpi
    assert width <= 1920 and height <= 1080


def test_of_many_ranks_spaced_ones_and_the_busiest_are_drawn() -> None:
    plan = plan_of("direct", lengths=[3000, 70, 40] * 9, ranks=100, layout="balanced")
    work, tokens = plan.work().sum(1), plan.layout.token_counts
    busiest = int(work.argmax())
    figure = picture(plan)
    said = {line for text, _ in words(figure) for line in text.splitlines()}
    drawn = sorted({*range(0, 100, 4), busiest})
    assert f"Drawn are {len(drawn)} of 100 ranks, 4 apart, and rank {busiest}, with most work." in said
    assert {f"rank {rank}" for rank in drawn} <= said and ("rank 1" in said) == (busiest == 1)
    (bars,) = figure.axes[0].child_axes
    for container, values in zip(bars.containers, (work, tokens), strict=True):
        shares = values[drawn] / values.mean()
        assert [bar.get_width() for bar in container] == pytest.approx(shares)


def texts(**case: Any) -> list[str]:
    return [line for text, _ in words(picture(plan_of(**case))) for line in text.splitlines()]


def test_words_say_who_holds_what() -> None:
    ring = texts(algorithm="ring")
    assert {"rank 3", "step 3", "work / mean", "ring over 4 ranks; documents: 4 (70, 3, 0, 410)"} <= set(ring)
    assert {"heads 0 (kv 0)", "heads 1-2 (kv 0)"} <= set(texts(algorithm="ulysses"))
    assert {"rank 0 (node 0)", "rank 3 (node 1)"} <= set(texts(algorithm="double_ring", nodes=2))
    assert any("whole document" in text for text in texts(algorithm="direct", layout="balanced", lengths=UNEVEN))
    cross = texts(algorithm="direct", mask="full", kv_documents=Documents([3, 900, 17, 2000]))
    assert "direct over 4 ranks; documents: 4 (70, 3, 0, 410); their keys: 4 (3, 900, 17, 2,000)" in cross
    assert any(" queries, " in text and text.endswith(" keys") for text in cross)
    parts = mixed_plan(Documents([70, 23, 40, 41]), 4, AttentionConfig(6, 2, 16))
    names = {text for text, _ in words(picture(parts))}
    assert {"step 0.0", "step 1.0", "step 2.0", "step 0.1"} <= names
    assert any("0 by direct; 1 by head_split; 2 by head_split" in " ".join(text.split()) for text in names)


@pytest.mark.parametrize(
    ("case", "shaded"),
    [
        ({"ranks": 32, "lengths": [32768]}, True),
        ({"ranks": 32, "lengths": [32768], "algorithm": "ulysses", "heads": 32, "kv_heads": 32}, False),
        ({"ranks": 4, "lengths": [20] * 300}, True),
        ({"ranks": 4, "lengths": [*[3] * 300, 9000]}, False),  # most of the work is in large tiles
    ],
    ids=["32", "ulysses", "small documents", "small and large"],
)
def test_squares_are_shaded_where_tiles_are_too_small_to_be_seen(case: dict[str, Any], shaded: bool) -> None:
    said = " ".join(texts(**case))
    assert ("The darker, the more work" in said) == shaded and ("Grey: what the mask" in said) != shaded


def image_of(figure: Any) -> np.ndarray:
    (image,) = figure.axes[0].images
    pixels: np.ndarray = np.asarray(image.get_array())
    return pixels


def test_the_image_has_the_colours_of_the_owners_and_grey() -> None:
    pixels = image_of(picture(plan_of("ring")))
    palette = {tuple(np.round(colour, 6)) for colour in rank_colours(4)}
    colours = {tuple(np.round(colour, 6)) for colour in pixels.reshape(-1, 3)}
    assert colours == palette | {(GREY,) * 3, (0.6,) * 3, (1.0,) * 3}  # the mask, frames, nothing


def test_shades_are_work() -> None:
    plan = plan_of("all_gather", lengths=[20] * 300, ranks=3)
    pixels, work = image_of(picture(plan)), plan.work()
    side = pixels.shape[0] // 3
    for rank in range(3):
        for step, share in enumerate(work[rank] / work.max()):
            colour = pixels[rank * side + side // 3, step * (pixels.shape[1] // work.shape[1]) + side // 3]
            assert colour == pytest.approx(1 - share * np.array([0.9, 0.7, 0.45]))


def test_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name, says in (
        ("missing/map.png", "there is no folder .*missing; create it"),
        ("folder.png", "cannot be written"),
        ("map.pdf", "valid"),
    ):
        with pytest.raises(ConfigError, match=says):
            write_png(picture(plan_of(ranks=2)), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
    assert write_png(picture(plan_of(ranks=2)), tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
