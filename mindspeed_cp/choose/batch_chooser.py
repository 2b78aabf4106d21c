"""Choice among a few candidates for each batch, in milliseconds: closed forms scaled to simulations of a sample.

The closed form of a candidate is, in each direction, the larger of the attention of its busiest rank and its busiest
link; for Ulysses it is their sum. If a plan's traffic depends only on the number of tokens (rings and head splits
without a window that do not keep short documents whole), link seconds are taken from the sample; otherwise they are
computed for the batch. A factor per candidate, simulated over estimated seconds on the sample, covers what the closed
form leaves out, such as waits at the start and uneven steps. A candidate whose factor varies much between batches is
always simulated. Where plans are small, all candidates that are estimated to be about as fast as the fastest are
simulated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.algorithms.hybrid import default_ulysses_degree
from mindspeed_cp.algorithms.layouts import build_layouts
from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.choose import KV_FETCH_ALGORITHMS, Decision, memory_refusal
from mindspeed_cp.choose.lower_bounds import busiest_link_seconds, kv_fetch_link_seconds, min_attention_seconds
from mindspeed_cp.cluster.cluster import Cluster, cluster_of
from mindspeed_cp.cluster.compute import ComputeCost, LayerCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import REDUCE_BYTES, Plan
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

#: A candidate that took more than this many times the chosen one's seconds is not tried on single batches.
SHORTLIST_WITHIN = 1.5

#: A candidate whose factors differ by more than this is simulated for every batch.
MAX_FACTOR_SPREAD = 1.15

#: Candidates estimated within this factor of the fastest are simulated, if the batch is small enough:
SIMULATED_WITHIN = 1.1

#: chunks of the batch, cut over all ranks, times the ranks. Simulations up to this take milliseconds.
MAX_SIMULATED_CHUNKS = 2**16

#: Number of cached choices, by documents.
CACHED_CHOICES = 256

#: Options of a hierarchical plan on which the placement model depends.
PLACEMENT_OPTIONS = tuple(inspect.signature(choose_placement).parameters)[4:]


def shortlist(decision: Decision, most: int = 4) -> list[Candidate]:
    """Return candidates of a choice that may be the fastest for some batches.

    These are the chosen one and the best others that the sample does not show to be much slower, without duplicates.
    Their memory is not checked; a :class:`BatchChooser` does that.
    """
    chosen = decision.trials[0]
    ranked = [(1.0, 0, chosen.candidate)]
    for number, trial in enumerate(decision.trials[1:], 1):
        if trial.duplicate_of is None and trial.refused is None and trial.batches_tried:
            ranked.append((trial.relative_to(chosen), number, trial.candidate))
    ranked = sorted(ranked, key=lambda entry: entry[:2])[:most]
    return [candidate for ratio, _, candidate in ranked if ratio <= SHORTLIST_WITHIN]


class BatchChooser:
    """Chooses a candidate for each batch. Deterministic: every rank makes the same choice.

    Args:
        candidates: for example from :func:`shortlist`.
        sample: batches on which all candidates are simulated to scale the closed forms.
        topology, attention, cluster, layer, memory, options: as for :func:`.choose.choose_algorithm`.
        drop: leave out candidates that are impossible on the sample, instead of raising.

    Raises:
        ConfigError: There is no candidate or no batch with tokens; or a candidate is impossible on the sample or needs
            too much memory (with `drop`: only if it is the first one).
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
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
        for name, values, what in (("candidates", candidates, "candidate"), ("sample", sample, "batch with tokens")):
            if not values:
                raise ConfigError(f"{name}: there is no {what} in it; valid: one or more")
        cluster = cluster_of(topology) if cluster is None else cluster.with_ranks(topology.ranks_per_node)
        self._topology, self._cost, self._options = topology, ComputeCost(cluster, attention, layer), options or {}
        self._memory = cluster.memory if memory is None else memory
        self._sample_links: dict[Candidate, tuple[int, tuple[float, float]]] = {}  # tokens, seconds per direction
        self._factors: dict[Candidate, float] = {}  # nan: simulated every time
        self._cached = lru_cache(CACHED_CHOICES)(self._choose)
        for candidate in candidates:
            try:
                self._factors[candidate] = self._factor(candidate, sample)
            except ConfigError as error:
                if not drop or candidate == candidates[0]:
                    raise ConfigError(f"{candidate}: {error}") from None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates of the choice."""
        return tuple(self._factors)

    def __call__(self, documents: Documents) -> Candidate:
        """Return the candidate that is estimated fastest for a batch; choices are cached by documents.

        Raises:
            ConfigError: No candidate can do the batch.
        """
        return self._cached(documents)

    def _choose(self, documents: Documents) -> Candidate:
        if len(self._factors) == 1 or not documents.tokens:
            return self.candidates[0]
        estimates = self.estimates(documents)
        if not estimates:
            self._plan(self.candidates[0], documents)  # raises the reason
        least = min(estimates.values())
        near = {candidate: seconds for candidate, seconds in estimates.items() if seconds <= SIMULATED_WITHIN * least}
        ranks = self._topology.ranks
        if len(near) > 1 and int(np.minimum(documents.lengths, 2 * ranks).sum()) * ranks <= MAX_SIMULATED_CHUNKS:
            near = {candidate: self._simulated(self._plan(candidate, documents)) for candidate in near}
        return min(near, key=lambda candidate: near[candidate])

    def estimates(self, documents: Documents) -> dict[Candidate, float]:
        """Return the estimated seconds of a layer for each candidate that can do the batch."""
        seconds = {}
        for candidate, factor in self._factors.items():
            with suppress(ConfigError):  # for example more tokens than a candidate's max_seqlen_per_dp_cp_rank allows
                if math.isnan(factor):
                    seconds[candidate] = self._simulated(self._plan(candidate, documents))
                else:
                    seconds[candidate] = factor * self._closed_form(candidate, documents)
        return seconds

    def _factor(self, candidate: Candidate, sample: Sequence[Documents]) -> float:
        """Return the geometric mean over the sample of simulated / estimated seconds; nan if it varies too much."""
        plans = [self._plan(candidate, documents) for documents in sample]
        refused = memory_refusal(plans, self._cost.layer, self._memory)
        if refused is not None:
            raise ConfigError(refused)
        if candidate.algorithm == "hierarchical" and self._cost.attention.window is not None:
            return math.nan  # the placement model has no windows
        self._sample_links[candidate] = sample[0].tokens, busiest_link_seconds(plans[0], self._cost)
        logs = [
            math.log(self._simulated(plan) / self._closed_form(candidate, documents))
            for plan, documents in zip(plans, sample, strict=True)
        ]
        return math.exp(sum(logs) / len(logs)) if max(logs) - min(logs) <= math.log(MAX_FACTOR_SPREAD) else math.nan

    def _simulated(self, plan: Plan) -> float:
        return simulate_plan(plan, self._cost.cluster, self._cost.layer, COARSE_SPANS).total

    def _plan(self, candidate: Candidate, documents: Documents) -> Plan:
        return candidate.build_plan(documents, self._topology, self._cost.attention, self._options)

    def _closed_form(self, candidate: Candidate, documents: Documents) -> float:
        """Return the closed form's seconds of a layer."""
        options = candidate.all_options(self._options)
        if candidate.algorithm == "hierarchical":
            options = {name: options[name] for name in PLACEMENT_OPTIONS if name in options}
            return choose_placement(documents, documents, self._topology, self._cost.attention, **options).score.total
        tokens = documents.tokens / self._topology.ranks
        linear = sum(float(self._cost.linear_layer_seconds(tokens, backward)) for backward in (False, True))
        layout = options.get("layout", "zigzag")
        attention = self._attention_seconds(candidate, documents, layout)
        links = self._link_seconds(candidate, documents, layout)
        if candidate.algorithm == "ulysses":  # nothing is computed while heads are redistributed
            return linear + sum(attention) + sum(links)
        return linear + sum(map(max, attention, links))

    def _link_seconds(self, candidate: Candidate, documents: Documents, layout: str) -> tuple[float, float]:
        """Return the seconds of the busiest link, forward and backward."""
        if candidate.algorithm in KV_FETCH_ALGORITHMS:
            size = REDUCE_BYTES[candidate.all_options(self._options).get("reduce_dtype") or "float32"]
            return kv_fetch_link_seconds(documents, self._topology, self._cost, layout, size)
        if candidate.algorithm != "ulysses" and (layout == "balanced" or self._cost.attention.window is not None):
            return busiest_link_seconds(self._plan(candidate, documents), self._cost)
        tokens, (forward, backward) = self._sample_links[candidate]
        return forward * documents.tokens / tokens, backward * documents.tokens / tokens

    def _attention_seconds(self, candidate: Candidate, documents: Documents, layout: str) -> tuple[float, float]:
        """Return the seconds of the busiest rank's attention, forward and backward; of split heads an equal share."""
        split = 1
        if candidate.algorithm == "ulysses":
            split = self._topology.ranks
        elif candidate.algorithm == "hybrid":
            default = default_ulysses_degree(self._topology, self._cost.attention.heads)
            split = int(candidate.all_options(self._options).get("ulysses_degree", default))
        queries, _ = build_layouts(layout, documents, documents, self._topology.ranks // split, self._cost.attention)
        forward, backward = min_attention_seconds(queries, documents, self._cost)
        return float(np.max(forward)) / split, float(np.max(backward)) / split
