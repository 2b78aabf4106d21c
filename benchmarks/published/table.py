"""Figures of many batches: speeds, means, and lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.data import real_lengths_folder
from benchmarks.published.bases import TOKENS
from benchmarks.published.systems import BASE, OURS
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
        why: for batches in which another system is faster than ours, what takes both their time.
        seeds: of each batch.
        documents: number of documents of each batch, and tokens of the longest.
        fullest: tokens of the fullest rank over the mean of all, by system, one of each batch that it can run.
    """

    cluster: str
    heads: str
    lengths: str
    ranks: int
    seconds: dict[str, list[float | None]]
    bound: list[float]
    ways: dict[str, list[str]] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    documents: list[tuple[int, int]] = field(default_factory=list)
    fullest: dict[str, list[float]] = field(default_factory=dict)

    def speed(self, system: str) -> np.ndarray | None:
        """Return how many times as fast a system is as the even ring, fp64 [batches]; None where it cannot run them."""
        times, base_times = self.seconds.get(system), self.seconds[BASE]
        if not times or None in times or None in base_times:
            return None
        return np.array(base_times, float) / np.array(times, float)

    def against(self) -> np.ndarray:
        """Return how many times as fast ours is as the fastest published system, batch by batch, fp64 [batches]."""
        others = [times for name, times in self.seconds.items() if name != OURS]
        best = [min(time for time in times if time is not None) for times in zip(*others, strict=True)]
        return np.array(best) / np.array(self.seconds[OURS], float)

    def first(self, count: int) -> Row:
        """Return the row of the first batches alone."""
        seconds = {name: times[:count] for name, times in self.seconds.items()}
        batches = {"bound": self.bound[:count], "seeds": self.seeds[:count], "documents": self.documents[:count]}
        return replace(self, seconds=seconds, why=[], **batches)

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


def summary(name: str, rows: Sequence[Row]) -> str:
    """Return the figures of several rows in a few lines.

    Ours over the even ring: every cluster counts alike, however many rows it has. Over the fastest published system:
    mean, and least, of the rows' means, and the least batch.
    """
    by_cluster: dict[str, list[np.ndarray]] = {}
    for row in rows:
        speed = row.speed(OURS)
        if speed is not None:
            by_cluster.setdefault(row.cluster, []).append(speed)
    means = {cluster: float(np.concatenate(speeds).mean()) for cluster, speeds in by_cluster.items()}
    speeds = ", ".join(f"{cluster} {mean:.2f}" for cluster, mean in means.items())
    against, fraction = [row.against() for row in rows], np.concatenate([row.fraction for row in rows])
    fullest = [share for row in rows for share in row.fullest.get(OURS, [])]
    tokens = (
        f"; tokens of the fullest rank {np.mean(fullest):.2f} x the mean, most {max(fullest):.2f}" if fullest else ""
    )
    of_rows = [values.mean() for values in against]
    return (
        f"{name}: ours over the even ring {np.mean(list(means.values())):.2f}x ({speeds}); over the fastest published "
        f"system of each batch {np.mean(of_rows):.2f}x (least row {min(of_rows):.2f}, least batch "
        f"{np.concatenate(against).min():.2f}); fraction of the bound mean {fraction.mean():.3f}, p5 "
        f"{np.quantile(fraction, 0.05):.3f}, least {fraction.min():.3f}{tokens}"
    )


def target_text(name: str, rows: Sequence[Row], least: float) -> str:
    """Return how many batches of rows reach so much of the fastest published system's speed."""
    against = np.concatenate([row.against() for row in rows])
    below = int((against < least).sum())
    result = "in all" if not below else f"in all but {below}"
    return f"{name}: at least {least:g} times as fast as the fastest published {result} of {len(against)} batches"


def assumptions(clusters: Sequence[str], lengths: Sequence[str], bf16: bool) -> list[str]:
    """Return the text that stands beside the tables."""
    out = [
        "All times are modelled: one layer of 32 heads of 128 channels (gqa8: 8 key/value heads), hidden size 4,096, a",
        f"gated FFN 8/3 as wide, causal, bf16, forward and backward, {TOKENS:,} tokens a rank, no tensor parallelism.",
        "Gradients of keys and values travel in " + ("bf16 in all systems but ours." if bf16 else "fp32."),
        "Ours: the one plan of `algorithm: hierarchical` by the preset, without options;",
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
    for name in lengths:
        out.append(f"{name}: {'real lengths' if real_lengths_folder(name) else 'bins of configs/lengths'}")
    out.append(f"speeds are those over the {BASE}; '-': the system cannot run it (fewer heads than ranks)")
    return out
