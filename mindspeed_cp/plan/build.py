"""build_plan: the algorithms by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.ring import LAYOUTS, build_ring

Builder = Callable[..., Plan]

ALGORITHMS: dict[str, Builder] = {"ring": build_ring}

#: Names that Megatron and MindSpeed use for the algorithms of this version.
ALIASES = {"p2p": "ring", "megatron_cp_algo": "ring"}

#: Values of options that are names.
CHOICES = {("ring", "layout"): tuple(LAYOUTS)}


def algorithm_name(name: str) -> str:
    """The project's name of an algorithm, given under any of its names.

    Raises:
        ConfigError: there is no such algorithm in this version.
    """
    own = ALIASES.get(name, name)
    if own not in ALGORITHMS:
        known = ", ".join([*ALGORITHMS, *ALIASES])
        raise ConfigError(f"algorithm is {name!r}; valid in this version: {known}")
    return own


def build_plan(
    documents: Documents, topology: Topology, attention: AttentionConfig, algorithm: str = "ring", **options: object
) -> Plan:
    """Decide who holds, sends and computes what. Pure: the same input gives the same plan on every rank.

    Args:
        documents: the packed batch.
        topology: the context-parallel ranks.
        attention: what one layer computes on one tensor-parallel rank.
        algorithm: "ring" (also under Megatron's and MindSpeed's names p2p and megatron_cp_algo).
        **options: of the algorithm. ring: layout = "zigzag" (default) or "contiguous".

    Raises:
        ConfigError: the algorithm or an option is unknown; names the valid ones.
    """
    name = algorithm_name(algorithm)
    builder = ALGORITHMS[name]
    valid = list(inspect.signature(builder).parameters)[3:]
    for key, value in options.items():
        if key not in valid:
            raise ConfigError(f"option {key!r} is not one of algorithm {name!r}; valid: {', '.join(valid) or 'none'}")
        choices = CHOICES.get((name, key))
        if choices is not None and value not in choices:
            raise ConfigError(f"option {key!r} of algorithm {name!r} is {value!r}; valid: {', '.join(choices)}")
    return builder(documents, topology, attention, **options)
