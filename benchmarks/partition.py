"""How well documents are placed: imbalance, modelled layer time against the bound that no plan beats, planning time.

    python -m benchmarks.partition [--batches 100] [--clusters a800 h200 a2 a3] [--lengths wikipedia prolong]
                                   [--ranks 16 64 128] [--tokens 4096 8192] [--heads mha gqa8] [--others] [--json FILE]

Batches are drawn from real lengths where ../shared/data/lengths has them, else from the bins of configs/lengths, and
cut at the batch. One layer of 32 heads of 128 channels, forward and backward, with its linear layers. Everything but
the planning time is modelled: kernels by mindspeed_cp.cluster.ComputeCost, messages by the event simulation of
mindspeed_cp.simulate.simulator; nothing was measured on these clusters. The bound is perfect balance with nothing
exposed: all work / ranks. Imbalance is busy time of the busiest rank over the mean. Planning is one core of
this machine: search and programs of all ranks.

The defaults, 9,600 batches, take 21 minutes of one core; --batches 4 takes one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Arguments, new_file, positive
from benchmarks.data import HEADS, real_lengths_folder
from mindspeed_cp import Documents, Topology, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.data.lengths import load_lengths, sample_batch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.simulate.simulator import simulate_plan

#: What else is timed with --others, by name.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring", {}),
    "all-gather": ("all_gather", {}),
    "Ulysses+ring": ("hybrid", {}),
    "direct, balanced": ("direct", {"layout": "balanced"}),
}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--batches", type=positive, default=100)
    parser.add_argument("--clusters", nargs="+", default=["a800", "h200", "a2", "a3"])
    parser.add_argument("--lengths", nargs="+", default=["wikipedia", "prolong"])
    parser.add_argument("--ranks", type=positive, nargs="+", default=[16, 64, 128])
    parser.add_argument("--tokens", type=positive, nargs="+", default=[4096, 8192], help="of each rank")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--others", action="store_true", help="also the modelled time of other algorithms")
    parser.add_argument("--json", type=new_file, help="write every figure there")
    options = parser.parse_args()
    try:
        run(options)
    except ConfigError as error:
        parser.error(str(error))


def run(options: argparse.Namespace) -> None:
    """Print all rows and the sums."""
    folders = {name: real_lengths_folder(name) for name in options.lengths}
    for name in options.lengths:
        load_lengths(name, folders[name])
        print(f"{name}: {'real lengths' if folders[name] else 'bins of configs/lengths'}")
    print("times are modelled, planning is measured; fraction = bound / modelled layer time: mean, 5 % quantile, least")
    titles = (
        f"{'cluster':8}{'lengths':11}{'heads':7}{'ranks':>6}{'tokens':>7}  imbalance median, p90     fraction of bound"
    )
    print(f"{titles}      planning ms" + "".join(f"  x {name}" for name in OTHERS if options.others))
    rows = []
    for cluster in options.clusters:
        for heads in options.heads:
            for name in options.lengths:
                for ranks in options.ranks:
                    for tokens in options.tokens:
                        row = measure(cluster, heads, name, folders[name], ranks, tokens, options)
                        rows.append(row)
                        show(row)
    every = {key: np.concatenate([row[key] for row in rows]) for key in ("imbalance", "fraction")}
    print(summary("all", every))
    for heads in options.heads:
        figures = {key: np.concatenate([row[key] for row in rows if row["heads"] == heads]) for key in every}
        print(summary(heads, figures))
    if options.json:
        options.json.write_text(json.dumps(rows))


def measure(
    name: str, heads: str, lengths: str, folder: Path | None, ranks: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure all batches of one setting."""
    cluster, attention = load_cluster(name), HEADS[heads]
    per_node = min(cluster.ranks_per_node, ranks)
    topology, cluster = Topology(ranks // per_node, per_node, name), cluster.with_ranks(per_node)
    figures: dict[str, list[float]] = {key: [] for key in ("imbalance", "fraction", "model", "planning", *OTHERS)}
    for seed in range(options.batches):
        documents = Documents(sample_batch(lengths, ranks * tokens, seed, folder=folder))
        start = time.perf_counter()
        plan = build_plan(documents, topology, attention, "hierarchical")
        figures["planning"].append(time.perf_counter() - start)
        choice = choose_placement(documents, documents, topology, attention)
        timeline = simulate_plan(plan, cluster)
        busy = timeline.compute + timeline.linear
        figures["imbalance"].append(float(busy.max() / busy.mean()))
        figures["fraction"].append(choice.bound / timeline.total)
        figures["model"].append(choice.score.total / timeline.total)
        for algorithm_name, (algorithm, algorithm_options) in OTHERS.items() if options.others else ():
            figures[algorithm_name].append(
                simulate_plan(build_plan(documents, topology, attention, algorithm, **algorithm_options), cluster).total
                / timeline.total
            )
    return {"cluster": name, "heads": heads, "lengths": lengths, "ranks": ranks, "tokens": tokens, **figures}


def show(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    setting = f"{row['cluster']:8}{row['lengths']:11}{row['heads']:7}{row['ranks']:6}{row['tokens']:7}"
    imbalance, fraction = np.array(row["imbalance"]), np.array(row["fraction"])
    quality = f"   {np.median(imbalance):7.3f} {np.quantile(imbalance, 0.9):7.3f}"
    quality += f"          {fraction.mean():5.2f} {np.quantile(fraction, 0.05):5.2f} {fraction.min():5.2f}"
    others = "".join(f"  {np.mean(row[name]):5.2f}" for name in OTHERS if row[name])
    print(f"{setting}{quality}      {1e3 * np.median(row['planning']):8.1f}{others}", flush=True)


def summary(name: str, figures: dict[str, np.ndarray]) -> str:
    """Return the summary of many settings."""
    imbalance, fraction = figures["imbalance"], figures["fraction"]
    return (
        f"{name}: imbalance median {np.median(imbalance):.3f}, p90 {np.quantile(imbalance, 0.9):.3f}; fraction of the "
        f"bound mean {fraction.mean():.3f}, p5 {np.quantile(fraction, 0.05):.3f}, worst {fraction.min():.3f} "
        f"({len(fraction)} batches)"
    )


if __name__ == "__main__":
    main()
