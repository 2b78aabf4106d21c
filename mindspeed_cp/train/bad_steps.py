"""What follows a step whose loss or gradient is not finite, or whose loss is a spike.

All ranks decide alike, from figures that they have gathered, so nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, cast

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import DivergenceError

HISTORY = 64  # losses that a spike is measured against
LEAST_HISTORY = 16  # fewer say nothing
MAD_FLOOR = 0.01  # of the median: a flat curve would make every loss a spike
SKIPS_IN_A_ROW = 10
ROLLBACKS_TO_A_CHECKPOINT = 3

Action = Literal["keep", "skip", "rollback"]

_ADVICE = "lower train.lr or clip more (train.clip_grad), which a resumed run may"


def spike_limit(losses: Sequence[float], mads: float) -> float:
    """Return the loss above which a step is a spike: the median of earlier losses plus `mads` times their median
    absolute deviation (MAD), which counts as at least 1 % of the median.

    Args:
        losses: losses of earlier steps, the newest last; infinity is returned for fewer than LEAST_HISTORY.
        mads: train.spike_mads; 0: infinity is returned.
    """
    if not mads or len(losses) < LEAST_HISTORY:
        return math.inf
    middle = median(losses)
    deviation = median(abs(loss - middle) for loss in losses)
    return middle + mads * max(deviation, MAD_FLOOR * abs(middle))


def with_loss(losses: Sequence[float], loss: float) -> tuple[float, ...]:
    """Return the history with one more loss."""
    return (*losses, loss)[-HISTORY:]


class BadStepPolicy:
    """Decides what follows a bad step, and ends the run where the same happens again and again.

    Args:
        settings: settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._nonfinite, self._spike = settings.train.nonfinite_policy, settings.train.spike_policy
        self.mads = settings.train.spike_mads
        self._skips = 0  # in a row
        self._rollbacks: list[int] = []  # steps of the checkpoints gone back to, the newest ones

    def judge(
        self, step: int, nonfinite: str | None, loss: float, losses: Sequence[float]
    ) -> tuple[Action, str | None]:
        """Return what to do with a step whose gradients are known, and what is wrong with it (None: nothing).

        Args:
            step: number of the step.
            nonfinite: what is not finite, and where, or None.
            loss: its loss.
            losses: losses of earlier steps.

        Raises:
            DivergenceError: the policy is to stop, or too many steps in a row were skipped.
        """
        policy: str = self._nonfinite
        problem = nonfinite
        if problem is None:
            limit = spike_limit(losses, self.mads)
            if loss <= limit:
                self._skips = 0
                return "keep", None
            policy = self._spike
            problem = (
                f"the loss of {loss:.4g} is a spike, above {limit:.4g}: the median of {len(losses)} steps and "
                f"{self.mads:g} MAD"
            )
        if policy == "stop":
            key = "spike_policy" if nonfinite is None else "nonfinite_policy"
            raise DivergenceError(
                f"step {step}: {problem}; {_ADVICE}, or set train.{key} to skip or rollback; the step was not kept, "
                "and checkpoints are untouched"
            )
        self._skips = self._skips + 1 if policy == "skip" else 0
        if self._skips > SKIPS_IN_A_ROW:
            raise DivergenceError(f"step {step}: {problem}, after {SKIPS_IN_A_ROW} skipped steps in a row; {_ADVICE}")
        return cast("Action", policy), problem

    def rolled_back(self, step: int, to: int, problem: str) -> None:
        """Count that the run went back from one step to the checkpoint of another.

        Raises:
            DivergenceError: it did so too often to the same checkpoint.
        """
        self._rollbacks = [*(earlier for earlier in self._rollbacks if earlier == to), to]
        if len(self._rollbacks) > ROLLBACKS_TO_A_CHECKPOINT:
            raise DivergenceError(
                f"step {step}: {problem}, after {ROLLBACKS_TO_A_CHECKPOINT} rollbacks to step {to}; {_ADVICE}"
            )
