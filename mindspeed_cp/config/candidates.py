"""Settings with another algorithm: the one that `auto` chooses, and those of train.compare."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from mindspeed_cp.algorithms import AUTO
from mindspeed_cp.choose.candidates import Candidate, default_candidates, parse_candidate
from mindspeed_cp.choose.choose import Decision, choose_algorithm
from mindspeed_cp.config.derived import first_rows, mean_layer_cost, rank_attention
from mindspeed_cp.config.sections import Sections
from mindspeed_cp.config.suite import TOKEN_CAP_OPTION
from mindspeed_cp.errors import ConfigError

SUITE_SECTION = "context_parallel_suite"

SAMPLE_ROWS = 4  # first rows of the training, by which `auto` chooses

_S = TypeVar("_S", bound=Sections)


def replace_algorithm(settings: _S, candidate: Candidate) -> _S:
    """Return the same settings with another algorithm and its options.

    Raises:
        ConfigError: the algorithm does not fit the other settings.
    """
    suite = settings.context_parallel_suite
    given = settings.model_dump(exclude_unset=True)
    section: dict[str, Any] = given.get(SUITE_SECTION, {})
    kept = {key: value for key, value in section.items() if key not in suite.options}
    changed = {"algorithm": candidate.algorithm, **dict(candidate.options)}
    return type(settings)(**(given | {SUITE_SECTION: kept | changed}))


def resolve_auto(settings: _S) -> tuple[_S, Decision | None]:
    """Return the settings with the algorithm, and its options, that is simulated fastest for the first rows in place of
    auto, and the decision; equal on all ranks for equal corpora.

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
    decision = choose_algorithm(
        first_rows(settings, SAMPLE_ROWS),
        suite.topology,
        attention,
        layer=mean_layer_cost(settings),
        candidates=fitting,
        options=settings.plan_options,
    )
    return replace_algorithm(settings, decision.candidate), decision


def compared_algorithms(settings: Sections) -> list[str]:
    """Return the algorithms of train.compare and, last, that of the run, each once, as :func:`compared_settings` takes
    them."""
    suite = settings.context_parallel_suite
    own = Candidate(suite.algorithm, tuple(suite.options.items())).as_setting
    compared = dict.fromkeys(parse_candidate(word).as_setting for word in settings.train.compare)
    return [*(word for word in compared if word != own), own]


def compared_settings(settings: _S, word: str) -> _S:
    """Return the settings with an algorithm of train.compare, such as "ring" or "direct:prefetch=2".

    Raises:
        ConfigError: There is no such algorithm or option, or it does not fit the other settings.
    """
    train = settings.train.model_copy(update={"compare": []})
    return replace_algorithm(settings.model_copy(update={"train": train}), parse_candidate(word))
