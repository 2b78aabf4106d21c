"""Results of a choice: the trial of each candidate, and the decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False)
class CandidateTrial:
    """Result of one candidate.

    Attributes:
        candidate: the algorithm and its options.
        seconds: modelled seconds of one layer for each batch on which the candidate was simulated.
        batches_tried: number of first batches on which it was tried: all, or those until it was dropped.
        least_seconds: sum of its seconds on these batches; of the last one possibly a lower bound.
        limited_by: what the lower bound of the last batch consists of; empty if that batch was simulated.
        timeline: of the first batch; None if it was not simulated.
        duplicate_of: an earlier candidate with the same plans.
        refused: why the candidate is impossible; None if it is possible.
    """

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    batches_tried: int = 0
    least_seconds: float = 0.0
    limited_by: str = ""
    timeline: Timeline | None = field(default=None, repr=False)
    duplicate_of: Candidate | None = None
    refused: str | None = None

    def relative_to(self, chosen: CandidateTrial) -> float:
        """Return the ratio of its least seconds to the chosen candidate's seconds on the batches it was tried on."""
        return self.least_seconds / sum(chosen.seconds[: self.batches_tried])


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


# Explanation of a choice in three lines.


def explain_choice(trials: Sequence[CandidateTrial]) -> tuple[str, str, str]:
    """Return the choice, how its time is spent, and the best candidate of every other algorithm.

    Args:
        trials: all candidates, the chosen one first.
    """
    chosen, others = trials[0], trials[1:]
    assert chosen.timeline is not None  # it was simulated
    count = len(chosen.seconds)
    batches = f" (mean of {count} batches)" if count > 1 else ""
    mean = 1e3 * sum(chosen.seconds) / count
    return (
        f"{chosen.candidate}: {_ms(mean)} ms a layer{batches}, modelled for {chosen.timeline.cluster.name}"
        + _duplicates(chosen, others),
        _time_spent(chosen.timeline, count) + _second(chosen, others),
        _others(chosen, others),
    )


def _duplicates(chosen: CandidateTrial, others: Sequence[CandidateTrial]) -> str:
    names = [str(trial.candidate) for trial in others if trial.duplicate_of == chosen.candidate]
    return f"; the same plans: {', '.join(names)}" if names else ""


def _mean_ms(timeline: Timeline) -> tuple[float, float]:
    """Return the milliseconds that the mean rank computes and waits."""
    return 1e3 * float((timeline.compute + timeline.linear).mean()), 1e3 * float(timeline.waiting.mean())


def _ms(milliseconds: float) -> str:
    """Return three digits, or all before the point."""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _time_spent(timeline: Timeline, batches: int) -> str:
    busy, waiting = _mean_ms(timeline)
    subject = "on the first batch its mean rank" if batches > 1 else "its mean rank"
    return f"{subject} computes {_ms(busy)} ms and waits {_ms(waiting)} ms"


def _second(chosen: CandidateTrial, others: Sequence[CandidateTrial]) -> str:
    """Describe the fastest of the other simulated candidates."""
    simulated = [trial for trial in others if trial.seconds and trial.duplicate_of is None]
    if not simulated:
        return "; nothing else had to be simulated"
    second = min(simulated, key=lambda trial: trial.relative_to(chosen))
    assert second.timeline is not None
    busy, waiting = _mean_ms(second.timeline)
    return f"; with {second.candidate} {_ms(busy)} and {_ms(waiting)} ms"


def _others(chosen: CandidateTrial, others: Sequence[CandidateTrial]) -> str:
    """Describe the best candidate of each algorithm, and all that are refused."""
    compared = [trial for trial in others if trial.duplicate_of is None and trial.refused is None]
    best: dict[str, CandidateTrial] = {}
    for trial in sorted(compared, key=lambda trial: trial.relative_to(chosen)):
        best.setdefault(trial.candidate.algorithm, trial)
    texts = [
        f"{trial.candidate}: {'at least ' if trial.limited_by else ''}{trial.relative_to(chosen):.2f} times as long"
        + _scope(chosen, trial)
        for trial in best.values()
    ]
    texts += [f"{trial.candidate}: {trial.refused}" for trial in others if trial.refused is not None]
    return "others: " + "; ".join(texts) if texts else "there is no other candidate"


def _scope(chosen: CandidateTrial, trial: CandidateTrial) -> str:
    """Name the batches on which a candidate was tried, and what limits it on the last one."""
    batches = "the first batch" if trial.batches_tried == 1 else f"the first {trial.batches_tried} batches"
    scope = f" on {batches}" if trial.batches_tried < len(chosen.seconds) else ""
    return scope + (f" ({trial.limited_by} alone takes that)" if trial.limited_by else "")
