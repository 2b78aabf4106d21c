"""Plans, simulated layers and comparisons in notebooks::

    from mindspeed_cp.report.notebook import draw, show

    show(plan)                              # tables
    draw(plan)                              # a picture
    draw(timeline)

Tables are HTML without scripts; pictures are PNG files, which notebooks show without `%matplotlib inline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.plan import PlanSummary, plan_tables
from mindspeed_cp.report.simulation import conclusion, simulation_tables
from mindspeed_cp.report.text import html_of_tables
from mindspeed_cp.report.tile_map import tile_map
from mindspeed_cp.report.timelines import comparison_figure, timeline_figure
from mindspeed_cp.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTEBOOK_DPI = 88  # notebooks store every picture: enough for small text, less than in files


@dataclass(frozen=True, repr=False)
class Tables:
    """Tables that a notebook shows."""

    html: str
    name: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:  # of a console, which shows no HTML
        return f"Tables({self.name})"


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A picture that a notebook shows; `figure` is matplotlib's, with `savefig`, and belongs to no pyplot window."""

    figure: Figure
    name: str

    def __repr__(self) -> str:
        return f"Picture({self.name})"

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.figure.savefig(file, dpi=NOTEBOOK_DPI, format="png")
        return file.getvalue()


def show(shown: Plan | Comparison) -> Tables:
    """Return tables of a plan or of a comparison of algorithms.

    A plan's tables say what it is about, and what each rank holds, computes and sends. The others have modelled times.
    """
    if isinstance(shown, Plan):
        return Tables(html_of_tables(plan_tables(PlanSummary(shown))), repr(shown))
    return Tables(html_of_tables(simulation_tables(shown), conclusion(shown)), repr(shown))


def draw(drawn: Plan | Timeline | Comparison) -> Picture:
    """Return a picture of a plan (:mod:`.tile_map`), a simulated layer or a comparison (:mod:`.timelines`).

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if isinstance(drawn, Plan):
        return Picture(tile_map(PlanSummary(drawn)), repr(drawn))
    figure = timeline_figure(drawn) if isinstance(drawn, Timeline) else comparison_figure(drawn)
    return Picture(figure, repr(drawn))
