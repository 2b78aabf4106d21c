"""Random problems, and how much slower a default plan is on each than the fastest of all candidates of `auto`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.data import HEADS
from benchmarks.length_sets import SETS
from mindspeed_cp import Documents, Topology, build_plan
from mindspeed_cp.choose.choose import choose_algorithm
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.simulate.simulator import simulate_plan

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
