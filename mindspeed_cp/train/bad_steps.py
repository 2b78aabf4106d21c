"""Steps whose loss or gradient is not finite, or whose loss is a spike: train.nonfinite_policy.

All ranks decide alike, from figures that they have gathered, so nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import DivergenceError

HISTORY = 64  # losses that a spike is measured against
LEAST_HISTORY = 16  # fewer say nothing
MAD_FLOOR = 0.01  # of the median: a flat curve would make every loss a spike
SKIPS_IN_A_ROW = 10

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


class BadStepPolicy:
    """Ends the run at a bad step, or has it skipped.

    Args:
        settings: settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._skips, self._mads = settings.train.nonfinite_policy == "skip", settings.train.spike_mads
        self._in_a_row = 0

    def problem(self, step: int, nonfinite: str | None, loss: float, losses: Sequence[float]) -> str | None:
        """Return why a step is to be skipped, or None: its weights are to be updated.

        Args:
            step: number of the step.
            nonfinite: what is not finite, and where, or None.
            loss: its loss.
            losses: losses of earlier steps.

        Raises:
            DivergenceError: the policy is to stop, or too many steps in a row were skipped.
        """
        limit = spike_limit(losses, self._mads)
        if nonfinite is None and loss <= limit:
            self._in_a_row = 0
            return None
        problem = nonfinite or (
            f"the loss of {loss:.4g} is a spike, above {limit:.4g}: the median of {len(losses)} steps and "
            f"{self._mads:g} MAD"
        )
        if not self._skips:
            raise DivergenceError(
                f"step {step}: {problem}; {_ADVICE}, or set train.nonfinite_policy: skip; the step was not kept, and "
                "checkpoints are untouched"
            )
        self._in_a_row += 1
        if self._in_a_row > SKIPS_IN_A_ROW:
            raise DivergenceError(f"step {step}: {problem}, after {SKIPS_IN_A_ROW} skipped steps in a row; {_ADVICE}")
        return problem
