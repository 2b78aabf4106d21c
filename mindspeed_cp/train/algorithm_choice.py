"""The algorithm of a run, where the settings leave it open, and of each of its rows.

`resolve_auto` replaces `algorithm: auto` by the algorithm, with its options, that is simulated fastest for the first
rows of the training. `RowChooser` picks the algorithm of each row where the settings name several.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from mindspeed_cp.algorithms import AUTO
from mindspeed_cp.choose.batch_chooser import BatchChooser, shortlist
from mindspeed_cp.choose.candidates import Candidate, default_candidates
from mindspeed_cp.choose.choose import Decision, choose_algorithm
from mindspeed_cp.config.candidates import candidate_settings, replace_algorithm
from mindspeed_cp.config.derived import first_rows, mean_layer_cost, rank_attention, training_plan_options
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents

SAMPLE_ROWS = 4  # first rows of the training, by which an algorithm is chosen


class RowAlgorithm(NamedTuple):
    """Algorithm of a row's plans.

    Attributes:
        algorithm: its name.
        options: keyword arguments of build_plan.
        word: algorithm and options as the settings write them, for example hybrid:ulysses_degree=4.
    """

    algorithm: str
    options: dict[str, Any]
    word: str


def resolve_auto(settings: Settings) -> tuple[Settings, Decision | None]:
    """Return the settings with an algorithm in place of auto, and the decision; equal on all ranks for equal corpora.

    Raises:
        ConfigError: The corpus cannot be read, or no algorithm fits the settings.
    """
    suite = settings.context_parallel_suite
    if suite.algorithm != AUTO:
        return settings, None
    attention = rank_attention(settings)
    fitting = []
    for candidate in default_candidates(suite.topology, attention):
        if TOKEN_CAP_OPTION in suite.options and suite.topology.ranks > 1:  # one rank holds the whole row
            cap = TOKEN_CAP_OPTION, suite.options[TOKEN_CAP_OPTION]
            candidate = replace(candidate, options=(*candidate.options, cap))
        with suppress(ConfigError):  # settings that refuse this algorithm
            replace_algorithm(settings, candidate)
            fitting.append(candidate)
    rows, layer, options = first_rows(settings, SAMPLE_ROWS), mean_layer_cost(settings), settings.plan_options
    decision = choose_algorithm(rows, suite.topology, attention, layer=layer, candidates=fitting, options=options)
    row_candidates = []
    if suite.candidates == AUTO:  # the near ones that fit into memory
        nearest = shortlist(decision)
        chooser = BatchChooser(nearest, rows, suite.topology, attention, layer=layer, options=options, drop=True)
        row_candidates = [candidate.as_setting for candidate in chooser.candidates[1:]]
    return replace_algorithm(settings, decision.candidate, row_candidates), decision


class RowChooser:
    """Chooses algorithm and options of each row, equally on every rank.

    Args:
        settings: settings of the run. With several algorithms, its first rows scale the estimates; with one there is
            nothing to choose.

    Raises:
        ConfigError: An algorithm cannot plan one of these rows.
    """

    def __init__(self, settings: Settings) -> None:
        self._algorithms: dict[Candidate, RowAlgorithm] = {}
        for variant in candidate_settings(settings):
            suite, options = variant.context_parallel_suite, training_plan_options(variant)
            word = Candidate(suite.algorithm, tuple(suite.options.items())).as_setting
            candidate = Candidate(suite.algorithm, tuple(options.items()))
            self._algorithms[candidate] = RowAlgorithm(suite.algorithm, options, word)
        self._chooser: BatchChooser | None = None
        if len(self._algorithms) > 1:
            self._chooser = BatchChooser(
                list(self._algorithms),
                first_rows(settings, SAMPLE_ROWS),
                settings.context_parallel_suite.topology,
                rank_attention(settings),
                layer=mean_layer_cost(settings),
            )

    @property
    def choices(self) -> list[RowAlgorithm]:
        """All algorithms that rows may take; the first is that of the settings."""
        return list(self._algorithms.values())

    def __call__(self, documents: Documents) -> RowAlgorithm:
        """Return the algorithm of a row with these documents."""
        if self._chooser is None:
            return self.choices[0]
        return self._algorithms[self._chooser(documents)]
