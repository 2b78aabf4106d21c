"""Options of the algorithms as keys of the section `context_parallel_suite`; their builders declare them."""

from __future__ import annotations

from typing import Any

from mindspeed_cp.algorithms import ALGORITHMS, AlgorithmOption
from mindspeed_cp.schema.messages import bad_value, format_value
from mindspeed_cp.schema.numbers import divisors


def options_by_name() -> dict[str, dict[str, AlgorithmOption]]:
    """Return for each option name the options of that name, by algorithm."""
    table: dict[str, dict[str, AlgorithmOption]] = {}
    for algorithm in ALGORITHMS.values():
        for name, option in algorithm.options.items():
            table.setdefault(name, {})[algorithm.name] = option
    return table


def check_option(option: AlgorithmOption, value: Any, ranks: int) -> Any:
    """Return the value of an option; raise SettingError if it is invalid on this number of ranks."""
    value = option.with_words(value)
    problem = option.problem(value, ranks)
    if problem is not None:
        raise bad_value(option.name, value, f"must be {problem} or null")
    return value


def check_divides(key: str, value: int, number_key: str, number: int) -> None:
    """Raise SettingError unless a value divides the number of another key."""
    if number % value:
        valid = ", ".join(map(str, divisors(number)))
        raise bad_value(key, value, f"must divide {number_key} = {number}; valid: {valid}")


def describe_option(by_algorithm: dict[str, AlgorithmOption]) -> str:
    """Return the text of the reference for an option: its meaning and default in the algorithms that have it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for algorithm, option in by_algorithm.items():
        default = "" if option.default is None else f"; null: {format_value(option.default).strip(chr(34))}"
        source = "; in a training: from the sections model and train" if option.from_model else ""
        groups.setdefault((option.description.rstrip("."), default + source), []).append(algorithm)
    return "; ".join(f"{', '.join(names)}: {text}{default}" for (text, default), names in groups.items())
