"""Predicted beside measured as a picture: a pair of bars for each step, and one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.report.beside import FIGURES, Beside, figure
from mindspeed_cp.report.files import check_suffix, write_file
from mindspeed_cp.report.measured import Breakdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 16  # the newest steps, the first ranks

COLOURS = {
    "attention": "tab:blue",
    "other": "tab:cyan",
    "optimizer": "0.7",
    "exposed": "tab:red",
    "waiting": "tab:orange",
}


def draw_beside(result: Beside, path: str | Path) -> Path:
    """Write the picture.

    Args:
        result: what is predicted and measured.
        path: PNG file to write.

    Raises:
        ConfigError: the file cannot be written, or has another suffix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = check_suffix("--png", path, (".png",))
    drawing = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(drawing)
    steps, ranks = drawing.subplots(1, 2)
    pairs = result.pairs[-MOST_BARS:]
    _bars(
        steps,
        [f"step {pair.number}" for pair in pairs],
        [[_means(made) for made in (pair.predicted, pair.measured)] for pair in pairs],
    )
    steps.set_title("mean of the ranks")
    last = pairs[-1]
    numbers = range(min(MOST_BARS, len(last.step.ranks)))
    _bars(
        ranks,
        [f"rank {rank}" for rank in numbers],
        [[_of(made, rank) for made in (last.predicted, last.measured)] for rank in numbers],
    )
    ranks.set_title(f"ranks in step {last.number}")
    handles, labels = steps.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    drawing.suptitle(
        f"{result.run.name}: predicted (upper bars, modelled on cluster {result.chosen}) and measured (lower bars)"
    )
    return write_file("--png", target, lambda aside: drawing.savefig(aside, dpi=110, format="png"))


def _means(made: Breakdown) -> dict[str, float]:
    return {key: float(figure(made, key).mean()) for key in COLOURS}


def _of(made: Breakdown, rank: int) -> dict[str, float]:
    return {key: float(figure(made, key)[rank]) for key in COLOURS}


def _bars(axes: Axes, names: Sequence[str], pairs: Sequence[Sequence[dict[str, float]]]) -> None:
    """Stacked horizontal bars, two for each name: predicted above measured."""
    at = np.arange(len(names), dtype=float)
    for which, shift in enumerate((-0.2, 0.2)):
        left = np.zeros(len(names))
        for key, colour in COLOURS.items():
            width = np.array([pair[which][key] for pair in pairs]) * 1e3
            style: dict[str, Any] = {"label": FIGURES[key]} if which else {"alpha": 0.5, "hatch": "///"}
            axes.barh(at + shift, width, 0.36, left=left, color=colour, edgecolor="white", linewidth=0, **style)
            left += width
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
