"""Choice of the algorithm and options for given batches: plans of the candidates are built and simulated.

A candidate is dropped as soon as it cannot be the fastest any more, by its seconds on earlier batches and the lower
bounds of later ones (:func:`mindspeed_cp.cluster.compute.balanced_lower_bound`). The fastest is never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_cp.algorithms.registry import ALGORITHMS
from mindspeed_cp.choose.candidates import Candidate, default_candidates
from mindspeed_cp.cluster.cluster import Cluster, cluster_of
from mindspeed_cp.cluster.compute import ComputeCost, LayerCost, balanced_lower_bound
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.verify.memory import attention_peak_bytes
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import check_type
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS
from mindspeed_cp.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False)
class CandidateTrial:
    """Result of one candidate.

    Attributes:
        candidate: the algorithm and its options.
        seconds: modelled seconds of one layer for each of the first batches: all, or those until it was dropped.
        timeline: of the first batch; None if it was not simulated.
        refused: why the candidate is impossible; None if it is possible.
    """

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)
    refused: str | None = None

    def relative_to(self, chosen: CandidateTrial) -> float:
        """Return the ratio of its seconds to the chosen candidate's seconds on the batches it was tried on."""
        return sum(self.seconds) / sum(chosen.seconds[: len(self.seconds)])


@dataclass(frozen=True, eq=False)
class Decision:
    """The choice for some batches.

    Attributes:
        candidate: the fastest candidate over all batches.
        trials: the chosen candidate, then those simulated on all batches by their time, then the others.
        reasons: three lines: the choice, how its time is spent, and how the others compare.
    """

    candidate: Candidate
    trials: tuple[CandidateTrial, ...]
    reasons: tuple[str, str, str]


def choose_algorithm(
    batches: Sequence[Documents],
    topology: Topology,
    attention: AttentionConfig,
    cluster: Cluster | None = None,
    layer: LayerCost | None = None,
    memory: float | None = None,
    candidates: Sequence[Candidate] | None = None,
    options: dict[str, Any] | None = None,
) -> Decision:
    """Return the algorithm that is modelled fastest for batches like these.

    The result is deterministic: every rank that passes the same arguments gets the same decision.

    Args:
        batches: a sample of at least one batch.
        topology: the ranks; if `cluster` is None, its cluster gives the speeds.
        attention: of one tensor-parallel rank.
        cluster: devices and links.
        layer: linear part of a layer; default: :meth:`LayerCost.for_attention`.
        memory: bytes that the attention of a layer may hold on a rank; default: all of a device.
        candidates: default: :func:`.candidates.default_candidates`.
        options: sizes of the model, such as hidden_size, for the algorithms that have them.

    Raises:
        ConfigError: There is no token in the batches, no candidate, or no candidate is possible (with each reason).
    """
    check_type("batches", batches, (list, tuple), "a list of Documents(...)")
    for batch in batches:
        check_type("batches", batch, Documents, "a list of Documents(...)")
    check_type("topology", topology, Topology, "Topology(...)")
    check_type("cluster", cluster, (Cluster, type(None)), "load_cluster(...), or None")
    check_type("options", options, (dict, type(None)), "a dict of options, or None")
    known = dict.fromkeys(name for algorithm in ALGORITHMS.values() for name in algorithm.options)
    for name in options or {}:
        if name not in known:
            raise ConfigError(f"options: no algorithm has {short_repr(name)}; valid: {', '.join(known)}")
    if not any(batch.tokens for batch in batches):
        raise ConfigError("all batches are empty; valid: one batch or more, with tokens")
    cluster = cluster_of(topology) if cluster is None else cluster.with_ranks(topology.ranks_per_node)
    cost = ComputeCost(cluster, attention, layer)
    runner = _TrialRunner(batches, topology, cost, cluster.memory if memory is None else memory, options or {})
    if candidates is None:
        candidates = default_candidates(topology, attention)
    if not candidates:
        raise ConfigError("candidates: there are none to choose from; valid: one or more")
    trials = [runner.run(candidate) for candidate in candidates]
    complete = [trial for trial in trials if len(trial.seconds) == len(batches) and trial.refused is None]
    if not complete:
        what = "this batch" if len(batches) == 1 else "all of these batches"
        causes = "; ".join(f"{trial.candidate}: {trial.refused}" for trial in trials)
        raise ConfigError(f"algorithm is 'auto': nothing can do {what}: {causes}")
    complete.sort(key=lambda trial: sum(trial.seconds))  # stable: of equally fast ones the first candidate
    ordered = (*complete, *(trial for trial in trials if trial not in complete))
    return Decision(complete[0].candidate, ordered, explain_choice(ordered))


class _TrialRunner:
    """Tries candidates on some batches one after the other; arguments as those of `choose_algorithm`."""

    def __init__(
        self,
        batches: Sequence[Documents],
        topology: Topology,
        cost: ComputeCost,
        memory: float,
        options: dict[str, Any],
    ) -> None:
        self._batches, self._topology, self._cost = batches, topology, cost
        self._memory, self._options = memory, options
        self._balanced = [balanced_lower_bound(batch, topology.ranks, cost) for batch in batches]
        self._best = float("inf")  # seconds over all batches, of a candidate that fits into memory

    def run(self, candidate: Candidate) -> CandidateTrial:
        """Try a candidate on all batches, or until it cannot be the fastest."""
        trial, plans = CandidateTrial(candidate), []
        try:
            for number, batch in enumerate(self._batches):
                after = sum(self._balanced[number + 1 :])
                plan = candidate.build_plan(batch, self._topology, self._cost.attention, self._options)
                timeline = simulate_plan(plan, self._cost.cluster, self._cost.layer, COARSE_SPANS)
                plans.append(plan)
                first = timeline if trial.timeline is None else trial.timeline
                trial = replace(trial, seconds=(*trial.seconds, timeline.total), timeline=first)
                if sum(trial.seconds) + after > self._best and after:
                    return trial
        except ConfigError as error:
            return replace(trial, refused=str(error))
        total = sum(trial.seconds)
        if total < self._best:  # a candidate that needs too much memory must not drop others
            peak = max(int(attention_peak_bytes(plan, self._cost.layer.bytes_per_element).max()) for plan in plans)
            if peak > self._memory:
                there_are = f"there are {self._memory / 2**30:.3g}"
                return replace(trial, refused=f"holds {peak / 2**30:.3g} GiB in one layer; {there_are}")
            self._best = total
        return trial


def explain_choice(trials: Sequence[CandidateTrial]) -> tuple[str, str, str]:
    """Return the choice, how its time is spent, and the best other candidate of every algorithm.

    Args:
        trials: all candidates, the chosen one first.
    """
    chosen, others = trials[0], trials[1:]
    assert chosen.timeline is not None  # it was simulated
    count = len(chosen.seconds)
    batches, subject = (f" (mean of {count} batches)", "on the first batch its") if count > 1 else ("", "its")
    choice = f"{chosen.candidate}: {_ms(sum(chosen.seconds) / count)} ms a layer{batches}, modelled for "
    choice += chosen.timeline.cluster.name
    busy, waiting = _busy_and_waiting_ms(chosen.timeline)
    spent = f"{subject} mean rank computes {busy} ms and waits {waiting} ms"
    best: dict[str, CandidateTrial] = {}  # of each algorithm, the fastest first
    compared = [trial for trial in others if trial.refused is None]
    for trial in sorted(compared, key=lambda trial: trial.relative_to(chosen)):
        if trial.seconds != chosen.seconds[: len(trial.seconds)]:  # equal to the digit: the same plans
            best.setdefault(trial.candidate.algorithm, trial)
    second = next(iter(best.values()), None)
    if second is not None and second.timeline is not None:
        busy, waiting = _busy_and_waiting_ms(second.timeline)
        spent += f"; with {second.candidate} {busy} and {waiting} ms"
    texts = []
    for trial in best.values():
        text = f"{trial.candidate}: {trial.relative_to(chosen):.2f} times as long"
        tried = len(trial.seconds)
        if tried < count:
            text += f" on the first {'batch' if tried == 1 else f'{tried} batches'}"
        texts.append(text)
    texts += [f"{trial.candidate}: {trial.refused}" for trial in others if trial.refused is not None]
    return choice, spent, "others: " + "; ".join(texts) if texts else "there is no other candidate"


def _busy_and_waiting_ms(timeline: Timeline) -> tuple[str, str]:
    """Return the milliseconds that the mean rank computes and waits, as text."""
    return _ms(float((timeline.compute + timeline.linear).mean())), _ms(float(timeline.waiting.mean()))


def _ms(seconds: float) -> str:
    """Return seconds in milliseconds: three digits, or all before the point."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
