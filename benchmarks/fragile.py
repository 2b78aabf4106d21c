"""What is left of the planner's lead where its constants are wrong.

    python -m benchmarks.fragile [--clusters a2 a3 h200 a800] [--heads mha gqa8] [--ranks 16 64] [--batches 1]
                                 [--sets wikipedia prolong pareto bimodal one-giant] [--json FILE]

Each row changes one constant of the preset. *Unaware*: the plan is made by the preset, as `algorithm: hierarchical`
makes it, and runs where the constant is other. *Aware*: it is made by the changed constants. Both stand beside the
fastest of the published systems (`benchmarks.published`) that keep up on these batches, whose options are chosen by
what the cluster really is. Times are modelled. 4,096 tokens a rank, one row over all ranks. The defaults, 80 batches,
take 20 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.arguments import Arguments, new_file, positive
from benchmarks.data import HEADS, SETS
from benchmarks.published.bases import TOKENS, Bench, Place, bound
from benchmarks.published.systems import OURS
from benchmarks.published.timing import Candidate, layer
from mindspeed_cp import Documents, build_plan
from mindspeed_cp.cluster import Cluster
from mindspeed_cp.cluster.calibration import preset_values
from mindspeed_cp.errors import ConfigError

#: Systems beside which the planner stands.
RIVALS = ("USP", "DHP", "verl", "FlexSP")

#: Changes by name: factors of the preset's values.
CHANGES: dict[str, tuple[tuple[str, float], ...]] = {
    "as the preset": (),
    "launch x 7": (("launch", 7.0),),
    "posting x 4": (("posting", 4.0),),
    "posting x 10": (("posting", 10.0),),
    "latencies x 4": (("in_node_latency", 4.0), ("network_latency", 4.0)),
    "NIC x 0.7": (("nic_bandwidth", 0.7),),
    "links in nodes x 0.7": (("pair_bandwidth", 0.7), ("rank_bandwidth", 0.7)),
    "attention x 0.6": (("attention_efficiency", 0.6),),
    "linear layers x 0.7": (("linear_efficiency", 0.7),),
    "tile rows x 2": (("tile_rows", 2.0),),
}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--clusters", nargs="+", default=["a2", "a3", "h200", "a800"])
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--ranks", type=positive, nargs="+", default=[16, 64])
    sets = ["wikipedia", "prolong", "pareto", "bimodal", "one-giant"]
    parser.add_argument("--sets", nargs="+", default=sets, choices=list(SETS))
    parser.add_argument("--batches", type=positive, default=1, help="of each setting")
    parser.add_argument("--changes", nargs="+", default=list(CHANGES), choices=list(CHANGES), metavar="CHANGE")
    parser.add_argument("--json", type=new_file, help="write every figure there")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = run(options, Path(folder))
    except ConfigError as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps(rows))


def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return by change what ours is over the fastest published system and of the bound, and print the table."""
    rows: dict[str, dict[str, list[float]]] = {}
    for change in options.changes:
        rows[change] = {"unaware": [], "aware": [], "bound": [], "aware_bound": []}
    for place, documents in batches(options):
        bench = Bench()
        for change in options.changes:
            where = replace(place, changed=CHANGES[change])
            rivals = [timed.seconds for name in RIVALS if (timed := bench.time(name, [documents], where))]
            unaware = bench.time(OURS, [documents], where)
            assert unaware is not None, "ours runs every batch"
            seconds = {"unaware": unaware.seconds, "aware": aware_seconds(documents, where, folder)}
            least = bound([documents], where)
            for name, total in seconds.items():
                rows[change][name].append(min(rivals, default=float("inf")) / total)
                rows[change]["bound" if name == "unaware" else "aware_bound"].append(least / total)
    print(
        "modelled; over the fastest of " + ", ".join(RIVALS) + ": mean, 5 % quantile, least; of the bound: mean, least"
    )
    print(f"{'':22}{'unaware':>24}{'of the bound':>16}{'aware':>24}{'of the bound':>16}")
    for change, row in rows.items():
        print(
            f"{change:22}{over(row['unaware'])}{of_bound(row['bound'])}{over(row['aware'])}{of_bound(row['aware_bound'])}"
        )
    return rows


def batches(options: argparse.Namespace) -> Iterator[tuple[Place, Documents]]:
    """Yield where each batch runs, and its documents."""
    for cluster in options.clusters:
        for heads in options.heads:
            for ranks in options.ranks:
                for name in options.sets:
                    for seed in range(options.batches):
                        lengths = SETS[name](TOKENS * ranks, ranks, np.random.default_rng([seed, ranks]))
                        yield Place(cluster, heads, ranks), Documents(lengths)


def aware_seconds(documents: Documents, place: Place, folder: Path) -> float:
    """Return the seconds of a layer by the plan that is made by what the cluster really is."""
    case = place.case(documents, place.ranks)
    truth = place.truth(case.cluster)
    topology = replace(case.topology, cluster=str(written(truth, place, folder)))
    plan = build_plan(documents, topology, case.attention, "hierarchical")
    return layer(Candidate("aware", plan), truth).total


def written(cluster: Cluster, place: Place, folder: Path) -> Path:
    """Return a file of a changed cluster."""
    change = "-".join(f"{name}-{factor}" for name, factor in place.changed)
    path = folder / f"{place.name}-{place.ranks}-{change}.yaml"
    path.write_text(json.dumps(preset_values(cluster)))
    return path


def over(values: list[float]) -> str:
    """Return mean, 5 % quantile and least of ratios, as text."""
    return f"{np.mean(values):10.3f}{np.quantile(values, 0.05):7.3f}{min(values):7.3f}"


def of_bound(values: list[float]) -> str:
    """Return mean and least of ratios, as text."""
    return f"{np.mean(values):9.3f}{min(values):7.3f}"


if __name__ == "__main__":
    main()
