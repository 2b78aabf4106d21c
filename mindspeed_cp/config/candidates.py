"""Settings with another algorithm: the one that `auto` chooses, and the candidates that rows choose from."""

from __future__ import annotations

from typing import Any, TypeVar

from mindspeed_cp.choose.candidates import Candidate, parse_candidate
from mindspeed_cp.config.sections import Sections

SUITE_SECTION = "context_parallel_suite"

_S = TypeVar("_S", bound=Sections)


def replace_algorithm(settings: _S, candidate: Candidate, more: list[str] | None = None) -> _S:
    """Return the same settings with another algorithm, its options, and more candidates of each row.

    Raises:
        ConfigError: the algorithm does not fit the other settings.
    """
    suite = settings.context_parallel_suite
    given = settings.model_dump(exclude_unset=True)
    section: dict[str, Any] = given.get(SUITE_SECTION, {})
    kept = {key: value for key, value in section.items() if key not in {*suite.options, "candidates"}}
    if suite.row_candidates and not more and suite.p2p_groups == "auto" and not suite.uses_directional_groups:
        kept["p2p_groups"] = "batched"  # the candidates share their groups; a ring alone would take directional ones
    changed = {"algorithm": candidate.algorithm, **dict(candidate.options), **({"candidates": more} if more else {})}
    return type(settings)(**(given | {SUITE_SECTION: kept | changed}))


def candidate_settings(settings: _S) -> tuple[_S, ...]:
    """Return the settings with each algorithm that a row may take; the algorithm of the settings comes first."""
    suite = settings.context_parallel_suite
    if not suite.row_candidates:
        return (settings,)
    first = Candidate(suite.algorithm, tuple(suite.options.items()))
    return tuple(replace_algorithm(settings, entry) for entry in (first, *map(parse_candidate, suite.row_candidates)))


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
