"""Figures of many batches: speeds, means, and lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.published.systems import BASE, COMPARATORS, OURS, VARIANTS

#: Of a system's column.
WIDTH = 14


@dataclass(frozen=True)
class Row:
    """One setting: a cluster, heads, a set of lengths and a number of ranks.

    Attributes:
        cluster, heads, lengths, ranks: of the setting.
        seconds: of one layer, forward and backward, by system: one of each batch, None where it cannot run it.
        bound: seconds that no plan beats, of each batch.
        ways: what each system chose for each batch, by system.
        steps: seconds of one training step of all batches, by system.
        why: for batches in which another system is faster than ours, what takes both their time.
        seeds: of each batch.
        documents: number of documents of each batch, and tokens of the longest.
    """

    cluster: str
    heads: str
    lengths: str
    ranks: int
    seconds: dict[str, list[float | None]]
    bound: list[float]
    ways: dict[str, list[str]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    documents: list[tuple[int, int]] = field(default_factory=list)

    def speed(self, system: str, over: str = BASE) -> np.ndarray | None:
        """Return how many times as fast it is as another system, fp64 [batches]; None where one of the two cannot run
        it."""
        times, base_times = self.seconds.get(system), self.seconds.get(over)
        if not times or not base_times or None in times or None in base_times:
            return None
        return np.array(base_times, float) / np.array(times, float)

    def best_other(self, without: Sequence[str] = VARIANTS) -> np.ndarray:
        """Return the seconds of the fastest published system, batch by batch, fp64 [batches]; upper comparators do not
        count."""
        left_out = (OURS, *COMPARATORS, *without)
        others = [times for name, times in self.seconds.items() if name not in left_out]
        return np.array([min(time for time in times if time is not None) for times in zip(*others, strict=True)])

    def against(self, without: Sequence[str] = VARIANTS) -> np.ndarray:
        """Return how many times as fast ours is as the fastest published system, batch by batch, fp64 [batches]."""
        return self.best_other(without) / np.array(self.seconds[OURS], float)

    def first(self, count: int) -> Row:
        """Return the row of the first batches alone; without steps."""
        seconds = {name: times[:count] for name, times in self.seconds.items()}
        batches = {"bound": self.bound[:count], "seeds": self.seeds[:count], "documents": self.documents[:count]}
        return replace(self, seconds=seconds, steps={}, why=[], **batches)

    @property
    def fraction(self) -> np.ndarray:
        """The bound over ours, fp64 [batches]."""
        return np.array(self.bound) / np.array(self.seconds[OURS], float)


def header(systems: Sequence[str]) -> str:
    """Return the header of the table whose rows :func:`line` returns."""
    return (
        f"{'cluster':8}{'lengths':11}{'heads':6}{'ranks':>5}{'ring ms':>9}"
        + "".join(f"{name:>{WIDTH}}" for name in systems if name != BASE)
        + f"{'/others':>9}{'least':>7}{'bound':>7}"
    )


def line(row: Row, systems: Sequence[str]) -> str:
    """Return a row: the even ring's time, how many times as fast each system is on average, ours against the fastest
    other (mean and least of the batches), and the fraction of the bound."""
    base = np.mean(np.array(row.seconds[BASE], float))
    text = f"{row.cluster:8}{row.lengths:11}{row.heads:6}{row.ranks:5}{1e3 * base:9.1f}"
    for name in systems:
        if name != BASE:
            speed = row.speed(name)
            text += f"{'-':>{WIDTH}}" if speed is None else f"{speed.mean():{WIDTH - 1}.2f}x"
    against = row.against()
    return f"{text}{against.mean():9.2f}{against.min():7.2f}{row.fraction.mean():7.3f}"


def step_line(row: Row, systems: Sequence[str]) -> str:
    """Return a row of training steps: the even ring's time, and how many times as fast each system's step is."""
    text = f"{row.cluster:8}{row.lengths:11}{row.heads:6}{row.ranks:5}{row.steps[BASE]:9.2f}"
    for name in systems:
        if name != BASE:
            text += f"{row.steps[BASE] / row.steps[name]:{WIDTH - 1}.2f}x" if name in row.steps else f"{'-':>{WIDTH}}"
    return text + f"{row.steps[OURS]:9.2f} s"


def markdown(title: str, rows: Sequence[Row]) -> list[str]:
    """Return rows as a table for a page: one line for each cluster, heads and ranks, over all sets of lengths."""
    systems = [name for name in rows[0].seconds if name != BASE]
    out = [
        f"**{title}**", "",
        f"| cluster | heads | ranks | {BASE}, ms | {' | '.join(systems)} | over published: mean, least | bound |",
        "|" + "---|" * (len(systems) + 6),
    ]  # fmt: skip
    for key in dict.fromkeys((row.cluster, row.heads, row.ranks) for row in rows):
        rows_of_key = [row for row in rows if (row.cluster, row.heads, row.ranks) == key]
        base = np.mean([time for row in rows_of_key for time in row.seconds[BASE] if time is not None])
        cells = []
        for name in systems:
            speeds = [speed for speed in (row.speed(name) for row in rows_of_key) if speed is not None]
            cells.append(f"{np.concatenate(speeds).mean():.2f}" if speeds else "-")
        against, fraction = (
            np.concatenate([f(row) for row in rows_of_key]) for f in (Row.against, lambda row: row.fraction)
        )
        cells += [f"{against.mean():.2f}, {against.min():.2f}", f"{fraction.mean():.3f}"]
        out.append(f"| {' | '.join(map(str, key))} | {1e3 * base:.1f} | {' | '.join(cells)} |")
    return [*out, ""]


@dataclass(frozen=True)
class Summary:
    """Of rows, all of the same heads or of all.

    Attributes:
        speed: ours over the even ring: the mean of its batches for each cluster, and of these the mean as `overall`.
        against: ours over the fastest other system: mean, and least, of the rows' means; and the least batch.
        variants: the same with the variants that are not published among the others.
        fraction: of the bound: mean, 5 % quantile, least, of all batches.
    """

    speed: dict[str, float]
    overall: float
    against: tuple[float, float, float]
    variants: tuple[float, float, float]
    fraction: tuple[float, float, float]


def summarize(rows: Sequence[Row]) -> Summary:
    """Return the figures of several rows; every cluster counts alike, however many rows it has."""
    speed = {}
    for cluster in dict.fromkeys(row.cluster for row in rows):
        speeds = [row.speed(OURS) for row in rows if row.cluster == cluster]
        speed[cluster] = float(np.concatenate([values for values in speeds if values is not None]).mean())
    fraction = np.concatenate([row.fraction for row in rows])
    return Summary(
        speed,
        float(np.mean(list(speed.values()))),
        _three([row.against() for row in rows]),
        _three([row.against(()) for row in rows]),
        (float(fraction.mean()), float(np.quantile(fraction, 0.05)), float(fraction.min())),
    )


def _three(of_rows: Sequence[np.ndarray]) -> tuple[float, float, float]:
    means = [float(values.mean()) for values in of_rows]
    return float(np.mean(means)), min(means), float(np.concatenate(list(of_rows)).min())


def summary_text(name: str, summary: Summary) -> str:
    """Return a summary in a few lines."""
    speeds = ", ".join(f"{cluster} {speed:.2f}" for cluster, speed in summary.speed.items())
    mean, row, batch = summary.against
    v_mean, v_row, v_batch = summary.variants
    f_mean, p5, least = summary.fraction
    return (
        f"{name}: ours over the even ring {summary.overall:.2f}x ({speeds}); over the fastest published system of each "
        f"batch {mean:.2f}x (least row {row:.2f}, least batch {batch:.2f}), with variants by cost {v_mean:.2f}x "
        f"({v_row:.2f}, {v_batch:.2f}); fraction of the bound mean {f_mean:.3f}, p5 {p5:.3f}, least {least:.3f}"
    )


def target_text(name: str, rows: Sequence[Row], least: float) -> str:
    """Return how many batches of rows reach so much of the fastest published system's speed."""
    against = np.concatenate([row.against() for row in rows])
    below = int((against < least).sum())
    result = "in all" if not below else f"in all but {below}"
    return f"{name}: at least {least:g} times as fast as the fastest published {result} of {len(against)} batches"


def why_slower(
    seconds: tuple[float, float, float], ours: tuple[float, float, float], other: tuple[float, float, float]
) -> str:
    """Return what takes the time of ours and of a faster system.

    Args:
        seconds: of ours, of the other, and the bound.
        ours, other: mean busy seconds of a rank, those of the busiest, and mean seconds of waiting for messages.
    """

    def parts(values: tuple[float, float, float], total: float) -> str:
        mean, most, waits = (1e3 * value for value in values)
        return f"{1e3 * total:.2f} ms: busy {mean:.2f} on average, {most:.2f} at most, waits {waits:.2f}"

    return f"ours {parts(ours, seconds[0])}; it {parts(other, seconds[1])}; bound {1e3 * seconds[2]:.2f}"
