"""Curves of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_cp.report.figure import drawn_text, new_figure
from mindspeed_cp.report.files import replace_file


def draw_training_curves(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the loss and, below it, learning rate and gradient norm over steps.

    Args:
        metrics: lines of metrics.jsonl.
        path: PNG file to write; replaced at once.
        title: text above the curves.
    """
    steps = [line["step"] for line in metrics]
    figure = new_figure(8, 5, 110, layout="constrained")
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
    replace_file(path, lambda new: figure.savefig(new, format="png"))


def _with_gaps(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the values of the steps; a skipped step may have none, which leaves a gap in the curve."""
    return [float("nan") if line[key] is None else line[key] for line in metrics]
