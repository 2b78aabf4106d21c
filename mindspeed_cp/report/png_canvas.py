"""Canvas for pictures of simulated layers: places in inches, and the meanings of colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_cp.report.text import drawn_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_WIDTH, MARGIN = 16.0, 0.35  # inches

TIMELINE_COLOURS = {
    "forward": "#4c7fc4",
    "linear": "#a9bfd9",
    "backward": "#27497c",
    "exposed": "#e0483e",
    "late": "#f3c4bd",
    "near": "#e6a323",
    "far": "#8d55b8",
    "bound": "#2b8a57",
    "shared": "#9aa5b1",
}
TIMELINE_LABELS = {
    "forward": "attention, forward",
    "linear": "linear layers",
    "backward": "attention, backward",
    "exposed": "waits for messages that are due",
    "late": "waits for the slowest rank",
    "near": "messages that reach it from its node",
    "far": "messages from other nodes",
    "bound": "the bound: perfect balance, nothing exposed",
}


class Canvas:
    """A figure with places in inches from its upper left corner."""

    def __init__(self, figure: Figure, height: float, width: float = FIGURE_WIDTH) -> None:
        self.figure, self.height, self.width = figure, height, width

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return axes without a frame."""
        place = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, labelsize=8, colors="0.3")
        return axes

    def text(self, left: float, top: float, words: str, points: float = 9, **how: Any) -> float:
        """Write words at a place, and return where they end."""
        artist = self.figure.text(
            left / self.width, 1 - top / self.height, drawn_text(words), fontsize=points, va="center", **how
        )
        return float(artist.get_window_extent().x1) / self.figure.dpi
