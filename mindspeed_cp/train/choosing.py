"""Which of a run's algorithms a row takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspeed_cp.config import Settings
from mindspeed_cp.config_checks import layer_of
from mindspeed_cp.config_variants import variants
from mindspeed_cp.cost.candidates import Candidate
from mindspeed_cp.cost.per_batch import BatchChooser
from mindspeed_cp.layout import Documents
from mindspeed_cp.train.auto import sample_rows, typical_attention


class Chosen(NamedTuple):
    """What a row takes.

    Attributes:
        algorithm: its name.
        options: as build_plan takes them.
        word: both as the settings have them, such as hybrid:ulysses_degree=4.
    """

    algorithm: str
    options: dict[str, Any]
    word: str


class RowChooser:
    """The algorithm and options of each row; the same on every rank. With one algorithm there is nothing to choose.

    Args:
        settings: of the run; where rows choose, its first rows scale the estimates.

    Raises:
        ConfigError: an algorithm cannot do one of these rows.
    """

    def __init__(self, settings: Settings) -> None:
        self._known: dict[Candidate, Chosen] = {}
        for one in variants(settings):
            suite, options = one.context_parallel_suite, one.plan_options
            word = Candidate(suite.algorithm, tuple(suite.options.items())).word
            self._known[Candidate(suite.algorithm, tuple(options.items()))] = Chosen(suite.algorithm, options, word)
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
