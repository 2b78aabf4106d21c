"""Algorithms with options, as candidates of a choice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.build import algorithm_name, algorithm_options
from mindspeed_cp.plan.config import AttentionConfig, Topology


@dataclass(frozen=True)
class Candidate:
    """An algorithm, also under another of its names, and options of it, as (name, value).

    Raises:
        ConfigError: there is no such algorithm.
    """

    algorithm: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", algorithm_name(self.algorithm))

    def __str__(self) -> str:
        said = ", ".join(
            f"{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in self.options
        )
        return f"{self.algorithm} ({said})" if said else self.algorithm

    @property
    def word(self) -> str:
        """As one word, which :func:`read_candidate` reads: hybrid:ulysses_degree=4."""
        options = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.options)
        return ":".join((self.algorithm, *options))


def read_candidate(word: str) -> Candidate:
    """A candidate from its word.

    Raises:
        ConfigError: the algorithm or an option is unknown, or an option is given twice; names what is valid.
    """
    given, *pairs = word.split(":")
    name = algorithm_name(given)
    known, options = algorithm_options(name), {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            valid = ", ".join(f"{option}=..." for option in known) or "none"
            raise ConfigError(f"{pair!r} is no option of {name}; valid: {valid}")
        if key in options:
            raise ConfigError(f"{pair!r}: {key} is given twice")
        options[key] = read_option(value)
    return Candidate(name, tuple(options.items()))


def read_option(text: str) -> int | bool | str:
    """What the value of an option means: a whole number, true or false where it is one."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def candidates(topology: Topology, attention: AttentionConfig) -> list[Candidate]:
    """All that are worth trying on these ranks, those first that are often fast."""
    ranks, here = topology.ranks, topology.ranks_per_node
    if ranks == 1:
        return [Candidate("ring")]
    found = [Candidate("hierarchical"), Candidate("hierarchical", (("head_split", False),))]
    if topology.nodes > 1:
        found += [Candidate("hierarchical", (("routing", False),)), Candidate("hierarchical", (("remap", "off"),))]
        prefetches = {1, min(topology.nodes - 1, 7)} - {3}  # of other nodes; 3 is the default
        found += [Candidate("hierarchical", (("prefetch", count),)) for count in sorted(prefetches)]
    degrees = [d for d in range(2, min(ranks - 1, attention.heads) + 1) if ranks % d == 0 and _nests(d, here)]
    found += [Candidate("hybrid", (("ulysses_degree", d),)) for d in reversed(degrees)]
    if attention.heads >= ranks:
        found.append(Candidate("ulysses"))
    found += [Candidate("direct", (("layout", "balanced"),)), Candidate("all_gather"), Candidate("direct")]
    found.append(Candidate("direct", (("prefetch", 2),)))
    if topology.nodes > 1 and here > 1:
        windows = [d for d in range(2, ranks // 2 + 1) if ranks % d == 0 and _nests(d, here) and here <= 2 * d]
        found += [Candidate("double_ring", (("cp_window_size", d),)) for d in windows]
    return [*found, Candidate("ring")]


def _nests(size: int, here: int) -> bool:
    """Whether groups of consecutive ranks lie in nodes of `here`, or consist of some."""
    return here % size == 0 or size % here == 0
