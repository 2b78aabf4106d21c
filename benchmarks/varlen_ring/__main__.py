"""python -m benchmarks.varlen_ring: see the package's description."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

import benchmarks.varlen_ring
from benchmarks.varlen_ring.mixes import BORDER, draw_lengths, packed_rows
from benchmarks.varlen_ring.picture import draw
from benchmarks.varlen_ring.ways import BASE, WAYS, Figures, Setting, perfect_seconds, run
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.errors import ConfigError

#: Times of Figures that are printed over perfect balance.
TIMES = ("step", "experts")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options.

    Raises:
        ConfigError: a number is out of range, or there is no such cluster or folder.
    """
    parser = argparse.ArgumentParser(
        "python -m benchmarks.varlen_ring",
        description=benchmarks.varlen_ring.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cluster", default="h800")
    parser.add_argument("--replicas", type=int, default=4, help="data-parallel replicas")
    parser.add_argument("--ranks", type=int, default=8, help="context-parallel ranks of a replica")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of a replica in a global batch")
    parser.add_argument("--context", type=int, default=131072, help="tokens of a row, and of the longest document")
    parser.add_argument("--long", type=float, nargs="+", default=[0, 30, 50, 70, 100], help="%% of the tokens")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, help="draw the picture there")
    parser.add_argument("--csv", type=Path, help="write a line for each batch and way there")
    options = parser.parse_args(argv)
    for name in ("replicas", "ranks", "rows", "batches"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}; valid: a whole number from 1")
    if options.context < BORDER:
        raise ConfigError(f"--context is {options.context}; valid: {BORDER} or more")
    if options.seed < 0:
        raise ConfigError(f"--seed is {options.seed}; valid: a whole number from 0")
    if not all(0 <= percent <= 100 for percent in options.long):
        raise ConfigError(f"--long is {' '.join(map(str, options.long))}; valid: percent, from 0 to 100")
    ranks_per_node = load_cluster(options.cluster).ranks_per_node
    if options.ranks > ranks_per_node:
        raise ConfigError(f"--ranks is {options.ranks}; valid for cluster {options.cluster}: at most {ranks_per_node}")
    for switch, file in (("--png", options.png), ("--csv", options.csv)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{switch} {file}: there is no folder {file.absolute().parent}")
    return options


def draw_rows(setting: Setting, long_percent: float, seed: int) -> list[np.ndarray]:
    """Return the lengths of the documents of each packed row of a global batch."""
    # The packer shuffles by the stream of default_rng(seed): lengths need another one, or they are in its order.
    lengths = draw_lengths(long_percent / 100, setting.context, np.random.default_rng([seed, 0, 1]))
    return packed_rows(lengths, setting.context, setting.replicas * setting.rows, seed)


def measure(options: argparse.Namespace, percent: float) -> dict[str, list[Figures]]:
    """Return the figures of every way, one of each batch, with times over perfect balance."""
    setting = Setting(options.cluster, options.replicas, options.ranks, options.rows, options.context)
    figures: dict[str, list[Figures]] = {name: [] for name in WAYS}
    for seed in range(options.seed, options.seed + options.batches):
        rows = draw_rows(setting, percent, seed)
        perfect = perfect_seconds(rows, setting)
        for name, way in WAYS.items():
            result = run(way, rows, setting)
            figures[name].append(
                Figures(result.step / perfect, result.experts / perfect, result.replicas, result.inside)
            )
    return figures


def mean_of(figures: Sequence[Figures], name: str) -> float:
    """Return the mean of one of the figures over batches."""
    return float(np.mean([getattr(batch, name) for batch in figures]))


def recovered(figures: dict[str, list[Figures]], way: str, name: str) -> float:
    """Return the part of what the varlen ring loses that a way recovers, of mean times over perfect balance."""
    base, other = mean_of(figures[BASE], name), mean_of(figures[way], name)
    return (base - other) / (base - 1) if base > 1 else 0.0


def table(percent: float, figures: dict[str, list[Figures]]) -> list[str]:
    """Return the rows of a mix."""
    lines = []
    for name, batches in figures.items():
        cells = ""
        for key in TIMES:
            worst = max(getattr(batch, key) for batch in batches)
            cells += f"{mean_of(batches, key):9.3f} ({worst:6.3f}){100 * recovered(figures, name, key):8.0f} %"
        replicas, inside = mean_of(batches, "replicas"), mean_of(batches, "inside")
        lines.append(f"{percent:5g} %  {name:22}{cells}{replicas:10.3f}{inside:9.3f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of every mix, and return the exit code: 2 for invalid options."""
    try:
        options = parse_options(argv)
    except ConfigError as error:
        print(f"python -m benchmarks.varlen_ring: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    print(
        f"{options.replicas} replicas of {options.ranks} ranks of {options.cluster}, {options.rows} rows of "
        f"{options.context:,} tokens each, {options.batches} batches; modelled: times over perfect balance, mean "
        "(worst)"
    )
    print(f"{'long':>7}  {'way':22}{'step':>18}{'recovers':>10}{'experts':>18}{'recovers':>10}", end="")
    print(f"{'replicas':>10}{'inside':>9}")
    figures_of_mix = {}
    for percent in options.long:
        figures_of_mix[percent] = measure(options, percent)
        print("\n".join(table(percent, figures_of_mix[percent])), flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    if options.csv:
        _write(options, figures_of_mix)
    if options.png:
        means = {
            name: {key: [mean_of(mix[name], key) for mix in figures_of_mix.values()] for key in TIMES} for name in WAYS
        }
        draw(options.png, options.long, means)
    return 0


def _write(options: argparse.Namespace, figures_of_mix: dict[float, dict[str, list[Figures]]]) -> None:
    with open(options.csv, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(["long percent", "way", "seed", *Figures.__dataclass_fields__])
        for percent, figures in figures_of_mix.items():
            for name, batches in figures.items():
                for number, batch in enumerate(batches):
                    cells = [f"{value:.5f}" for value in asdict(batch).values()]
                    writer.writerow([percent, name, options.seed + number, *cells])


if __name__ == "__main__":
    sys.exit(main())
