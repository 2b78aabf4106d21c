"""Plans and simulations as notebooks show them: small tables in HTML, and figures.

`plot()` and `_repr_html_()` of :class:`mindspeed_cp.Plan`, :class:`mindspeed_cp.Timeline` and
:class:`mindspeed_cp.choose.compare.Comparison` are written here, and imported when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.choose.lower_bounds import balanced_lower_bound
from mindspeed_cp.cluster import ComputeCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Plan, traffic
from mindspeed_cp.plan.pairs import run_pairs
from mindspeed_cp.report.figure import new_figure
from mindspeed_cp.report.html_tables import html_of_tables
from mindspeed_cp.report.plan.tile_map import tile_map
from mindspeed_cp.report.png_canvas import MARGIN, Canvas
from mindspeed_cp.report.simulation.tables import conclusion, simulation_tables
from mindspeed_cp.report.simulation.timeline_png import timeline_figure
from mindspeed_cp.report.simulation.timeline_rows import draw_balance, draw_legend, draw_rank_names, draw_rows
from mindspeed_cp.report.simulation.trace import ranks_to_draw
from mindspeed_cp.report.text import (
    Table,
    describe_attention,
    describe_blocks,
    describe_trees,
    format_bytes,
    format_count,
    format_lengths,
)
from mindspeed_cp.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANK_LIMIT = 16  # a notebook's table of more ranks has the extremes
DPI = 110
WIDTH, NAME_COLUMN, TIME_COLUMN, BALANCE_COLUMN = 11.0, 0.7, 7.9, 1.35  # inches, of a timeline
ROW_HEIGHT, MAX_HEIGHT, MIN_HEIGHT = 0.3, 7.0, 0.6  # of a rank's row, and of all rows


def plan_html(plan: Plan, bytes_per_element: int = 2) -> str:
    """Return a plan as two tables in HTML: what it is about; and rows, pairs and bytes of each rank.

    Tiles are not derived, so it takes milliseconds for any plan that can be built in a notebook.

    Args:
        plan: any plan.
        bytes_per_element: of q, k, v and out.
    """
    topology, attention = plan.topology, plan.attention
    pairs, sent = pairs_of_ranks(plan), traffic(plan, bytes_per_element)
    mean = pairs.sum() / plan.ranks
    cluster = "" if topology.cluster is None else f" of {topology.cluster}"
    about = [
        ("algorithm", plan.algorithm + (f", {len(plan.parts)} parts" if plan.parts else "")),
        ("ranks", f"{plan.ranks}: {topology.nodes} x {topology.ranks_per_node}{cluster}"),
        ("documents", f"{format_lengths(plan.documents.lengths)}, {plan.documents.tokens:,} tokens"),
        ("attention", f"{describe_attention(attention)}; {attention.heads} heads, {attention.kv_heads} of keys/values"),
        ("steps", f"{len(plan.step_order())} forward, {len(plan.step_order('backward'))} backward"),
        ("imbalance of attention", f"{pairs.max() / mean if mean else 1.0:.3f} (busiest rank / mean)"),
    ]
    if plan.kv_documents is not plan.documents:
        about.insert(3, ("keys", f"{format_lengths(plan.kv_documents.lengths)}, {plan.kv_documents.tokens:,} tokens"))
    if plan.documents.trees is not None:
        about.insert(3, ("trees", describe_trees(plan.documents)))
    if plan.documents.blocks is not None:
        about.insert(3, ("blocks", describe_blocks(plan.documents)))
    columns = ("rank", "rows", "pairs", "of mean", "sent forward", "sent backward")
    forward = sent["fetch_forward"] + sent["redistribution_forward"]
    rows = [
        (
            str(rank),
            f"{int(plan.layout.token_counts[rank]):,}",
            format_count(pairs[rank]),
            f"{pairs[rank] / mean:.3f}" if mean else "-",
            format_bytes(forward[rank]),
            format_bytes(sent["total"][rank] - forward[rank]),
        )
        for rank in _ranks_in_table(pairs)
    ]
    what = f"Ranks; pairs are visible (query, key) pairs x heads, bytes are of {bytes_per_element}-byte elements"
    title = f"{what}{_omitted(plan.ranks, 'fewest and the most pairs')}"
    return html_of_tables([Table("Plan", ("", ""), tuple(about)), Table(title, columns, tuple(rows))])


def pairs_of_ranks(plan: Plan) -> np.ndarray:
    """Count the visible (query, key) pairs x query heads of each rank's queries, fp64 [ranks].

    Equals `plan.work().sum(1)` for a plan that :func:`mindspeed_cp.verify_plan` accepts, without deriving tiles.
    """
    out = np.zeros(plan.ranks)
    for part in plan.parts_or_self:
        layout = part.q_layout_compute
        spans = layout.spans
        runs = spans["doc"], spans["start"], spans["stop"]
        pairs = run_pairs(*runs, layout.documents, part.kv_documents, plan.attention)
        heads = layout.head_counts(plan.attention.heads)[spans["rank"]]
        np.add.at(out, spans["rank"], pairs * heads)
    return out


def plot_plan(plan: Plan) -> Figure:
    """Return the picture of :mod:`.plan.tile_map`."""
    return tile_map(plan)


def timeline_html(timeline: Timeline) -> str:
    """Return a simulated layer as two tables in HTML: its times, and those of each rank; modelled, in ms."""
    cluster, exposed, bound = timeline.cluster, timeline.exposed, lower_bound(timeline)
    late = timeline.waiting - exposed
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
    times = np.stack([timeline.compute, timeline.linear, exposed, late], 1)
    sent = timeline.bytes_sent
    rows = tuple((str(rank), *map(_ms, times[rank]), format_bytes(sent[rank])) for rank in _ranks_in_table(busy))
    title = f"Ranks, both directions{_omitted(timeline.ranks, 'least and the most computation')}"
    return html_of_tables([Table("Simulated (modelled, not measured)", ("", ""), about), Table(title, columns, rows)])


def lower_bound(timeline: Timeline) -> float:
    """Return the seconds that no plan of the same batch, ranks and layer can beat."""
    plan = timeline.plan
    cost = ComputeCost(timeline.cluster, plan.attention, timeline.layer)
    return balanced_lower_bound(plan.documents, plan.ranks, cost, plan.kv_documents)


def plot_timeline(timeline: Timeline, ranks: Sequence[int] | None = None) -> Figure:
    """Return a figure with a row for each rank; arguments and errors as for :meth:`mindspeed_cp.Timeline.plot`."""
    shown = ranks_to_draw(timeline) if ranks is None else sorted(set(_checked(ranks, timeline.ranks)))
    topology = timeline.plan.topology
    top, legend, axis = 0.75, 0.62, 0.35
    rows = max(MIN_HEIGHT, min(MAX_HEIGHT, len(shown) * ROW_HEIGHT))
    height = top + rows + axis + legend
    figure = new_figure("the timeline", WIDTH, height, DPI)
    canvas = Canvas(figure, height, WIDTH)
    omitted = f"; {len(shown)} of {timeline.ranks} ranks are drawn" if len(shown) < timeline.ranks else ""
    busy = 100 * float((timeline.compute + timeline.linear).mean()) / timeline.total if timeline.total else 0.0
    name = f"{timeline.plan.algorithm} on {timeline.ranks} ranks of {timeline.cluster.name}, modelled"
    canvas.text(MARGIN, 0.22, name, 12, weight="bold")
    sentence = f"one layer, forward and backward: {_ms(timeline.total)} ms; ranks compute {busy:.0f} % of the time"
    canvas.text(MARGIN, 0.46, f"{sentence}{omitted}", 9.5)
    left = MARGIN + NAME_COLUMN + (0.3 if topology.nodes > 1 else 0.0)
    width = TIME_COLUMN - (0.3 if topology.nodes > 1 else 0.0)
    draw_rows(canvas.axes(left, top, width, rows), timeline, shown, lower_bound(timeline))
    draw_rank_names(canvas, topology, shown, left, top, rows)
    balance = left + width + 0.25
    draw_balance(canvas.axes(balance, top, BALANCE_COLUMN, rows), timeline, shown)
    canvas.text(balance, top - 0.09, "busy time / mean", 8, color="0.3")
    draw_legend(canvas, topology, top + rows + axis, has_bound=True)
    return figure


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison of algorithms in HTML: its sentence and its tables."""
    return html_of_tables(simulation_tables(comparison), conclusion(comparison))


def plot_comparison(comparison: Comparison) -> Figure:
    """Return the picture of :mod:`.simulation.timeline_png`."""
    return timeline_figure(comparison)


def _checked(ranks: Sequence[int], count: int) -> list[int]:
    """Return the ranks. Raises ConfigError if there are none, or one does not exist."""
    numbers = list(ranks)
    wrong = [rank for rank in numbers if not isinstance(rank, (int, np.integer)) or not 0 <= rank < count]
    if wrong or not numbers:
        value = repr(wrong[0]) if wrong else "empty"
        raise ConfigError(f"ranks of plot() is or contains {value}; valid: numbers from 0 to {count - 1}, or None")
    return [int(rank) for rank in numbers]


def _ms(seconds: float) -> str:
    """Return seconds as ms with four significant digits, and no exponent for those that occur."""
    return f"{seconds * 1e3:,.4g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _ranks_in_table(values: np.ndarray) -> list[int]:
    """Return all ranks; of too many those with the least and the largest values."""
    if len(values) <= RANK_LIMIT:
        return list(range(len(values)))
    order, half = np.argsort(values, kind="stable"), RANK_LIMIT // 2
    return sorted(int(rank) for rank in np.concatenate([order[:half], order[-half:]]))


def _omitted(ranks: int, extremes: str) -> str:
    half = RANK_LIMIT // 2
    return "" if ranks <= RANK_LIMIT else f" (the {half} ranks with the {extremes} each, of {ranks})"
