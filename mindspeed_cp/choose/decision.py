"""Results of a choice: the trial of each candidate, and the decision."""

from __future__ import annotations

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
