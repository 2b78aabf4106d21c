"""The page of a picture of a plan: where its columns, rows, squares, bars and words stand. Inches, y downwards."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.report.summary import PlanSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN, GAP = 0.3, 0.14
LARGEST, WIDEST, TALLEST = 1.8, 40.0, 60.0  # of a square, and of the page
CAPTION = 0.17  # height of a line of small text
LEGEND_LINE = 0.2
READABLE = 1.15  # squares of this size and more have captions


def colours(ranks: int) -> list[tuple[float, float, float]]:
    """A colour for each rank; neighbours differ, none is grey."""
    few = ["1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2", "bcbd22", "17becf"]
    if ranks <= len(few):
        return [(int(c[:2], 16) / 255, int(c[2:4], 16) / 255, int(c[4:], 16) / 255) for c in few[:ranks]]
    return [
        colorsys.hsv_to_rgb(rank / ranks, (0.55, 0.9)[rank % 2], (0.9, 0.7, 0.8)[rank % 3]) for rank in range(ranks)
    ]


def shading(share: float) -> tuple[float, float, float]:
    """From white, for 0, to a dark blue, for 1."""
    return (1 - 0.9 * share, 1 - 0.7 * share, 1 - 0.45 * share)


@dataclass
class Page:
    """Draws on one figure.

    Attributes:
        figure: matplotlib's.
        cell: side of a square.
        rows, steps: of squares.
        captions: whether squares are large enough for words.
        left, holds, before, first, after, bars, bar_width, width: columns from left to right: what a rank holds (begin
            and width), band before the steps, first square, band after the steps, bars (begin and width), page.
        top, pitch: first row of squares, and from row to row.
        shaded: whether squares are shaded instead of filled with tiles.
    """

    figure: Figure
    axes: Any
    cell: float
    rows: int
    steps: int
    captions: bool
    left: float
    holds: float
    before: float
    first: float
    after: float
    bars: float
    bar_width: float
    width: float
    top: float
    pitch: float
    shaded: bool = False

    @staticmethod
    def of(numbers: PlanSummary, dpi: int) -> Page:
        """An empty page for a plan."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows, steps = numbers.work.shape
        band = 0.5 if numbers.moves else 0.0
        left = MARGIN + (0.3 if numbers.topology.nodes > 1 else 0.0)
        bar_width, spare = 1.25, 2.4
        across = (WIDEST - left - spare - 2 * band - bar_width - 2 * MARGIN) / steps - GAP
        down = (TALLEST - 3.0) / rows - GAP
        cell = min(LARGEST, max(0.2, min(across, down)))
        captions = cell >= READABLE
        holds = 1.75 if captions else 0.85
        before = left + holds + GAP
        first = before + band
        after = first + steps * (cell + GAP)
        bars = after + band
        width = max(bars + bar_width + MARGIN, 9.0)
        top = 1.15 + CAPTION * captions
        pitch = cell + GAP + 2 * CAPTION * captions
        height = top + rows * pitch
        figure = Figure(figsize=(width, height), dpi=dpi)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        return Page(
            figure, axes, cell, rows, steps, captions, left, holds, before, first, after, bars, bar_width, width, top,
            pitch,
        )  # fmt: skip

    @property
    def cells(self) -> int:
        """Squares on the page."""
        return self.rows * self.steps

    def column(self, step: int) -> tuple[float, float]:
        """Begin and width of the squares of a step."""
        return self.first + step * (self.cell + GAP), self.cell

    def in_square(self, rank: int, step: int, corners: np.ndarray) -> np.ndarray:
        """Corners in a unit square as places on the page."""
        return corners * self.cell + np.array([self.column(step)[0], self.row(rank)])

    def row(self, rank: int) -> float:
        """Top of the squares of a rank."""
        return self.top + rank * self.pitch

    def words(self, x: float, y: float, text: str, width: float, size: float, least: float = 5.0, **how: Any) -> None:
        """Text no wider than `width`: smaller if need be, and left out where it would be smaller than `least`."""
        if not text:
            return
        artist = self.axes.text(x, y, text, fontsize=size, **how)
        box = artist.get_window_extent()
        extent = (box.height if how.get("rotation") == 90 else box.width) / self.figure.dpi
        if extent > width:
            artist.set_fontsize(size * width / extent * 0.98)
            if artist.get_fontsize() < least:
                artist.remove()

    def title(self, title: str, below: str) -> None:
        """The page's two first lines."""
        room = self.width - 2 * MARGIN
        self.words(MARGIN, 0.3, title, room, 12, weight="bold", va="center")
        self.words(MARGIN, 0.56, below, room, 9, va="center")

    def heading(self, x: float, width: float, text: str) -> None:
        """Above a column."""
        y = self.top - 0.1 - CAPTION * self.captions
        self.words(x + width / 2, y, text, width + GAP, 8.5, ha="center", va="center")

    def rank(
        self,
        rank: int,
        colour: Sequence[float],
        held: str,
        computes: str,
        strips: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """At the left of a row: the rank's colour and name, what it holds in words and as strips of the packed row: for
        each strip pieces [pieces, 2] and borders between documents, as shares of the row."""
        from matplotlib.patches import Rectangle

        x, middle, room = self.left, self.row(rank) + self.cell / 2, self.holds - 0.1
        side = min(0.14, self.cell * 0.5)
        name_at = middle - (0.36 if self.captions else 0.1 if self.cell > 0.4 else 0.0)
        self.axes.add_patch(Rectangle((x, name_at - side / 2), side, side, facecolor=colour))
        self.words(x + 0.2, name_at, f"rank {rank}", room - 0.2, min(10, self.cell * 30), va="center", weight="bold")
        if not self.captions and self.cell <= 0.4:
            return
        if self.captions:
            self.words(x, name_at + 0.22, held, room, 8, va="center")
            self.words(x, name_at + 0.5 + 0.16 * len(strips), computes, room, 8, va="center")
        top = name_at + (0.36 if self.captions else 0.12)
        high, gap = (0.13, 0.03) if self.captions or len(strips) == 1 else (0.06, 0.02)
        for pieces, borders in strips:
            self._strip(x, top, room, high, colour, pieces, borders)
            top += high + gap

    def _strip(
        self, x: float, top: float, room: float, high: float, colour: Any, pieces: np.ndarray, borders: np.ndarray
    ) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, top), room, high, facecolor="0.88"))
        x0, x1 = (x + pieces * room).T
        y0, y1 = np.full_like(x0, top), np.full_like(x0, top + high)
        boxes = np.stack([np.stack([x0, x1, x1, x0], 1), np.stack([y0, y0, y1, y1], 1)], 2)
        self.polygons(list(boxes), [colour])
        self.axes.vlines(x + borders * room, top, top + high, colors="white", linewidth=0.6)

    def node(self, name: str, first: int, last: int) -> None:
        """A bracket at the far left over the ranks of a node."""
        top, bottom = self.row(first), self.row(last) + self.cell
        self.axes.vlines(self.left - 0.12, top, bottom, colors="black", linewidth=1.0)
        self.words(self.left - 0.25, (top + bottom) / 2, name, bottom - top, 8.5, rotation=90, ha="center", va="center")

    def square(self, rank: int, step: int, above: str, below: str) -> None:
        """The frame of a square and its captions; `above` is empty where nothing is computed."""
        from matplotlib.patches import Rectangle

        (x, _), y, c = self.column(step), self.row(rank), self.cell
        self.axes.add_patch(Rectangle((x, y), c, c, fill=False, edgecolor="0.6", linewidth=0.6, zorder=3))
        if not self.captions:
            return
        self.words(x + c / 2, y - 0.08, above or "nothing to compute", c + GAP / 2, 7.5, ha="center", va="center")
        self.words(x + c / 2, y + c + 0.09, below, c + GAP / 2, 7.5, ha="center", va="center", color="0.35")

    def shade(self, rank: int, step: int, share: float, owners: Sequence[Any]) -> None:
        """Fill a square: the darker, the larger `share`, 0 to 1; along its top the colours `owners`."""
        from matplotlib.patches import Rectangle

        (x, _), y, c = self.column(step), self.row(rank), self.cell
        self.axes.add_patch(Rectangle((x, y), c, c, facecolor=shading(share), zorder=1))
        for number, colour in enumerate(owners):
            each = c / len(owners)
            self.axes.add_patch(Rectangle((x + number * each, y), each, c * 0.15, facecolor=colour, zorder=2))

    def polygons(self, corners: Sequence[np.ndarray], fill: Any, line: float = 0.0) -> None:
        """Areas in one go; a thin outline of their own colour keeps the smallest in sight."""
        from matplotlib.collections import PolyCollection

        if len(corners):
            edges = fill if line else "none"
            self.axes.add_collection(
                PolyCollection(corners, facecolors=fill, edgecolors=edges, linewidths=line), autolim=False
            )

    def band(self, x: float, first: int, last: int, text: str) -> None:
        """A band beside the squares over ranks first .. last."""
        from matplotlib.patches import FancyBboxPatch

        top, bottom = self.row(first), self.row(last) + self.cell
        shape = "round,pad=0,rounding_size=0.06"
        self.axes.add_patch(
            FancyBboxPatch((x + 0.04, top), 0.3, bottom - top, boxstyle=shape, facecolor="0.93", edgecolor="0.6")
        )
        size = min(8.5, self.cell * 20)
        self.words(x + 0.19, (top + bottom) / 2, text, bottom - top, size, rotation=90, ha="center", va="center")

    def bar(self, rank: int, share: float, largest: float) -> None:
        """A rank's work over the mean."""
        from matplotlib.patches import Rectangle

        room, height = self.bar_width - 0.45, min(0.3, self.cell * 0.8)
        middle = self.row(rank) + self.cell / 2
        self.axes.add_patch(
            Rectangle((self.bars, middle - height / 2), room * share / largest, height, facecolor="0.45")
        )
        at = self.bars + room / largest
        self.axes.vlines(at, middle - height * 0.75, middle + height * 0.75, colors="black", linewidth=0.8)
        self.words(
            self.bars + room * max(share, 1) / largest + 0.06, middle, f"{share:.2f}", 0.45, min(8, self.cell * 30),
            least=3.0, va="center",
        )  # fmt: skip

    def legend(self, entries: Sequence[tuple[Sequence[Any], str]], notes: Sequence[str]) -> None:
        """Colours and what they mean, then sentences, below everything; the page ends below them."""
        from matplotlib.patches import Rectangle

        y = self.row(self.rows) + 0.1
        for fills, text in entries:
            for index, fill in enumerate(fills):
                place = (MARGIN + 0.16 * index, y - 0.07)
                self.axes.add_patch(Rectangle(place, 0.14, 0.14, facecolor=fill, edgecolor="0.6", linewidth=0.4))
            self.words(MARGIN + 0.6, y, text, self.width - 2 * MARGIN - 0.6, 8.5, va="center")
            y += LEGEND_LINE + 0.03
        for note in notes:
            for line in textwrap.wrap(note, int((self.width - 2 * MARGIN) * 15.5)):
                self.words(MARGIN, y, line, self.width - 2 * MARGIN, 8.5, va="center")
                y += LEGEND_LINE
        self.figure.set_size_inches(self.width, y + 0.1)
        self.axes.set_ylim(y + 0.1, 0)
