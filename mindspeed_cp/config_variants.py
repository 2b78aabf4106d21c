"""Settings with another algorithm: what `auto` finds in the place of its name, and what rows may choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.cost.candidates import Candidate, read_candidate
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import ALGORITHMS, AUTO, algorithm_options

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings
    from mindspeed_cp.config_suite import SuiteSettings

SECTION = "context_parallel_suite"


def with_algorithm(settings: Settings, candidate: Candidate, also: list[str] | None = None) -> Settings:
    """The same settings but for the algorithm, its options, and what rows may choose besides.

    Raises:
        ConfigError: they do not go together.
    """
    every = {name for algorithm in ALGORITHMS for name in algorithm_options(algorithm)}
    given = settings.model_dump(exclude_unset=True)
    section: dict[str, Any] = given.get(SECTION, {})
    kept = {key: value for key, value in section.items() if key not in every | {"also", "per_batch"}}
    suite = settings.context_parallel_suite
    if suite.also and not also and suite.p2p == "auto" and not suite.uses_lanes:
        kept["p2p"] = "batched"  # one of several: a ring alone would take lanes
    own = {"algorithm": candidate.algorithm, **dict(candidate.options), **({"also": also} if also else {})}
    return type(settings)(**(given | {SECTION: kept | own}))


def variants(settings: Settings) -> tuple[Settings, ...]:
    """For each algorithm that a row may take, that of the settings first, the settings with it alone."""
    suite = settings.context_parallel_suite
    if not suite.also:
        return (settings,)
    own = Candidate(suite.algorithm, tuple(suite.options.items()))
    return tuple(with_algorithm(settings, one) for one in (own, *map(read_candidate, suite.also)))


def check_choice(suite: SuiteSettings) -> None:
    """Raise ConfigError where it is not clear whether rows choose."""
    if suite.per_batch and suite.algorithm != AUTO:
        rule = f"is for algorithm: auto; leave it out, or name what rows may take besides {suite.algorithm} in also"
        raise bad_value("per_batch", True, rule)
    if suite.also and suite.algorithm == AUTO:
        rule = "auto finds other algorithms itself; give per_batch: true, or name the algorithm"
        raise bad_value("also", suite.also, rule)
    known = {(suite.algorithm, frozenset(suite.options.items()))}
    for word in suite.also or ():
        try:
            candidate = read_candidate(word)
        except ConfigError as error:
            raise bad_value("also", word, f"cannot be used: {error}") from None
        same = candidate.algorithm, frozenset(candidate.options)
        if same in known:
            raise bad_value("also", word, "cannot be used: is there already; leave it out")
        known.add(same)


def check_also(settings: Settings) -> None:
    """Raise ConfigError where rows are to choose from what the settings do not go with."""
    for word in settings.context_parallel_suite.also or ():
        try:
            with_algorithm(settings, read_candidate(word))
        except ConfigError as error:
            raise bad_value(f"{SECTION}.also", word, f"cannot be used: {error}") from None
