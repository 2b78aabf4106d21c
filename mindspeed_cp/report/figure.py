"""New matplotlib figures and their PNG files.  matplotlib is imported when a figure is made."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_cp.errors import ConfigError, shortened
from mindspeed_cp.report.files import check_output_path, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, dpi: int, **options: Any) -> Figure:
    """Return an empty white figure that belongs to no pyplot window.

    Args:
        width, height: inches.
        dpi: pixels per inch.
        options: further arguments of matplotlib's Figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "the picture needs matplotlib, which is not installed; valid: pip install 'matplotlib>=3.8'; the tables of "
            "mindspeed-cp plan and simulate have the same figures"
        ) from None
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def write_png(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a PNG file, and return its path.

    Raises:
        ConfigError: the file has another suffix, or cannot be written.
    """
    target = check_output_path("--png", path, (".png",))
    return write_atomically("--png", target, lambda new: figure.savefig(new, format="png"))


def drawn_text(text: str, limit: int = 300) -> str:
    """Return a text as matplotlib draws it letter by letter: a `$` begins no formula, and half characters are escaped.

    Args:
        text: words that may come from outside, such as the name of a folder.
        limit: characters, of which the middle is left out beyond that.
    """
    return shortened(text, limit).encode("utf-8", "backslashreplace").decode().replace("$", r"\$")


def rank_colours(ranks: int) -> list[tuple[float, float, float]]:
    """Return a colour for each rank; neighbours differ, none is grey."""
    few = ["1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2", "bcbd22", "17becf"]
    if ranks <= len(few):
        return [(int(c[:2], 16) / 255, int(c[2:4], 16) / 255, int(c[4:], 16) / 255) for c in few[:ranks]]
    return [
        colorsys.hsv_to_rgb(rank / ranks, (0.55, 0.9)[rank % 2], (0.9, 0.7, 0.8)[rank % 3]) for rank in range(ranks)
    ]
