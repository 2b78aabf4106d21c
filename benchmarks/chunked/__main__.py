"""What messages in pieces would bring to the plans that `algorithm: hierarchical` makes by default.

    python -m benchmarks.chunked [--clusters a800 a2] [--heads mha gqa8] [--ranks 16 64 128] [--batches 3]
                                 [--lengths wikipedia prolong] [--tokens 4096] [--posting US] [--launch US]
                                 [--each] [--json FILE]

A message of a step is sent whole, and attention on it begins when all of it is there. Here the finished plans are cut
three ways, and simulated again: fetched keys by rows in more steps, which is what the planner's option `fetch_pieces`
does (algorithms/kv_fetch/pieces.py), documents whose heads are split into more parts (document_pieces.py), and all
messages by heads (head_pieces.py). "edges" cuts only the first part that is redistributed and the last, which have
nothing beside them. "best" is the fastest of all and of the whole plan, in each batch. "free" is the whole plan with
links that take no time: the most that hiding could bring.

Modelled: one layer of 32 heads of 128 channels, forward and backward; percent of the whole plan's time that is saved,
means of the batches. Each piece costs its latencies, launches and posts, and shorter tiles cost more. The means of all
are also printed without the time of posting. --posting and --launch replace the cluster's seconds of posting a message
and of launching a kernel in the simulation, in microseconds; plans stay the same. Batch i of set s is drawn by
default_rng([i, s, 0]), as in benchmarks.scale; lengths are real ones where a checkout has them, else drawn from the
bins of configs/lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.chunked.document_pieces import cut_documents
from benchmarks.chunked.head_pieces import cut_heads
from benchmarks.data import HEADS, real_lengths_folder
from benchmarks.length_sets import SETS
from benchmarks.topologies import place_of
from mindspeed_cp import Documents, Plan, build_plan
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.algorithms.kv_fetch.pieces import cut_fetches
from mindspeed_cp.cluster import Cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

#: Ways to cut a plan, by name.
CUTS: dict[str, Callable[[Plan], Plan]] = {
    "rows 2": lambda plan: cut_fetches(plan, 2),
    "rows 4": lambda plan: cut_fetches(plan, 4),
    "docs 2": lambda plan: cut_documents(plan, (1, 1), (1, 1), (1, 1)),
    "docs 4": lambda plan: cut_documents(plan, (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    "docs edges": lambda plan: cut_documents(plan, (1,), (1, 2), (2, 1)),
    "heads 2": lambda plan: cut_heads(plan, 2),
    "heads 4": lambda plan: cut_heads(plan, 4),
    "heads 2 edges": lambda plan: cut_heads(plan, 2, only_edges=True),
    "heads 4 edges": lambda plan: cut_heads(plan, 4, only_edges=True),
}


#: Cluster, heads, ranks and set of lengths.
Setting = tuple[str, str, int, str]


@dataclass(frozen=True)
class Row:
    """One batch.

    Attributes:
        setting: cluster, heads, ranks and set of lengths.
        fetches: True if the plan fetches keys.
        splits: True if it splits heads.
        bound: modelled seconds of perfect balance with nothing exposed.
        seconds: modelled seconds by way of cutting, with and without the time of posting; "whole" and "free" are the
            plan as it is.
    """

    setting: Setting
    fetches: bool
    splits: bool
    bound: float
    seconds: dict[str, list[float]]

    def saved(self, name: str, posting: int) -> float:
        """Return the share of the whole plan's time that a way of cutting saves; "best": the best of all."""
        whole = self.seconds["whole"][posting]
        names = ["whole", *CUTS] if name == "best" else [name]
        return 1 - min(self.seconds[each][posting] for each in names) / whole


def measure(setting: Setting, lengths: np.ndarray, **changes: float) -> Row:
    """Cut the default plan of a batch in all ways, and simulate.

    Args:
        setting: cluster, heads, ranks and set of lengths.
        lengths: of all documents, int64 [documents].
        changes: values of the cluster that are others in the simulation.
    """
    topology, attention, documents = place_of(setting[0], setting[2]), HEADS[setting[1]], Documents(lengths)
    plan = build_plan(documents, topology, attention, "hierarchical", fetch_pieces=1)
    bound = choose_placement(documents, documents, topology, attention).bound
    cluster = cluster_of(topology).with_values(**changes)
    seconds = {"whole": layer_seconds(plan, cluster)}
    for name, cut in CUTS.items():
        other = cut(plan)
        seconds[name] = seconds["whole"] if other is plan else layer_seconds(other, cluster)
    seconds["free"] = layer_seconds(plan, without_transfer_times(cluster))
    fetches = any(len(part.forward.fetch) > 0 for part in plan.parts_or_self)
    splits = any(part.q_layout_compute.heads is not None for part in plan.parts_or_self)
    return Row(setting, fetches, splits, bound, seconds)


def layer_seconds(plan: Plan, cluster: Cluster) -> list[float]:
    """Return the modelled seconds of a layer, with and without the time of posting."""
    clusters = cluster, cluster.with_values(posting=0.0)
    return [simulate_plan(plan, each, max_exact_spans=COARSE_SPANS).total for each in clusters]


def without_transfer_times(cluster: Cluster) -> Cluster:
    """Return the cluster with links that take no time."""
    rates = dict.fromkeys(("pair_bandwidth", "rank_bandwidth", "nic_bandwidth"), 1e20)
    return cluster.with_values(**rates, in_node_latency=0.0, network_latency=0.0)


def show(title: str, rows: Sequence[Row], posting: int) -> None:
    """Print a line: fraction of the bound, and percent saved."""
    whole = np.mean([row.bound / row.seconds["whole"][posting] for row in rows])
    cells = [100 * float(np.mean([row.saved(name, posting) for row in rows])) for name in (*CUTS, "best", "free")]
    print(f"{title:34}{whole:7.3f}" + "".join(f"{cell:9.2f}" for cell in cells), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", default=["a800", "a2"])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--lengths", nargs="+", choices=list(SETS), default=["wikipedia", "prolong"])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--posting", type=float, help="microseconds of posting a message; default: the cluster's")
    parser.add_argument("--launch", type=float, help="microseconds of a kernel's launch; default: the cluster's")
    parser.add_argument("--each", action="store_true", help="a line for each batch")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args(argv)
    for name, values in (("batches", [options.batches]), ("ranks", options.ranks), ("tokens", [options.tokens])):
        if min(values) < 1:
            parser.error(f"--{name} has {min(values)}; valid: 1 or more")
    for name, value in (("posting", options.posting), ("launch", options.launch)):
        if value is not None and value < 0:
            parser.error(f"--{name} is {value:g}; valid: 0 or more")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    try:
        rows = run(options)
    except ConfigError as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


def run(options: argparse.Namespace) -> list[Row]:
    """Measure and print all settings, and the means."""
    for name in options.lengths:
        print(f"{name}: {'real lengths' if real_lengths_folder(name) else 'bins of configs/lengths'}")
    print("modelled; fraction of the bound of whole plans, and percent of their time that is saved (e: edges)")
    print(f"{'':34}{'bound':>7}" + "".join(f"{name.replace(' edges', 'e'):>9}" for name in (*CUTS, "best", "free")))
    rows: list[Row] = []
    for heads in options.heads:
        for cluster in options.clusters:
            for ranks in options.ranks:
                for name in options.lengths:
                    drawn = [draw(name, ranks, options.tokens, batch) for batch in range(options.batches)]
                    setting, given = (cluster, heads, ranks, name), vars(options)
                    changes = {key: given[key] * 1e-6 for key in ("posting", "launch") if given[key] is not None}
                    batches = [measure(setting, lengths, **changes) for lengths in drawn]
                    for number, row in enumerate(batches) if options.each else ():
                        show(f"  batch {number}, fetches {row.fetches}", [row], 0)
                    show(f"{cluster:6}{heads:6}{ranks:5} {name}", batches, 0)
                    rows += batches
    for heads in options.heads:
        chosen = [row for row in rows if row.setting[1] == heads]
        fetching = [row for row in chosen if row.fetches]
        show(f"{heads}, {len(chosen)} batches", chosen, 0)
        show(f"{heads}, posting takes no time", chosen, 1)
        if fetching:
            show(f"{heads}, {len(fetching)} that fetch keys", fetching, 0)
    return rows


def draw(name: str, ranks: int, tokens: int, batch: int) -> np.ndarray:
    """Return the lengths of a batch, int64 [documents]."""
    return SETS[name](ranks * tokens, ranks, np.random.default_rng([batch, list(SETS).index(name), 0]))


if __name__ == "__main__":
    main()
