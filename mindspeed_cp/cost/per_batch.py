"""Which of a few candidates for a batch, in milliseconds: closed forms, each scaled to its simulations of a sample.

A candidate's closed form has, in each direction, the larger of two times: attention of its busiest rank, by the pairs
and the lengths of that rank's spans, and its busiest link. Links are those of the sample where a plan sends the same
for every batch of as many tokens (rings, head splits), else they are bounded anew. What the forms leave out, such as
waits at the beginning and uneven turns, is in the factor between a candidate's simulated and estimated times.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_cp.cost.bounds import Floor, even_floor, exchange_floor, plan_floor
from mindspeed_cp.cost.candidates import Candidate
from mindspeed_cp.cost.choose import EXCHANGES, MOST_SPANS, Decision
from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.simulate import fitted, simulate
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.build import algorithm_options, build_plan
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.hierarchical import choose, cluster_of
from mindspeed_cp.plan.placement import place

#: Candidates that took more than this times as long as the chosen one are not looked at for single batches.
NEAR = 1.5

#: Choices that are kept, by the documents.
KEPT = 256

#: Options of a hierarchical plan that its planner's own estimate looks at.
PLANNED = (
    *("routing", "head_split", "remap", "max_seqlen_per_dp_cp_rank", "hidden_size", "ffn_hidden_size"),
    "tensor_model_parallel_size",
)


def shortlist(decision: Decision, most: int = 4) -> list[Candidate]:
    """Candidates of a choice that may be faster for some batches: the chosen one, and the best others of which the
    sample does not say that they are much slower, one with the same plans left out."""
    first = decision.tried[0]
    found = [(1.0, 0, first.candidate)]
    for number, one in enumerate(decision.tried[1:], 1):
        if one.same_as is None and one.refused is None and one.looked_at:
            ratio = one.least / sum(first.seconds[: one.looked_at])
            found.append((ratio, number, one.candidate))
    return [candidate for ratio, _, candidate in sorted(found, key=lambda one: one[:2])[:most] if ratio <= NEAR]


class BatchChooser:
    """Chooses a candidate for each batch; deterministic, the same on every rank.

    Args:
        among: candidates, such as :func:`shortlist` gives; with one there is nothing to choose.
        sample: batches by which the closed forms are scaled; all candidates are simulated on them.
        topology, attention, cluster, layer, options: as for :func:`.choose.choose_algorithm`.

    Raises:
        ConfigError: there are no candidates or no batches, or a candidate cannot do a batch of the sample.
    """

    def __init__(
        self,
        among: Sequence[Candidate],
        sample: Sequence[Documents],
        topology: Topology,
        attention: AttentionConfig,
        cluster: Cluster | None = None,
        layer: LayerCost | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        for name, given in (("among", among), ("sample", sample)):
            if not given:
                raise ConfigError(f"{name}: there is nothing in it; valid: one or more")
        cluster = cluster_of(topology) if cluster is None else fitted(cluster, topology.ranks_per_node)
        self._topology, self._cost, self._options = topology, ComputeCost(cluster, attention, layer), options or {}
        self._links: dict[Candidate, tuple[float, tuple[float, float]]] = {}
        self._factors: dict[Candidate, float] = {}
        self._known: OrderedDict[Documents, Candidate] = OrderedDict()
        for one in among:
            self._factors[one] = self._factor(one, sample) if len(among) > 1 else 1.0

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that it chooses from."""
        return tuple(self._factors)

    def __call__(self, documents: Documents) -> Candidate:
        """The candidate that is estimated fastest for a batch; that of the same documents is found again."""
        found = self._known.get(documents)
        if found is None:
            estimates = self.estimates(documents) if len(self._factors) > 1 else dict.fromkeys(self._factors, 0.0)
            found = min(estimates, key=lambda one: estimates[one])
            while len(self._known) >= KEPT:
                self._known.popitem(last=False)
        self._known[documents] = found
        self._known.move_to_end(documents)
        return found

    def estimates(self, documents: Documents) -> dict[Candidate, float]:
        """Estimated seconds of a layer with each candidate."""
        return {one: self._form(one, documents) * factor for one, factor in self._factors.items()}

    def _factor(self, candidate: Candidate, sample: Sequence[Documents]) -> float:
        """Simulated over estimated time, the geometric mean over the sample."""
        logs = []
        for number, documents in enumerate(sample):
            plan = build_plan(
                documents, self._topology, self._cost.attention, candidate.algorithm, **self._given(candidate)
            )
            if number == 0:
                self._links[candidate] = documents.tokens, plan_floor(plan, self._cost).links
            made = simulate(plan, self._cost.cluster, self._cost.layer, MOST_SPANS)
            logs.append(math.log(made.total / self._form(candidate, documents)))
        return math.exp(sum(logs) / len(logs))

    def _given(self, candidate: Candidate) -> dict[str, Any]:
        known = algorithm_options(candidate.algorithm)
        return {name: value for name, value in self._options.items() if name in known} | dict(candidate.options)

    def _form(self, candidate: Candidate, documents: Documents) -> float:
        """The closed form, seconds of a layer."""
        given = self._given(candidate)
        if candidate.algorithm == "hierarchical":
            options = {name: given[name] for name in PLANNED if name in given}
            return choose(documents, documents, self._topology, self._cost.attention, **options).score.total
        even = even_floor(documents, self._topology.ranks, self._cost)
        layout = given.get("layout", "zigzag")
        floor = Floor(even.linear, self._attention(candidate, documents, layout), self._busiest(candidate, documents))
        return floor.seconds

    def _busiest(self, candidate: Candidate, documents: Documents) -> tuple[float, float]:
        """Seconds of the busiest link, forward and backward."""
        if candidate.algorithm in EXCHANGES:
            layout = self._given(candidate).get("layout", "zigzag")
            return exchange_floor(documents, self._topology, self._cost, layout).links
        tokens, (there, back) = self._links[candidate]
        return there * documents.tokens / tokens, back * documents.tokens / tokens

    def _attention(self, candidate: Candidate, documents: Documents, layout: str) -> tuple[float, float]:
        """Seconds of the busiest rank's attention, forward and backward."""
        ranks = self._topology.ranks
        groups = {"ulysses": 1, "hybrid": ranks // max(1, self._degree(candidate))}.get(candidate.algorithm, ranks)
        held, _ = place(layout, documents, documents, groups, self._cost.attention)
        spans = held.spans
        first = (spans["start"] - documents.offsets[spans["doc"]]).astype(np.float64)
        last = (spans["stop"] - documents.offsets[spans["doc"]]).astype(np.float64)
        left, right = self._cost.attention.reach
        whole = documents.lengths[spans["doc"]].astype(np.float64)
        middle = (first + last) / 2  # pairs of a span's queries, by the one in its middle
        seen = np.minimum(middle + 0.5 + min(right, 1e18), whole) - np.maximum(middle - left, 0)
        pairs = np.bincount(spans["rank"], seen * (last - first), groups) * groups / ranks
        slow = np.bincount(spans["rank"], seen, groups) * groups / ranks
        work = pairs + self._cost.cluster.tile_rows * slow
        there, back = (self._cost.attention_seconds(work, np.inf, 0, backward) for backward in (False, True))
        return float(there.max()), float(back.max())

    def _degree(self, candidate: Candidate) -> int:
        given = self._given(candidate).get("ulysses_degree")
        if given is not None:
            return int(given)
        here, heads = self._topology.ranks_per_node, self._cost.attention.heads
        return max((d for d in range(1, min(here, heads) + 1) if here % d == 0), default=1)
