"""The picture of docs/varlen_ring.md: time over perfect balance by the share of long documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.varlen_ring.ways import BASE

#: Ways that are drawn: one line each.
DRAWN = (BASE, "sorted", "zig-zag of documents", "sorted, zig-zag", "by time, zig-zag", "by time, hierarchical", "pool")


def draw(file: Path, long_percent: Sequence[float], means: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw two panels: a dense model, whose replicas wait at the end of a step, and experts over replicas.

    Args:
        file: PNG, which is replaced.
        long_percent: of the tokens in long documents, of each mix.
        means: by way, "step" and "experts": time over perfect balance of each mix.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    titles = ("replicas wait once a step", "replicas wait in every micro-batch (experts)")
    for axes, key, title in zip(panels, ("step", "experts"), titles, strict=True):
        for name in DRAWN:
            axes.plot(long_percent, means[name][key], marker="o", label=name)
        axes.set(xlabel="% of the tokens in long documents", title=title)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="time over perfect balance, modelled")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=120)
    plt.close(figure)
