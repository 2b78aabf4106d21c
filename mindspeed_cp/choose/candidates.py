"""Candidates of a choice: algorithms with options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_cp.algorithms.registry import ALGORITHMS, algorithm_name, algorithm_options, build_plan
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import check_type

#: Algorithms whose options `default_candidates` knows.
_WITH_OPTIONS = ("hierarchical", "hybrid", "ulysses", "direct", "all_gather", "double_ring", "ring")


@dataclass(frozen=True)
class Candidate:
    """An algorithm, also by one of its aliases, and its options as (name, value).

    Raises:
        ConfigError: The algorithm is unknown.
    """

    algorithm: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", algorithm_name(self.algorithm))

    def __str__(self) -> str:
        options = ", ".join(f"{name} {_text(value)}" for name, value in self.options)
        return f"{self.algorithm} ({options})" if options else self.algorithm

    @property
    def as_setting(self) -> str:
        """The candidate as one word, such as hybrid:ulysses_degree=4 (:func:`parse_candidate`)."""
        return ":".join((self.algorithm, *(f"{name}={_text(value)}" for name, value in self.options)))

    def all_options(self, model_options: Mapping[str, Any]) -> dict[str, Any]:
        """Return its options and those of the model that the algorithm has."""
        known = algorithm_options(self.algorithm)
        return {name: value for name, value in model_options.items() if name in known} | dict(self.options)

    def build_plan(
        self, documents: Documents, topology: Topology, attention: AttentionConfig, model_options: Mapping[str, Any]
    ) -> Plan:
        """Build its plan of a batch; `model_options` as for :meth:`all_options`."""
        return build_plan(documents, topology, attention, self.algorithm, **self.all_options(model_options))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_candidate(word: str) -> Candidate:
    """Parse a candidate such as hybrid:ulysses_degree=4.

    Raises:
        ConfigError: The algorithm or an option is unknown, an option is given twice, or its value is valid for no
            documents and ranks; lists what is valid.
    """
    check_type("candidate", word, str, "text such as hybrid:ulysses_degree=4")
    alias, *pairs = word.split(":")
    name = algorithm_name(alias)
    known, options = algorithm_options(name), {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            valid = ", ".join(f"{option}=..." for option in known) or "none"
            raise ConfigError(f"{pair!r}: {name} has no such option; valid: {valid}")
        if key in options:
            raise ConfigError(f"{pair!r}: {key} is given twice")
        options[key] = known[key].with_words(parse_option_value(value))
        problem = known[key].problem(options[key])
        if problem is not None:
            raise ConfigError(f"{name}: {key} is {short_repr(options[key])}; valid: {problem}")
    return Candidate(name, tuple(options.items()))


def parse_option_value(text: str) -> int | bool | str:
    """Return an option's value as an integer or a bool if it reads as one, else as text."""
    if re.fullmatch(r"-?[0-9]{1,40}", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def default_candidates(topology: Topology, attention: AttentionConfig) -> list[Candidate]:
    """Return all candidates that are worth trying on these ranks, those that are often fast first.

    Args:
        topology: the ranks.
        attention: of one tensor-parallel rank.
    """
    ranks, ranks_per_node = topology.ranks, topology.ranks_per_node
    if ranks == 1:
        return [Candidate("ring")]
    out = [Candidate("hierarchical"), Candidate("hierarchical", (("head_split", False),))]
    if topology.nodes > 1:
        out += [Candidate("hierarchical", (("routing", False),)), Candidate("hierarchical", (("remap", "off"),))]
        default = algorithm_options("hierarchical")["prefetch"].default
        prefetches = {1, min(topology.nodes - 1, 7)} - {default}  # rounds from other nodes
        out += [Candidate("hierarchical", (("prefetch", count),)) for count in sorted(prefetches)]
    divisors = [  # groups inside nodes, or of whole nodes
        size for size in range(2, ranks) if ranks % size == 0 and 0 in (ranks_per_node % size, size % ranks_per_node)
    ]
    degrees = [size for size in divisors if size <= attention.heads]
    out += [Candidate("hybrid", (("ulysses_degree", size),)) for size in reversed(degrees)]
    if attention.heads >= ranks:
        out.append(Candidate("ulysses"))
    out += [Candidate("direct", (("layout", "balanced"),)), Candidate("all_gather"), Candidate("direct")]
    out.append(Candidate("direct", (("prefetch", 2),)))
    if topology.nodes > 1 and ranks_per_node > 1:
        windows = [size for size in divisors if ranks_per_node <= 2 * size]
        out += [Candidate("double_ring", (("cp_window_size", size),)) for size in windows]
    # Algorithms of others, with their defaults.
    out += [Candidate(name) for name in ALGORITHMS if name not in _WITH_OPTIONS]
    return [*out, Candidate("ring")]
