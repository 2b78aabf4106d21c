"""The rank x step map of a plan's tiles, as a PNG.

Each cell of the grid is what one rank computes in one step: its queries from top to bottom, the rows of the slots it
reads from left to right, a coloured area for every tile (a triangle for a causal one), one colour per document. All
cells have one scale, so areas are work::

              step 0        step 1                   legend of a cell
    rank 0   [\\  .  ]     [##  .  ]  work             -> rows of the slot
    rank 1   [\\  .  ]     [##  .  ]  work           |
                                                     v queries
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import CAUSAL, Plan
from mindspeed_cp.report.summary import PlanSummary, summarize

MOST_TILES = 60_000  # more polygons than this take long and show nothing: cells are then shaded by their work
_GAP = 0.06
_LEGEND = (
    "in a cell: the rank's queries downwards, the step's keys to the right\n"
    "triangle: causal tile, rectangle: full tile, grey: nothing to compute; one colour per document"
)


def draw_tile_map(plan: Plan, path: str | Path, summary: PlanSummary | None = None) -> Path:
    """Write the tile map of a plan's forward to a PNG file.

    Args:
        plan: any plan.
        path: file to write, with the suffix .png.
        summary: `summarize(plan)`, if it is at hand.

    Raises:
        ConfigError: the file cannot be written, or has another suffix.
    """
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"--png {path}: the suffix is {Path(path).suffix!r}; valid: a file name with .png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = summary if summary is not None else summarize(plan)
    ranks, steps = numbers.work.shape
    width, height = min(30.0, max(6.0, 1.3 * steps + 3.2)), min(30.0, max(3.0, 1.3 * ranks + 1.4))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid, bars = figure.subplots(1, 2, width_ratios=[max(steps, 2), 1.1], sharey=True)
    if numbers.tiles.sum() <= MOST_TILES:
        _draw_tiles(grid, plan)
    else:
        _draw_work(grid, numbers)
    legend = "" if numbers.tiles.sum() > MOST_TILES else f"\n{_LEGEND}"
    grid.set(xlim=(0, steps), ylim=(ranks, 0), xlabel=f"step{legend}", ylabel="rank")
    grid.set_xticks(np.arange(steps) + 0.5, [str(step) for step in range(steps)])
    grid.set_yticks(np.arange(ranks) + 0.5, [str(rank) for rank in range(ranks)])
    grid.tick_params(length=0)
    _draw_bars(bars, numbers)
    figure.suptitle(
        f"{numbers.algorithm}: {len(numbers.lengths):,} documents, {int(numbers.lengths.sum()):,} tokens, "
        f"{ranks} ranks; slowest / mean {numbers.imbalance:.3f}",
        fontsize="medium",
    )
    target = Path(path)
    aside = target.with_name(f".{target.name}.new")
    try:
        figure.savefig(aside, dpi=110, format="png")
        aside.replace(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--png {path}: cannot be written: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return target


def _draw_tiles(axes, plan: Plan) -> None:  # type: ignore[no-untyped-def]
    """A polygon for every tile, and a frame for every cell."""
    from matplotlib import color_sequences
    from matplotlib.collections import PolyCollection

    palette = color_sequences["tab20"]
    rows = max(int(plan.layout.token_counts.max()), 1)
    span = max(_widest(plan), 1)
    for rank in range(plan.ranks):
        tiles = plan.forward.tiles(rank)
        capacity = plan.forward.capacity[rank]
        left = np.concatenate([[0], np.cumsum(capacity)])  # slots stand side by side when a step reads several
        documents = plan.q_layout.document_ids(rank)
        polygons: list[np.ndarray] = []
        colours: list[Any] = []
        for step in range(plan.forward.steps):
            mine = tiles[tiles["step"] == step]
            slots = np.unique(mine["slot"])
            base = left[slots[0]] if len(slots) else 0
            for tile in mine:
                polygons.append(_corners(tile, int(left[tile["slot"]] - base), span, rows) + np.array([step, rank]))
                colours.append(palette[int(documents[tile["q_row"]]) % len(palette)])
            polygons.append(np.array([(0, 0), (1, 0), (1, 1), (0, 1)]) * (1 - _GAP) + _GAP / 2 + (step, rank))
            colours.append((0, 0, 0, 0.05))
        axes.add_collection(PolyCollection(polygons, facecolors=colours, linewidths=0))


def _widest(plan: Plan) -> int:
    """Rows of the slots that some rank reads in one step, from the first of these slots to the last."""
    capacity, contents = plan.forward.capacity, plan.forward.contents
    left = np.concatenate([np.zeros((plan.ranks, 1), np.int64), np.cumsum(capacity, 1)], 1)
    cells = plan.ranks, plan.forward.steps
    first, last = np.full(cells, capacity.shape[1]), np.zeros(cells, np.int64)
    np.minimum.at(first, (contents["rank"], contents["step"]), contents["slot"])
    np.maximum.at(last, (contents["rank"], contents["step"]), contents["slot"] + 1)
    at = np.arange(plan.ranks)[:, None]
    return int((left[at, last] - left[at, np.minimum(first, last)]).max(initial=0))


def _corners(tile: np.void, shift: int, span: int, rows: int) -> np.ndarray:
    """Corners of a tile in its unit cell; a causal one lacks the triangle above the diagonal that ends bottom right."""
    top, bottom = int(tile["q_row"]) / rows, int(tile["q_row"] + tile["q_rows"]) / rows
    left, right = (int(tile["k_row"]) + shift) / span, (int(tile["k_row"] + tile["k_rows"]) + shift) / span
    if tile["mask"] == CAUSAL:
        first = (int(tile["k_row"] + tile["k_rows"] - tile["q_rows"]) + shift) / span
        corners = [(left, top), (first, top), (right, bottom), (left, bottom)]
    else:
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return np.array(corners) * (1 - _GAP) + _GAP / 2


def _draw_work(axes, numbers: PlanSummary) -> None:  # type: ignore[no-untyped-def]
    """Shaded cells, for plans with too many tiles to see."""
    ranks, steps = numbers.work.shape
    axes.imshow(numbers.work, aspect="auto", cmap="viridis", extent=(0, steps, ranks, 0))


def _draw_bars(axes, numbers: PlanSummary) -> None:  # type: ignore[no-untyped-def]
    """Work of every rank over the mean."""
    work = numbers.work.sum(1)
    share = work / (work.mean() or 1)
    axes.barh(np.arange(numbers.ranks) + 0.5, share, height=0.8, color="tab:blue")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("work / mean")
    axes.tick_params(left=False)
