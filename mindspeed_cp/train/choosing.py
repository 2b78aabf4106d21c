"""Which of a run's algorithms a row takes."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.config import Settings
from mindspeed_cp.config_checks import layer_of
from mindspeed_cp.config_variants import variants
from mindspeed_cp.cost.candidates import Candidate
from mindspeed_cp.cost.per_batch import BatchChooser
from mindspeed_cp.layout import Documents
from mindspeed_cp.train.auto import sample_rows, typical_attention

#: The name of an algorithm, and its options as build_plan takes them.
Chosen = tuple[str, dict[str, Any]]


class RowChooser:
    """The algorithm and options of each row; the same on every rank. With one algorithm there is nothing to choose.

    Args:
        settings: of the run; where rows choose, its first rows scale the estimates.

    Raises:
        ConfigError: an algorithm cannot do one of these rows.
    """

    def __init__(self, settings: Settings) -> None:
        every = [(one.context_parallel_suite.algorithm, one.plan_options) for one in variants(settings)]
        self._known = {Candidate(name, tuple(options.items())): (name, options) for name, options in every}
        self._chooser: BatchChooser | None = None
        if len(self._known) > 1:
            self._chooser = BatchChooser(
                list(self._known),
                sample_rows(settings),
                settings.context_parallel_suite.topology,
                typical_attention(settings),
                layer=layer_of(settings),
            )

    @property
    def every(self) -> list[Chosen]:
        """All that rows may take, that of the settings first."""
        return list(self._known.values())

    def __call__(self, documents: Documents) -> Chosen:
        """What a row of these documents takes."""
        if self._chooser is None:
            return self.every[0]
        return self._known[self._chooser(documents)]
