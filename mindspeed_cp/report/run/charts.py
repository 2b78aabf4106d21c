"""Charts of a run: predicted and measured time of steps and ranks, and training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.errors import shortened
from mindspeed_cp.report.files import check_output_path, replace_file, write_atomically
from mindspeed_cp.report.run.predicted_vs_measured import BREAKDOWN_LABELS, PredictedVsMeasured, per_rank_values
from mindspeed_cp.report.run.step_traces import TimeBreakdown
from mindspeed_cp.report.text import drawn_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR_LIMIT = 16  # the newest steps, the first ranks

BREAKDOWN_COLOURS = {
    "attention": "tab:blue",
    "other": "tab:cyan",
    "optimizer": "0.7",
    "exposed": "tab:red",
    "waiting": "tab:orange",
}


def draw_predicted_vs_measured(result: PredictedVsMeasured, path: str | Path) -> Path:
    """Write a chart with a pair of bars for each step and for each rank.

    Args:
        result: predicted and measured steps.
        path: PNG file to write.

    Raises:
        ConfigError: the file cannot be written, or has another suffix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = check_output_path("--png", path, (".png",))
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    steps, ranks = figure.subplots(1, 2)
    pairs = result.pairs[-BAR_LIMIT:]
    _bars(
        steps,
        [f"step {pair.number}" for pair in pairs],
        [[_values(pair.predicted), _values(pair.measured)] for pair in pairs],
    )
    steps.set_title("mean of the ranks")
    last = pairs[-1]
    numbers = range(min(BAR_LIMIT, len(last.step.ranks)))
    _bars(
        ranks,
        [f"rank {rank}" for rank in numbers],
        [[_values(last.predicted, rank), _values(last.measured, rank)] for rank in numbers],
    )
    ranks.set_title(f"ranks in step {last.number}")
    handles, labels = steps.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    predicted = f"predicted (upper bars, modelled on cluster {result.cluster_name})"
    figure.suptitle(drawn_text(f"{shortened(result.run.name)}: {predicted} and measured (lower bars)"))
    return write_atomically("--png", target, lambda new: figure.savefig(new, dpi=110, format="png"))


def _values(breakdown: TimeBreakdown, rank: int | None = None) -> dict[str, float]:
    """Return the seconds of each category on one rank; None: the mean of the ranks."""
    values = {key: per_rank_values(breakdown, key) for key in BREAKDOWN_COLOURS}
    return {key: float(value.mean() if rank is None else value[rank]) for key, value in values.items()}


def _bars(axes: Axes, names: Sequence[str], pairs: Sequence[Sequence[dict[str, float]]]) -> None:
    """Draw stacked horizontal bars, two for each name: predicted above measured."""
    positions = np.arange(len(names), dtype=float)
    for index, shift in enumerate((-0.2, 0.2)):
        left = np.zeros(len(names))
        for key, colour in BREAKDOWN_COLOURS.items():
            width = np.array([pair[index][key] for pair in pairs]) * 1e3
            style: dict[str, Any] = {"label": BREAKDOWN_LABELS[key]} if index else {"alpha": 0.5, "hatch": "///"}
            axes.barh(positions + shift, width, 0.36, left=left, color=colour, edgecolor="white", linewidth=0, **style)
            left += width
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def draw_training_curves(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the loss and, below it, learning rate and gradient norm over steps.

    Args:
        metrics: lines of metrics.jsonl.
        path: PNG file to write; replaced at once.
        title: text above the curves.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    marker = "." if len(steps) < 50 else None
    loss.plot(steps, _with_gaps(metrics, "loss"), marker=marker, linewidth=1.2)
    loss.set(ylabel="loss (nats per byte)", title=drawn_text(title, 80))
    loss.grid(alpha=0.3)
    rate.plot(steps, [line["lr"] for line in metrics], color="tab:green", linewidth=1)
    rate.set_ylabel("learning rate", color="tab:green")
    rate.set_xlabel("step")
    norm = rate.twinx()
    norm.plot(steps, _with_gaps(metrics, "grad_norm"), color="tab:orange", linewidth=0.8, alpha=0.8)
    norm.set_ylabel("gradient norm", color="tab:orange")
    replace_file(path, lambda new: figure.savefig(new, dpi=110, format="png"))


def _with_gaps(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the values of the steps; a skipped step may have none, which leaves a gap in the curve."""
    return [float("nan") if line[key] is None else line[key] for line in metrics]
