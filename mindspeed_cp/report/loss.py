"""The curves of a training run, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_loss(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Loss and, below it, learning rate and gradient norm over steps.

    Args:
        metrics: lines of metrics.jsonl.
        path: PNG file to write; replaced at once.
        title: above the curves.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    marker = "." if len(steps) < 50 else None
    loss.plot(steps, [line["loss"] for line in metrics], marker=marker, linewidth=1.2)
    loss.set(ylabel="loss (nats per byte)", title=title)
    loss.grid(alpha=0.3)
    rate.plot(steps, [line["lr"] for line in metrics], color="tab:green", linewidth=1)
    rate.set_ylabel("learning rate", color="tab:green")
    rate.set_xlabel("step")
    norm = rate.twinx()
    norm.plot(steps, [line["grad_norm"] for line in metrics], color="tab:orange", linewidth=0.8, alpha=0.8)
    norm.set_ylabel("gradient norm", color="tab:orange")
    temporary = path.with_name(f".{path.stem}.new.png")
    figure.savefig(temporary, dpi=110)
    temporary.replace(path)
