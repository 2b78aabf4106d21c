"""A matplotlib figure that notebooks show.  Imports matplotlib; :mod:`.figure` imports this when a figure is made."""

from __future__ import annotations

from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: Pixels per inch of a picture in a notebook, which stores every picture: enough for small text, less than on paper.
NOTEBOOK_DPI = 88


class PngFigure(Figure):
    """Figure without pyplot. A notebook shows it without `%matplotlib inline`, which only figures of pyplot need."""

    def __init__(self, width: float, height: float, dpi: int) -> None:
        super().__init__(figsize=(width, height), dpi=dpi, facecolor="white")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        """Return the picture as a PNG file, for IPython."""
        file = BytesIO()
        self.savefig(file, dpi=NOTEBOOK_DPI, format="png")
        return file.getvalue()
