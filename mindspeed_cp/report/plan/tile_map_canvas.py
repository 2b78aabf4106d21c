"""Canvas of the tile map of a plan: places of columns, rows, squares, bars and texts, in inches, y downwards."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_cp.report.figure import new_figure
from mindspeed_cp.report.plan.summary import PlanSummary
from mindspeed_cp.report.text import drawn_text

MARGIN, GAP = 0.3, 0.14
MAX_SQUARE, MAX_WIDTH, MAX_HEIGHT = 1.8, 40.0, 60.0  # of a square, and of the page
CAPTION_HEIGHT = 0.17  # height of a line of small text
LEGEND_LINE = 0.2
MIN_CAPTIONED_SQUARE = 1.15  # squares of this size and more have captions


def rank_colours(ranks: int) -> list[tuple[float, float, float]]:
    """Return a colour for each rank; neighbours differ, none is grey."""
    few = ["1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2", "bcbd22", "17becf"]
    if ranks <= len(few):
        return [(int(c[:2], 16) / 255, int(c[2:4], 16) / 255, int(c[4:], 16) / 255) for c in few[:ranks]]
    return [
        colorsys.hsv_to_rgb(rank / ranks, (0.55, 0.9)[rank % 2], (0.9, 0.7, 0.8)[rank % 3]) for rank in range(ranks)
    ]


def shade_of(share: float) -> tuple[float, float, float]:
    """Return a colour between white, for 0, and dark blue, for 1."""
    return (1 - 0.9 * share, 1 - 0.7 * share, 1 - 0.45 * share)


class TileMapCanvas:
    """Draws on one figure.

    Args:
        summary: summary of the plan.
        dpi: pixels per inch.

    Attributes:
        figure, axes: matplotlib's.
        cell: side of a square.
        rows, steps: numbers of squares.
        captions: True if squares are large enough for captions.
        left, holds, before, first, after, bars, bar_width, width: columns from left to right: what a rank holds (begin
            and width), band before the steps, first square, band after the steps, bars (begin and width), the figure.
        top, pitch: first row of squares, and distance between rows.
        shaded: True if squares are shaded by their work instead of filled with tiles.
    """

    def __init__(self, summary: PlanSummary, dpi: int) -> None:
        self.rows, self.steps = summary.work.shape
        band = 0.5 if summary.has_redistribution else 0.0
        self.left = MARGIN + (0.3 if summary.plan.topology.nodes > 1 else 0.0)
        self.bar_width, spare = 1.25, 2.4
        across = (MAX_WIDTH - self.left - spare - 2 * band - self.bar_width - 2 * MARGIN) / self.steps - GAP
        down = (MAX_HEIGHT - 3.0) / self.rows - GAP
        self.cell = min(MAX_SQUARE, max(0.2, min(across, down)))
        self.captions = self.cell >= MIN_CAPTIONED_SQUARE
        self.holds = 1.75 if self.captions else 0.85
        self.before = self.left + self.holds + GAP
        self.first = self.before + band
        self.after = self.first + self.steps * (self.cell + GAP)
        self.bars = self.after + band
        self.width = max(self.bars + self.bar_width + MARGIN, 9.0)
        self.top = 1.15 + CAPTION_HEIGHT * self.captions
        self.pitch = self.cell + GAP + 2 * CAPTION_HEIGHT * self.captions
        self.shaded = False
        height = self.top + self.rows * self.pitch
        self.figure = new_figure("the tile map", self.width, height, dpi)
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(height, 0))
        self.axes.set_axis_off()

    @property
    def cells(self) -> int:
        """Number of squares."""
        return self.rows * self.steps

    def column(self, step: int) -> tuple[float, float]:
        """Return begin and width of the squares of a step."""
        return self.first + step * (self.cell + GAP), self.cell

    def in_square(self, rank: int, step: int, corners: np.ndarray) -> np.ndarray:
        """Return corners in a unit square as places on the canvas."""
        return corners * self.cell + np.array([self.column(step)[0], self.row(rank)])

    def row(self, rank: int) -> float:
        """Return the top of the squares of a rank."""
        return self.top + rank * self.pitch

    def text_fitted(
        self, x: float, y: float, text: str, width: float, size: float, least: float = 5.0, **how: Any
    ) -> None:
        """Write text no wider than `width`: in a smaller size if needed, and not at all below the size `least`."""
        if not text:
            return
        artist = self.axes.text(x, y, drawn_text(text), fontsize=size, **how)
        box = artist.get_window_extent()
        extent = (box.height if how.get("rotation") == 90 else box.width) / self.figure.dpi
        if extent > width:
            artist.set_fontsize(size * width / extent * 0.98)
            if artist.get_fontsize() < least:
                artist.remove()

    def title(self, title: str, below: str) -> None:
        """Write the first two lines."""
        room = self.width - 2 * MARGIN
        self.text_fitted(MARGIN, 0.3, title, room, 12, weight="bold", va="center")
        self.text_fitted(MARGIN, 0.56, below, room, 9, va="center")

    def column_title(self, x: float, width: float, text: str) -> None:
        """Write a title above a column."""
        y = self.top - 0.1 - CAPTION_HEIGHT * self.captions
        self.text_fitted(x + width / 2, y, text, width + GAP, 8.5, ha="center", va="center")

    def draw_rank(
        self,
        rank: int,
        colour: Sequence[float],
        held: str,
        computes: str,
        strips: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Draw colour and name of a rank at the left of its row, and what it holds as text and as strips of the packed
        row.

        A strip is (spans [spans, 2], borders between documents), as shares of the row.
        """
        from matplotlib.patches import Rectangle

        x, middle, room = self.left, self.row(rank) + self.cell / 2, self.holds - 0.1
        side = min(0.14, self.cell * 0.5)
        name_at = middle - (0.36 if self.captions else 0.1 if self.cell > 0.4 else 0.0)
        self.axes.add_patch(Rectangle((x, name_at - side / 2), side, side, facecolor=colour))
        self.text_fitted(
            x + 0.2, name_at, f"rank {rank}", room - 0.2, min(10, self.cell * 30), va="center", weight="bold"
        )
        if not self.captions and self.cell <= 0.4:
            return
        if self.captions:
            self.text_fitted(x, name_at + 0.22, held, room, 8, va="center")
            self.text_fitted(x, name_at + 0.5 + 0.16 * len(strips), computes, room, 8, va="center")
        top = name_at + (0.36 if self.captions else 0.12)
        high, gap = (0.13, 0.03) if self.captions or len(strips) == 1 else (0.06, 0.02)
        for pieces, borders in strips:
            self._draw_strip(x, top, room, high, colour, pieces, borders)
            top += high + gap

    def _draw_strip(
        self, x: float, top: float, room: float, high: float, colour: Any, pieces: np.ndarray, borders: np.ndarray
    ) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, top), room, high, facecolor="0.88"))
        x0, x1 = (x + pieces * room).T
        y0, y1 = np.full_like(x0, top), np.full_like(x0, top + high)
        boxes = np.stack([np.stack([x0, x1, x1, x0], 1), np.stack([y0, y0, y1, y1], 1)], 2)
        self.draw_polygons(list(boxes), [colour])
        self.axes.vlines(x + borders * room, top, top + high, colors="white", linewidth=0.6)

    def draw_node(self, name: str, first: int, last: int) -> None:
        """Draw a bracket at the far left over the ranks of a node."""
        top, bottom = self.row(first), self.row(last) + self.cell
        self.axes.vlines(self.left - 0.12, top, bottom, colors="black", linewidth=1.0)
        self.text_fitted(
            self.left - 0.25, (top + bottom) / 2, name, bottom - top, 8.5, rotation=90, ha="center", va="center"
        )

    def draw_square(self, rank: int, step: int, above: str, below: str) -> None:
        """Draw the frame of a square and its captions; `above` is empty if nothing is computed."""
        from matplotlib.patches import Rectangle

        (x, _), y, side = self.column(step), self.row(rank), self.cell
        self.axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor="0.6", linewidth=0.6, zorder=3))
        if not self.captions:
            return
        self.text_fitted(
            x + side / 2, y - 0.08, above or "nothing to compute", side + GAP / 2, 7.5, ha="center", va="center"
        )
        self.text_fitted(
            x + side / 2, y + side + 0.09, below, side + GAP / 2, 7.5, ha="center", va="center", color="0.35"
        )

    def shade_square(self, rank: int, step: int, share: float, kv_sources: Sequence[Any]) -> None:
        """Fill a square, the darker the larger `share` (0 to 1), with the colours `kv_sources` along its top."""
        from matplotlib.patches import Rectangle

        (x, _), y, side = self.column(step), self.row(rank), self.cell
        self.axes.add_patch(Rectangle((x, y), side, side, facecolor=shade_of(share), zorder=1))
        for number, colour in enumerate(kv_sources):
            width = side / len(kv_sources)
            self.axes.add_patch(Rectangle((x + number * width, y), width, side * 0.15, facecolor=colour, zorder=2))

    def draw_polygons(self, corners: Sequence[np.ndarray], fill: Any, line: float = 0.0) -> None:
        """Draw polygons at once; a thin outline of their own colour keeps the smallest visible."""
        from matplotlib.collections import PolyCollection

        if len(corners):
            edges = fill if line else "none"
            self.axes.add_collection(
                PolyCollection(corners, facecolors=fill, edgecolors=edges, linewidths=line), autolim=False
            )

    def draw_band(self, x: float, first: int, last: int, text: str) -> None:
        """Draw a band beside the squares over ranks first .. last."""
        from matplotlib.patches import FancyBboxPatch

        top, bottom = self.row(first), self.row(last) + self.cell
        shape = "round,pad=0,rounding_size=0.06"
        self.axes.add_patch(
            FancyBboxPatch((x + 0.04, top), 0.3, bottom - top, boxstyle=shape, facecolor="0.93", edgecolor="0.6")
        )
        size = min(8.5, self.cell * 20)
        self.text_fitted(x + 0.19, (top + bottom) / 2, text, bottom - top, size, rotation=90, ha="center", va="center")

    def draw_bar(self, rank: int, share: float, largest: float) -> None:
        """Draw the work of a rank over the mean."""
        from matplotlib.patches import Rectangle

        room, height = self.bar_width - 0.45, min(0.3, self.cell * 0.8)
        middle = self.row(rank) + self.cell / 2
        self.axes.add_patch(
            Rectangle((self.bars, middle - height / 2), room * share / largest, height, facecolor="0.45")
        )
        mean_at = self.bars + room / largest
        self.axes.vlines(mean_at, middle - height * 0.75, middle + height * 0.75, colors="black", linewidth=0.8)
        self.text_fitted(
            self.bars + room * max(share, 1) / largest + 0.06, middle, f"{share:.2f}", 0.45, min(8, self.cell * 30),
            least=3.0, va="center",
        )  # fmt: skip

    def legend(self, entries: Sequence[tuple[Sequence[Any], str]], notes: Sequence[str]) -> None:
        """Draw colours with their meanings, then sentences, below everything; the figure ends below them."""
        from matplotlib.patches import Rectangle

        y = self.row(self.rows) + 0.1
        for fills, text in entries:
            for index, fill in enumerate(fills):
                place = (MARGIN + 0.16 * index, y - 0.07)
                self.axes.add_patch(Rectangle(place, 0.14, 0.14, facecolor=fill, edgecolor="0.6", linewidth=0.4))
            self.text_fitted(MARGIN + 0.6, y, text, self.width - 2 * MARGIN - 0.6, 8.5, va="center")
            y += LEGEND_LINE + 0.03
        for note in notes:
            for line in textwrap.wrap(note, int((self.width - 2 * MARGIN) * 15.5)):
                self.text_fitted(MARGIN, y, line, self.width - 2 * MARGIN, 8.5, va="center")
                y += LEGEND_LINE
        self.figure.set_size_inches(self.width, y + 0.1)
        self.axes.set_ylim(y + 0.1, 0)
