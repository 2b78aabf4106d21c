"""Figures of many batches: speeds, means, and lines of text."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import real_lengths_folder
from benchmarks.published.bases import TOKENS
from benchmarks.published.systems import BASE, COMPARATORS, OURS, SYSTEMS, VARIANTS
from mindspeed_cp.cluster import load_cluster

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


# A file with a line for each batch: milliseconds of every system.


#: Columns before those of the systems, and behind them.
SETTING = ("table", "cluster", "heads", "lengths", "ranks", "seed", "documents", "longest", "bound ms")
RESULT = ("fastest published", "ours over it", "of the bound")


def write_batches(file: Path, rows_of_table: Mapping[str, Sequence[Row]]) -> None:
    """Write a line for each batch of each row.

    Args:
        file: the file, which is replaced.
        rows_of_table: rows by the name of their table.
    """
    with open(file, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow([*SETTING, *(f"{name} ms" for name in SYSTEMS), *RESULT])
        for table, rows in rows_of_table.items():
            writer.writerows(line for row in rows for line in batch_lines(table, row))


def batch_lines(table: str, row: Row) -> list[list[Any]]:
    """Return the cells of each batch of a row; those of a system that cannot run it are empty."""
    lines = []
    for batch, (seed, lengths) in enumerate(zip(row.seeds, row.documents, strict=True)):
        times = {name: row.seconds[name][batch] for name in SYSTEMS}
        able = {name: seconds for name, seconds in times.items() if seconds is not None}
        others = [name for name in able if name not in (OURS, *VARIANTS, *COMPARATORS)]
        fastest = min(others, key=able.__getitem__)
        result = [fastest, f"{able[fastest] / able[OURS]:.4f}", f"{row.bound[batch] / able[OURS]:.4f}"]
        setting = [table, row.cluster, row.heads, row.lengths, row.ranks, seed, *lengths, _ms(row.bound[batch])]
        lines.append([*setting, *map(_ms, times.values()), *result])
    return lines


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4f}"


# What papers report of these systems, to be read beside what is modelled here.
#
# None of it was measured by this project, and no setting is quite the same: models, lengths and clusters differ.


@dataclass(frozen=True)
class Reported:
    """A published figure.

    Attributes:
        system: whose.
        figure: times as fast.
        over: as what.
        where: the clusters on which it was measured, as the paper says; presets of this project by name.
        source: the paper.
        presets: clusters of this project to which it comes nearest.
        column: the system's name in the tables, if it is in them.
    """

    system: str
    figure: str
    over: str
    where: str
    source: str
    presets: tuple[str, ...] = ()
    column: str | None = None


REPORTED = (
    Reported(
        "Zeppelin", "2.80x on average, up to 6.60x", "the state of the art (steps)",
        "nodes of 8 A800 with 4 x 200 Gb/s, of 8 H800 with 8 NICs, of 8 H200 with 8 x 400 Gb/s", "arXiv 2509.21841",
        ("a800", "h800", "h200"), "Zeppelin",
    ),
    Reported(
        "Zeppelin", "routing alone 1.6x; engine 3.2x; with routing 3.51x; with remap 3.64x",
        "its baseline, lengths of ArXiv (steps)", "not stated in what was at hand", "arXiv 2509.21841",
        ("a800", "h800", "h200"), "Zeppelin",
    ),
    Reported("Megatron dynamic CP", "up to 1.48x", "static context parallelism", "NVIDIA GPUs", "Megatron-core"),
    Reported("ByteScale", "up to 7.89x", "the state of the art (steps)", "NVIDIA GPUs", "arXiv 2502.21231"),
    Reported("FlexSP", "up to 1.98x", "the state of the art (steps)", "NVIDIA GPUs", "arXiv 2412.01523", (), "FlexSP"),
    Reported("WLB-LLM", "1.23x", "its baseline (steps)", "NVIDIA GPUs", "arXiv 2503.17924", (), "WLB-LLM"),
    Reported(
        "DHP", "up to 1.36x", "Megatron-LM and DeepSpeed (steps)", "8 nodes of Ascend 910B", "arXiv 2602.21788",
        ("a2",), "DHP",
    ),
    Reported("TASP", "up to 3.58x", "ring attention (attention alone)", "H100, MI300X", "arXiv 2509.26541"),
    Reported("DistCA", "up to 1.35x", "the state of the art (steps)", "512 H200", "arXiv 2510.18121", ("h200",)),
)  # fmt: skip


def for_cluster(name: str) -> list[Reported]:
    """Return the figures that were measured on a cluster like this one."""
    return [reported for reported in REPORTED if name in reported.presets]


# What stands beside the tables: assumptions, and what papers report.


def assumptions(clusters: Sequence[str], lengths: Sequence[str], bf16: bool, placements: int | None) -> list[str]:
    """Return the text that stands beside the tables."""
    out = [
        "All times are modelled: one layer of 32 heads of 128 channels (gqa8: 8 key/value heads), hidden size 4,096, a",
        f"gated FFN 8/3 as wide, causal, bf16, forward and backward, {TOKENS:,} tokens a rank, no tensor parallelism.",
        "Gradients of keys and values travel in " + ("bf16 in all systems but ours." if bf16 else "fp32."),
        "Ours: the one plan of `algorithm: hierarchical` by the preset, "
        + ("without options;" if placements is None else f"with simulated_placements {placements};"),
        "others: the fastest of their ways in each batch.",
    ]
    for name in clusters:
        c = load_cluster(name)
        out.append(
            f"{name}: {c.ranks_per_node} ranks a node, {c.peak_flops / 1e12:.0f} TFLOP/s, of which attention reaches "
            f"{c.attention_efficiency:g} (tiles of n rows n / (n + {c.tile_rows:g}) of that) and linear layers "
            f"{c.linear_efficiency:g}; {c.fabric}, {c.rank_bandwidth / 1e9:g} GB/s a rank, {c.pair_bandwidth / 1e9:g} "
            f"a pair, {c.nics_per_node} NICs of {c.nic_bandwidth / 1e9:g} GB/s a node, transfers reach "
            f"{c.communication_efficiency:g}; {1e6 * c.launch:g} us a call"
        )
        figures = [
            f"{reported.system} {reported.figure} over {reported.over} ({reported.where}; {reported.source})"
            for reported in for_cluster(name)
        ]
        out += [f"  [reported] {text}" for text in figures] or ["  [reported] nothing for this cluster"]
    for reported in REPORTED:
        if not reported.presets:
            out.append(
                f"[reported] elsewhere: {reported.system} {reported.figure} over {reported.over} ({reported.source})"
            )
    for name in lengths:
        out.append(f"{name}: {'real lengths' if real_lengths_folder(name) else 'bins of configs/lengths'}")
    out.append(f"speeds are those over the {BASE}; '-': the system cannot run it (fewer heads than ranks)")
    return out


def beside_reported(rows: Sequence[Row]) -> list[str]:
    """Return the modelled speeds of systems of the tables beside reported ones, a line for each system and cluster."""
    out = []
    known = dict.fromkeys(
        (reported.column, cluster) for reported in REPORTED if reported.column for cluster in reported.presets
    )
    for column, cluster in known:
        by_row = [row.speed(column) for row in rows if row.cluster == cluster]
        speeds = np.concatenate([np.zeros(0), *(speed for speed in by_row if speed is not None)])
        if len(speeds):
            figures = "; ".join(
                f"{reported.figure} over {reported.over}" for reported in REPORTED if reported.column == column
            )
            out.append(
                f"{column} on {cluster}: modelled {speeds.mean():.2f}x the {BASE} on average, up to "
                f"{speeds.max():.2f}x; [reported] {figures}"
            )
    return out
