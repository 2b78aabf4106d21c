"""Plans, simulated layers and comparisons in notebooks::

    from mindspeed_cp.report.notebook import draw, show

    show(plan)                              # tables
    draw(plan)                              # a picture
    draw(timeline, ranks=[0, 1, 8, 9])

Tables are HTML without scripts; pictures are PNG files, which notebooks show without `%matplotlib inline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.plan import omitted_note, plan_tables, ranks_in_table, summarize_plan
from mindspeed_cp.report.simulation import conclusion, simulation_tables
from mindspeed_cp.report.text import Table, format_bytes, html_of_tables
from mindspeed_cp.report.tile_map import tile_map
from mindspeed_cp.report.timelines import comparison_figure, lower_bound, timeline_figure
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


def show(shown: Plan | Timeline | Comparison) -> Tables:
    """Return tables of a plan, a simulated layer or a comparison of algorithms.

    A plan's tables say what it is about, and what each rank holds, computes and sends. The others have modelled times.
    """
    if isinstance(shown, Plan):
        tables, sentence = plan_tables(summarize_plan(shown))[:-1], ""
    elif isinstance(shown, Timeline):
        tables, sentence = _timeline_tables(shown), ""
    else:
        tables, sentence = simulation_tables(shown), conclusion(shown)
    return Tables(html_of_tables(tables, sentence), repr(shown))


def draw(drawn: Plan | Timeline | Comparison, ranks: Sequence[int] | None = None) -> Picture:
    """Return a picture of a plan (:mod:`.tile_map`), a simulated layer or a comparison (:mod:`.timelines`).

    Args:
        drawn: what is drawn.
        ranks: ranks of a simulated layer; default: all, of too many the busiest, the one that waits longest and others.

    Raises:
        ConfigError: matplotlib is not installed, or `ranks` is empty, names a rank that does not exist, or is given for
            a plan or a comparison.
    """
    if isinstance(drawn, Timeline):
        return Picture(timeline_figure(drawn, ranks), repr(drawn))
    if ranks is not None:
        raise ConfigError(f"ranks to draw: is {list(ranks)} for a {type(drawn).__name__}; valid: None")
    figure = tile_map(drawn) if isinstance(drawn, Plan) else comparison_figure(drawn)
    return Picture(figure, repr(drawn))


def _timeline_tables(timeline: Timeline) -> list[Table]:
    """Return two tables of a simulated layer: its times, and those of each rank; modelled, in ms."""
    cluster, exposed, bound = timeline.cluster, timeline.exposed, lower_bound(timeline)
    busy = timeline.compute + timeline.linear
    of_bound = f" ({100 * bound / timeline.total:.1f} % of the time)" if timeline.total else ""
    about = (
        ("algorithm", timeline.plan.algorithm),
        ("ranks", f"{timeline.ranks}: {timeline.plan.topology.nodes} x {cluster.ranks_per_node} of {cluster.name}"),
        ("time", f"{_ms(timeline.total)} ms: one layer, forward and backward, until the last rank is done"),
        ("lower bound", f"{_ms(bound)} ms{of_bound}: perfect balance, nothing exposed"),
        ("computes", f"{_ms(busy.mean())} ms, mean of ranks"),
        ("exposed communication", f"{_ms(exposed.mean())} ms, mean of ranks; {_ms(timeline.hidden.mean())} ms hidden"),
        ("imbalance", f"{timeline.imbalance:.3f} (busiest rank / mean)"),
    )
    columns = ("rank", "attention ms", "linear ms", "exposed ms", "waits for slowest ms", "sent")
    times = np.stack([timeline.compute, timeline.linear, exposed, timeline.waiting - exposed], 1)
    sent = timeline.bytes_sent
    rows = tuple((str(rank), *map(_ms, times[rank]), format_bytes(sent[rank])) for rank in ranks_in_table(busy))
    title = f"Ranks, both directions{omitted_note(timeline.ranks)}"
    return [Table("Simulated (modelled, not measured)", ("", ""), about), Table(title, columns, rows)]


def _ms(seconds: float) -> str:
    """Return seconds as ms with four significant digits, and no exponent for those that occur."""
    return f"{seconds * 1e3:,.4g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
