"""Which of a few candidates for a batch, in milliseconds: closed forms, each scaled to its simulations of a sample.

A candidate's closed form has, in each direction, the larger of two times, attention of its busiest rank and its busiest
link; with Ulysses their sum. Where a plan sends the same for every batch of as many tokens, as rings and head splits do
unless there is a window or short documents stay whole, links are those of the sample; else they are found anew. What
the forms leave out, such as waits at the beginning and uneven turns, is in the factor between a candidate's simulated
and estimated times. One whose factor differs much from batch to batch is simulated every time; and where plans are
small, so are those that are estimated to be about as fast as the fastest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mindspeed_cp.cost.bounds import busiest_links, exchange_links
from mindspeed_cp.cost.candidates import Candidate
from mindspeed_cp.cost.choose import EXCHANGES, MOST_SPANS, Decision, bytes_over
from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.compute import ComputeCost, LayerCost
from mindspeed_cp.cost.layout_work import attention_floor
from mindspeed_cp.cost.simulate import fitted, simulate
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.build import algorithm_options, build_plan
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.hierarchical import choose, cluster_of
from mindspeed_cp.plan.hybrid import default_degree
from mindspeed_cp.plan.placement import place
from mindspeed_cp.plan.program import Plan

#: Candidates that took more than this times as long as the chosen one are not looked at for single batches.
NEAR = 1.5

#: A candidate whose factors differ by more than this is simulated for every batch.
STEADY = 1.15

#: Of candidates that are estimated within this of the fastest, simulations decide, ...
CLOSE = 1.1

#: ... if the batch, cut over all ranks, has so few pieces, times the ranks: then these take milliseconds.
SMALL = 2**16

#: Choices that are kept, by the documents.
KEPT = 256

#: Options of a hierarchical plan that its planner's own estimate looks at.
PLANNED = (
    *("routing", "head_split", "remap", "max_seqlen_per_dp_cp_rank", "hidden_size", "ffn_hidden_size"),
    "tensor_model_parallel_size",
)


def shortlist(decision: Decision, most: int = 4) -> list[Candidate]:
    """Candidates of a choice that may be faster for some batches: the chosen one, and the best others of which the
    sample does not say that they are much slower, those with the same plans as another left out. How much memory these
    need was not looked at; a :class:`BatchChooser` does."""
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
        topology, attention, cluster, layer, memory, options: as for :func:`.choose.choose_algorithm`.
        drop: leave out candidates that hold too much on the sample, or cannot do it; False: refuse them.

    Raises:
        ConfigError: there are no candidates or no tokens to scale by; or a candidate cannot do a batch of the sample,
            or holds more than there is: the first one, or without `drop` any.
    """

    def __init__(
        self,
        among: Sequence[Candidate],
        sample: Sequence[Documents],
        topology: Topology,
        attention: AttentionConfig,
        cluster: Cluster | None = None,
        layer: LayerCost | None = None,
        memory: float | None = None,
        options: dict[str, Any] | None = None,
        drop: bool = False,
    ) -> None:
        sample = [batch for batch in sample if batch.tokens]
        for name, given, what in (("among", among, "candidate"), ("sample", sample, "batch with tokens")):
            if not given:
                raise ConfigError(f"{name}: there is no {what} in it; valid: one or more")
        cluster = cluster_of(topology) if cluster is None else fitted(cluster, topology.ranks_per_node)
        self._topology, self._cost, self._options = topology, ComputeCost(cluster, attention, layer), options or {}
        self._memory = cluster.memory if memory is None else memory
        self._links: dict[Candidate, tuple[int, tuple[float, float]]] = {}
        self._factors: dict[Candidate, float] = {}  # nan: simulated every time
        self._known: OrderedDict[Documents, Candidate] = OrderedDict()
        for one in among:
            try:
                self._factors[one] = self._factor(one, sample)
            except ConfigError as error:
                if not drop or one == among[0]:
                    raise ConfigError(f"{one}: {error}") from None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that it chooses from."""
        return tuple(self._factors)

    def __call__(self, documents: Documents) -> Candidate:
        """The candidate that is estimated fastest for a batch; that of the same documents is found again.

        Raises:
            ConfigError: none can do the batch.
        """
        found = self._known.get(documents)
        if found is None:
            found = self._found(documents)
            while len(self._known) >= KEPT:
                self._known.popitem(last=False)
        self._known[documents] = found
        self._known.move_to_end(documents)
        return found

    def _found(self, documents: Documents) -> Candidate:
        if len(self._factors) == 1 or not documents.tokens:
            return self.candidates[0]
        estimates = self.estimates(documents)
        if not estimates:
            self._plan(self.candidates[0], documents)  # which says why
        least = min(estimates.values())
        near = {one: seconds for one, seconds in estimates.items() if seconds <= CLOSE * least}
        ranks = self._topology.ranks
        if len(near) > 1 and int(np.minimum(documents.lengths, 2 * ranks).sum()) * ranks <= SMALL:
            near = {one: self._simulated(self._plan(one, documents)) for one in near}
        return min(near, key=lambda one: near[one])

    def estimates(self, documents: Documents) -> dict[Candidate, float]:
        """Estimated seconds of a layer with each candidate that can do the batch."""
        found = {}
        for one, factor in self._factors.items():
            with suppress(ConfigError):  # a bound of tokens may be too little for this batch
                simulated = math.isnan(factor)
                found[one] = (
                    self._simulated(self._plan(one, documents)) if simulated else factor * self._form(one, documents)
                )
        return found

    def _factor(self, candidate: Candidate, sample: Sequence[Documents]) -> float:
        """Simulated over estimated time, the geometric mean over the sample; nan where it is not steady."""
        plans = [self._plan(candidate, documents) for documents in sample]
        held = bytes_over(plans, self._cost.layer, self._memory)
        if held is not None:
            raise ConfigError(f"holds {held / 2**30:.3g} GiB in one layer; there are {self._memory / 2**30:.3g}")
        if candidate.algorithm == "hierarchical" and self._cost.attention.window is not None:
            return math.nan  # the planner's estimate is of whole masks
        self._links[candidate] = sample[0].tokens, busiest_links(plans[0], self._cost)
        logs = [
            math.log(self._simulated(plan) / self._form(candidate, documents))
            for plan, documents in zip(plans, sample, strict=True)
        ]
        return math.exp(sum(logs) / len(logs)) if max(logs) - min(logs) <= math.log(STEADY) else math.nan

    def _simulated(self, plan: Plan) -> float:
        return simulate(plan, self._cost.cluster, self._cost.layer, MOST_SPANS).total

    def _plan(self, candidate: Candidate, documents: Documents) -> Plan:
        given = self._given(candidate)
        return build_plan(documents, self._topology, self._cost.attention, candidate.algorithm, **given)

    def _given(self, candidate: Candidate) -> dict[str, Any]:
        known = algorithm_options(candidate.algorithm)
        return {name: value for name, value in self._options.items() if name in known} | dict(candidate.options)

    def _form(self, candidate: Candidate, documents: Documents) -> float:
        """The closed form, seconds of a layer."""
        given = self._given(candidate)
        if candidate.algorithm == "hierarchical":
            options = {name: given[name] for name in PLANNED if name in given}
            return choose(documents, documents, self._topology, self._cost.attention, **options).score.total
        tokens = documents.tokens / self._topology.ranks
        linear = sum(float(self._cost.linear_seconds(tokens, backward)) for backward in (False, True))
        layout = given.get("layout", "zigzag")
        attention, links = self._attention(candidate, documents, layout), self._busiest(candidate, documents, layout)
        if candidate.algorithm == "ulysses":  # nothing is computed while heads move
            return linear + sum(attention) + sum(links)
        return linear + sum(map(max, attention, links))

    def _busiest(self, candidate: Candidate, documents: Documents, layout: str) -> tuple[float, float]:
        """Seconds of the busiest link, forward and backward."""
        if candidate.algorithm in EXCHANGES:
            return exchange_links(documents, self._topology, self._cost, layout)
        if candidate.algorithm != "ulysses" and (layout == "balanced" or self._cost.attention.window is not None):
            return busiest_links(self._plan(candidate, documents), self._cost)
        tokens, (there, back) = self._links[candidate]
        return there * documents.tokens / tokens, back * documents.tokens / tokens

    def _attention(self, candidate: Candidate, documents: Documents, layout: str) -> tuple[float, float]:
        """Seconds of the busiest rank's attention, forward and backward; of heads that are split a fair share."""
        split = 1
        if candidate.algorithm == "ulysses":
            split = self._topology.ranks
        elif candidate.algorithm == "hybrid":
            degree = default_degree(self._topology, self._cost.attention.heads)
            split = int(self._given(candidate).get("ulysses_degree", degree))
        queries, _ = place(layout, documents, documents, self._topology.ranks // split, self._cost.attention)
        there, back = attention_floor(queries, documents, self._cost)
        return float(np.max(there)) / split, float(np.max(back)) / split
