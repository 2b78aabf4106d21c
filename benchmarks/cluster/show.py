"""Figures of a cluster run: medians, ratios, bytes; and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.network import Shape

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A variant on a set of batches.

    Attributes:
        variant: its name.
        seconds: median of the repeats, for each batch.
        ratios: how many times as fast as the base it is, for each batch.
        busy: share of the time that the mean rank computes by the model, mean over batches.
        imbalance: modelled compute of the busiest rank over the mean, mean over batches.
        planned: bytes that cross NICs, by what the plan's messages hold, mean of batches.
        counted: bytes that NICs sent, as they counted them.
        busiest: share of its rate that the busiest direction of a NIC has over the whole time, mean.
        cores: busy cores of this machine, mean.
        own: of these, those that the ranks kept busy.
    """

    variant: str
    seconds: list[float]
    ratios: list[float]
    busy: float
    imbalance: float
    planned: float
    counted: float
    busiest: float
    cores: float
    own: float


def wrong_bytes(rows: Iterable[Row]) -> list[str]:
    """Return a line for each run whose ranks handed other numbers of bytes to gloo than their plan says."""
    out = []
    for row in rows:
        handed = [sum(rank["handed"]) for rank in row["ranks"]]
        if handed != row["planned"]:
            out.append(f"{row['variant']}, {row['batch']} {row['number']}: sent {handed}, planned {row['planned']}")
    return out


def across(row: Row, shape: Shape) -> int:
    """Return the bytes that ranks handed over for ranks of other nodes."""
    return sum(
        size
        for rank, figures in enumerate(row["ranks"])
        for peer, size in enumerate(figures["handed"])
        if shape.node(rank) != shape.node(peer)
    )


def busiest_nic(row: Row, shape: Shape) -> float:
    """Return the bytes of the busiest direction of a NIC."""
    bytes_of_nics = [0.0] * (2 * shape.nodes * shape.nics)
    for rank, figures in enumerate(row["ranks"]):
        bytes_of_nics[2 * shape.nic(rank)] += figures["nic_sent"]
        bytes_of_nics[2 * shape.nic(rank) + 1] += figures["nic_received"]
    return max(bytes_of_nics)


def figures(rows: Sequence[Row], shape: Shape, base: str) -> list[Figure]:
    """Return the figures, one for each variant, in the order of the rows."""
    batches = sorted({row["number"] for row in rows})
    variants = list(dict.fromkeys(row["variant"] for row in rows))

    def median(variant: str, number: int) -> float:
        return statistics.median(r["seconds"] for r in rows if r["variant"] == variant and r["number"] == number)

    bases = {number: median(base, number) for number in batches} if base in variants else {}
    out = []
    for variant in variants:
        rows_of_variant = [row for row in rows if row["variant"] == variant]
        seconds = [median(variant, number) for number in batches]
        ratios = [bases[number] / s for number, s in zip(batches, seconds, strict=True)] if bases else []
        mean_busy = [statistics.mean(row["busy"]) for row in rows_of_variant]
        out.append(
            Figure(
                variant,
                seconds,
                ratios,
                statistics.mean(busy / row["seconds"] for busy, row in zip(mean_busy, rows_of_variant, strict=True)),
                statistics.mean(
                    max(row["busy"]) / busy for busy, row in zip(mean_busy, rows_of_variant, strict=True) if busy
                ),
                statistics.mean(across(row, shape) for row in rows_of_variant),
                statistics.mean(sum(rank["nic_sent"] for rank in row["ranks"]) for row in rows_of_variant),
                statistics.mean(
                    busiest_nic(row, shape) * 8 / shape.nic_rate / row["seconds"] for row in rows_of_variant
                ),
                statistics.mean(row["ranks"][0]["cores"] for row in rows_of_variant),
                statistics.mean(sum(rank["own"] for rank in row["ranks"]) for row in rows_of_variant),
            )
        )
    return out


def busy_machine(rows: Sequence[Row], cores: int) -> str | None:
    """Return a warning if nearly all cores of the machine were busy, which may have slowed the ranks; else None."""
    mean = statistics.mean(row["ranks"][0]["cores"] for row in rows)
    own = statistics.mean(sum(rank["own"] for rank in row["ranks"]) for row in rows)
    if mean < 0.8 * cores:
        return None
    return (
        f"{mean:.1f} of this machine's {cores} cores were busy, {own:.1f} of them for the ranks: times are longer than "
        "they would be on an idle machine, most of all the short ones"
    )


def layer_table(title: str, all_figures: Sequence[Figure], factor: float | None, base: str) -> Table:
    """Return the table of one set of batches; without a factor times are this machine's own."""
    table = Table(title=title, title_justify="left", caption="* modelled", caption_justify="left")
    table.add_column("", min_width=30)
    heads = (
        "ms here", "ms at full speed", f"x {base}: mean", "least", "most", "busy*", "imbalance*",
        "MB over NICs: handed", "counted", "busiest NIC", "cores: ranks' of all",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for figures in all_figures:
        mean = statistics.mean(figures.seconds) * 1e3
        ratios = [f"{f(figures.ratios):.2f}" for f in (statistics.mean, min, max)] if figures.ratios else ["", "", ""]
        table.add_row(
            figures.variant, f"{mean:.0f}", f"{mean / factor:.2f}" if factor else "-", *ratios,
            f"{figures.busy:.0%}", f"{figures.imbalance:.2f}",
            f"{figures.planned / 1e6:.2f}", f"{figures.counted / 1e6:.2f}", f"{figures.busiest:.0%}",
            f"{figures.own:.1f} of {figures.cores:.1f}",
        )  # fmt: skip
    return table


def console() -> Console:
    """Return a console that is wide enough for the tables if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
