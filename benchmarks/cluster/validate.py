"""Predicted against measured: the simulator's layer times beside those of the emulated cluster.

The simulator gets the preset and the factor of :class:`benchmarks.cluster.scale.Scale`, and one measured number: the
seconds of a turn with almost no bytes, which are gloo's and this machine's and not the preset's (a ring of eight tokens
on a rank). LinkQueues are shared as TCP shares them here, "fifo" (:mod:`mindspeed_cp.simulate.link_queues`). Nothing
else is fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.scale import VARIANTS, Batch, Scale, plan_for
from mindspeed_cp import simulate_plan
from mindspeed_cp.cluster import LayerCost

Row = dict[str, Any]


#: A ring of so few tokens on a rank sends next to nothing; its turns show what a turn takes all the same.
FEW = 8

#: Of two algorithms whose measured times differ by less than this, either may be first.
ALIKE = 1.05


@dataclass(frozen=True)
class Case:
    """One algorithm on one batch at one rate of NICs; seconds of the emulation."""

    rate: int
    batch: str
    variant: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def empty_batch(ranks: int) -> Batch:
    """Return the batch of the turns without bytes."""
    return Batch("latency", 0, (FEW * ranks,))


def turn_seconds(rows: Sequence[Row], ranks: int) -> float:
    """Return the seconds of a turn, from the ring's runs on `empty_batch`: n - 1 turns wait for keys in each direction,
    and one more for the last gradients."""
    seconds = statistics.median(row["seconds"] for row in rows if row["batch"] == "latency")
    return seconds / (2 * (ranks - 1) + 1)


def predicted(name: str, batch: Batch, scale: Scale, nodes: int, turn: float) -> float:
    """Return the simulated seconds of a layer's attention, in seconds of the emulation.

    Args:
        name: of the variant.
        batch: its documents.
        scale: of the emulation's time.
        nodes: of the cluster.
        turn: seconds of a message with almost no bytes.
    """
    cluster = scale.cluster.with_values(in_node_latency=turn / scale.seconds, network_latency=turn / scale.seconds)
    attention = scale.attention
    no_linear = LayerCost(0.0, attention.heads * attention.head_dim)
    return simulate_plan(plan_for(name, batch, scale, nodes), cluster, no_linear, sharing="fifo").total * scale.seconds


def cases_of(rows: Sequence[Row], batches: Sequence[Batch], scale: Scale, nodes: int) -> list[Case]:
    """Return every algorithm on every batch, from the rows of one cluster."""
    turn = turn_seconds(rows, nodes * scale.cluster.ranks_per_node)
    out = []
    for batch in batches:
        for name in VARIANTS:
            rows_of_case = [
                row["seconds"]
                for row in rows
                if (row["batch"], row["number"], row["variant"]) == (batch.name, batch.number, name)
            ]
            seconds = predicted(name, batch, scale, nodes, turn)
            out.append(
                Case(scale.nic_rate, f"{batch.name} {batch.number}", name, statistics.median(rows_of_case), seconds)
            )
    return out


def in_order(cases: Sequence[Case]) -> bool:
    """Return True if the prediction orders the algorithms of one batch as the measurement does."""
    return all(
        (first.measured < second.measured) == (first.predicted < second.predicted)
        for first, second in combinations(cases, 2)
        if max(first.measured, second.measured) > ALIKE * min(first.measured, second.measured)
    )


def groups(cases: Sequence[Case]) -> list[list[Case]]:
    """Group the cases by batch and rate."""
    keys = dict.fromkeys((case.rate, case.batch) for case in cases)
    return [[case for case in cases if (case.rate, case.batch) == key] for key in keys]


def error_table(cases: Sequence[Case]) -> Table:
    """Return a table of all cases and their errors."""
    table = Table(title="predicted (modelled) against measured, one attention layer", title_justify="left")
    for head in ("NICs, Mbit/s", "batch", "algorithm", "measured, ms", "predicted, ms", "error"):
        table.add_column(head, justify="left" if head in ("batch", "algorithm") else "right")
    for group in groups(cases):
        for case in group:
            table.add_row(
                f"{case.rate / 1e6:g}", case.batch, case.variant,
                f"{1e3 * case.measured:.0f}", f"{1e3 * case.predicted:.0f}", f"{case.error:+.1%}",
            )  # fmt: skip
        table.add_section()
    return table


def verdict(cases: Sequence[Case]) -> str:
    """Return the mean and largest error, and how often the order is right."""
    errors = [abs(case.error) for case in cases]
    cases_by_group = groups(cases)
    right = sum(in_order(group) for group in cases_by_group)
    worst = max(cases, key=lambda case: abs(case.error))
    return (
        f"{len(cases)} cases: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%} ({worst.variant}, "
        f"{worst.batch}, {worst.rate / 1e6:g} Mbit/s); order of the algorithms right in {right} of "
        f"{len(cases_by_group)} "
        f"batches (times within {ALIKE - 1:.0%} of each other count as either)"
    )


def wrong_bytes(rows: Iterable[Row]) -> list[str]:
    """Return a line for each run whose ranks handed other numbers of bytes to gloo than their plan says."""
    out = []
    for row in rows:
        handed = [sum(rank["handed"]) for rank in row["ranks"]]
        if handed != row["planned"]:
            out.append(f"{row['variant']}, {row['batch']} {row['number']}: sent {handed}, planned {row['planned']}")
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


def console() -> Console:
    """Return a console that is wide enough for the tables if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
