"""Host time of simulating a layer, and of choosing an algorithm by simulation.

    python -m benchmarks.choosing [--repeat 5] [--ranks 64] [--large 1024] [--documents 1000] [--batches 4 1]
                                  [--lengths wikipedia prolong] [--tokens 4096] [--cluster a2] [--problems 200]
                                  [--json FILE]

Seconds are measured on this host: medians of the repeats after a warm-up call. Milliseconds of a layer are modelled.
One layer of 32 heads of 128 channels, 8 kv heads, forward and backward; batches are drawn from configs/lengths.
A ring is built and simulated for --ranks, and for --large with --documents; an algorithm is chosen for --ranks, by each
number of --batches. At last, the regret of default plans on --problems random problems (seeds 0, 1, ...): how much
slower a plan of `algorithm: hierarchical` without options is than the fastest of all candidates of `auto`, modelled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.arguments import Arguments, natural, new_file, positive
from benchmarks.data import HEADS, SETS, place_of
from benchmarks.timing import median_us
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.choose.choose import Decision, choose_algorithm
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.data.lengths import sample_batch, sample_lengths
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.simulate.simulator import simulate_plan

#: Problems with the largest regret that are printed.
WORST = 8

ATTENTION = AttentionConfig(heads=32, kv_heads=8, head_dim=128)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--ranks", type=positive, default=64)
    parser.add_argument("--large", type=positive, default=1024, help="ranks of the large ring")
    parser.add_argument("--documents", type=positive, default=1000, help="documents of the large ring")
    parser.add_argument("--batches", type=positive, nargs="+", default=[4, 1], help="numbers of batches to choose by")
    parser.add_argument("--lengths", nargs="+", default=["wikipedia", "prolong"])
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of each rank")
    parser.add_argument("--cluster", default="a2")
    parser.add_argument("--problems", type=natural, default=200, help="random problems of the regret; 0: none")
    parser.add_argument("--json", type=new_file, help="write all figures to this file")
    options = parser.parse_args()
    try:
        rows = measure(options)
    except ConfigError as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps(rows))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all rows; prints each at once."""
    topology, large = (place_of(options.cluster, ranks) for ranks in (options.ranks, options.large))
    print(
        f"seconds of this host, medians of {options.repeat}; milliseconds of a layer on {options.cluster} are modelled"
    )
    print(f"{'what':32}{'ranks':>6}{'documents':>11}{'host s':>9}  modelled layer")
    tokens, seeds = options.ranks * options.tokens, range(max(options.batches))
    drawn = {name: [Documents(sample_batch(name, tokens, seed)) for seed in seeds] for name in options.lengths}
    rows = [row for name, batches in drawn.items() for row in ring(name, batches[0], topology, options.repeat)]
    many = Documents(sample_lengths(options.lengths[0], options.documents))
    rows += ring(options.lengths[0], many, large, options.repeat)
    for name, batches in drawn.items():
        rows += [choosing(name, batches[:count], topology, options.repeat) for count in options.batches]
    return rows + regrets(options.problems)


def regrets(count: int) -> list[dict[str, Any]]:
    """Print the regret of default plans on random problems, and where it is largest."""
    problems = [random_problem(seed) for seed in range(count)]
    if problems:
        regret = np.array([problem.regret for problem in problems])
        print(
            f"regret of a default plan on {count} random problems: mean {100 * regret.mean():.2f} %, "
            f"p95 {100 * np.quantile(regret, 0.95):.2f} %, worst {100 * regret.max():.2f} %; above 0.1 % in "
            f"{int((regret > 0.001).sum())}"
        )
        for number in np.argsort(-regret, kind="stable")[:WORST].tolist():
            if regret[number]:
                print(f"  {100 * regret[number]:.2f} %: {problems[number].name}: {problems[number].fastest}")
    return [asdict(problem) | {"regret": problem.regret} for problem in problems]


def ring(name: str, documents: Documents, topology: Topology, repeat: int) -> list[dict[str, Any]]:
    """Time building a ring and simulating it."""
    cluster = cluster_of(topology)

    def build() -> Plan:
        return build_plan(documents, topology, ATTENTION, "ring")

    plan = build()
    layer = f"{1e3 * simulate_plan(plan, cluster).total:,.2f} ms"
    return [
        timed(f"build a ring, {name}", len(documents), topology, repeat, build),
        timed(
            f"simulate a ring, {name}", len(documents), topology, repeat, lambda: simulate_plan(plan, cluster), layer
        ),
    ]


def choosing(name: str, batches: list[Documents], topology: Topology, repeat: int) -> dict[str, Any]:
    """Time choosing an algorithm by some batches."""

    def choose() -> Decision:
        return choose_algorithm(batches, topology, ATTENTION)

    decision = choose()
    best = 1e3 * sum(decision.trials[0].seconds) / len(batches)
    layer = f"{best:,.2f} ms: {decision.candidate}, of {len(decision.trials)} candidates"
    what = f"choose by {len(batches)} batch{'es' * (len(batches) > 1)}, {name}"
    return timed(what, sum(map(len, batches)), topology, repeat, choose, layer)


def timed(
    what: str, documents: int, topology: Topology, repeat: int, run: Callable[[], object], layer: str = ""
) -> dict[str, Any]:
    """Time a call and print it as one line of the table."""
    seconds = median_us(run, repeat) / 1e6
    print(f"{what:32}{topology.ranks:6}{documents:11,}{seconds:9.3f}  {layer}", flush=True)
    return {"what": what, "ranks": topology.ranks, "documents": documents, "host_seconds": seconds, "modelled": layer}


# Random problems, and how much slower a default plan is on each than the fastest of all candidates of `auto`.


CLUSTERS, RANKS, TOKENS = ("a800", "h200", "a2", "a3"), (4, 8, 16, 32, 64), (1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Problem:
    """A random problem and its result.

    Attributes:
        name: cluster, heads, lengths, ranks and tokens of a rank.
        default, best: modelled seconds of the default plan, and of the fastest candidate.
        fastest: name of that candidate.
    """

    name: str
    default: float
    best: float
    fastest: str

    @property
    def regret(self) -> float:
        """Part by which the default plan is slower; 0 if it is the fastest."""
        return max(self.default / self.best - 1, 0.0)


def random_problem(seed: int) -> Problem:
    """Make the problem of a seed: its default plan, and all candidates of `auto`."""
    random = np.random.default_rng(seed)
    cluster, heads, lengths = (str(random.choice(list(names))) for names in (CLUSTERS, HEADS, SETS))
    ranks, tokens = int(random.choice(RANKS)), int(random.choice(TOKENS))
    per_node = min(ranks, load_cluster(cluster).ranks_per_node)
    topology = Topology(ranks // per_node, per_node, cluster)
    documents = Documents(SETS[lengths](ranks * tokens, ranks, random))
    plan = build_plan(documents, topology, HEADS[heads], "hierarchical")
    default = simulate_plan(plan, cluster_of(topology)).total
    chosen = choose_algorithm([documents], topology, HEADS[heads]).trials[0]
    name = f"{cluster} {heads} {lengths}, {ranks} ranks of {tokens} tokens, seed {seed}"
    return Problem(name, default, min(chosen.seconds[0], default), str(chosen.candidate))


if __name__ == "__main__":
    main()
