"""build_plan: the algorithms by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.all_gather import build_all_gather
from mindspeed_cp.plan.config import AttentionConfig, Topology
from mindspeed_cp.plan.direct import build_direct
from mindspeed_cp.plan.double_ring import build_double_ring
from mindspeed_cp.plan.hierarchical import REMAPS, build_hierarchical
from mindspeed_cp.plan.hybrid import build_hybrid
from mindspeed_cp.plan.placement import LAYOUTS
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.plan.ring import build_ring
from mindspeed_cp.plan.ulysses import build_ulysses

Builder = Callable[..., Plan]

ALGORITHMS: dict[str, Builder] = {
    "ring": build_ring,
    "double_ring": build_double_ring,
    "ulysses": build_ulysses,
    "hybrid": build_hybrid,
    "all_gather": build_all_gather,
    "direct": build_direct,
    "hierarchical": build_hierarchical,
}

#: Names that Megatron and MindSpeed use for them.
ALIASES = {
    "p2p": "ring",
    "megatron_cp_algo": "ring",
    "a2a": "ulysses",
    "ulysses_cp_algo": "ulysses",
    "a2a+p2p": "hybrid",
    "hybrid_cp_algo": "hybrid",
    "allgather": "all_gather",
    "kvallgather_cp_algo": "all_gather",
}

#: In the settings of a training: the algorithm that is chosen by simulation before the training begins.
AUTO = "auto"

#: Algorithms of later versions and of other projects, and what comes nearest to each in this one.
LATER_ALGORITHMS = {
    "adaptive_cp_algo": "direct, which sends only what the mask lets others see",
    "hybrid_adaptive_cp_algo": "hybrid",
}

#: Options under other projects' names, and ours.
OTHER_OPTIONS = {
    "hierarchical_context_parallel_sizes": "[degree, rest] is algorithm hybrid with ulysses_degree = degree",
    "ulysses_degree_in_cp": "write ulysses_degree",
    "window_size": "write cp_window_size",
}

#: Values of options that are names.
CHOICES = {"layout": LAYOUTS, "remap": REMAPS}


#: The one thing that no plan can do, and what to use instead.
CAUSAL_OTHER_KEYS = (
    "attention.mask is 'causal' with keys of other lengths than queries, which leaves open where among the keys a "
    "query stands",
    "mask 'full', or kv_documents with the lengths of documents",
)


def algorithm_options(name: str) -> dict[str, object]:
    """Options of an algorithm and their defaults."""
    parameters = list(inspect.signature(ALGORITHMS[algorithm_name(name)]).parameters.values())[4:]
    return {parameter.name: parameter.default for parameter in parameters}


def algorithm_name(name: str) -> str:
    """The project's name of an algorithm, given under any of its names.

    Raises:
        ConfigError: there is no such algorithm in this version.
    """
    problem = no_algorithm(name)
    if problem is not None:
        raise ConfigError(f"algorithm is {name!r}: {problem.removeprefix('is ')}")
    return ALIASES.get(name, name)


def no_algorithm(name: object) -> str | None:
    """Why a name is none of an algorithm, and what is nearest and valid; None for a name that is one."""
    names = [*ALGORITHMS, *ALIASES]
    valid = f"valid: {', '.join(names)}"
    if not isinstance(name, str):
        return f"must be a name; {valid}"
    if name in names:
        return None
    if name == AUTO:
        return (
            "is no algorithm of a plan, but chooses one before a training begins, as "
            f"mindspeed_cp.cost.choose.choose_algorithm does; {valid}"
        )
    if name in LATER_ALGORITHMS:
        return f"is not in this version; nearest: {LATER_ALGORITHMS[name]}; {valid}"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"unknown algorithm; {f'did you mean {near[0]}? ' if near else ''}{valid}"


def build_plan(
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    algorithm: str = "ring",
    kv_documents: Documents | None = None,
    **options: object,
) -> Plan:
    """Decide who holds, sends and computes what. Pure: the same input gives the same plan on every rank.

    Args:
        documents: the packed batch.
        topology: the context-parallel ranks.
        attention: what one layer computes on one tensor-parallel rank.
        algorithm: ring, double_ring, ulysses, hybrid, all_gather, direct or hierarchical; also under Megatron's and
            MindSpeed's names (`ALIASES`).
        kv_documents: for cross-attention the length of each document's keys and values, when `documents` has that of
            its queries; full masks only.
        **options: of the algorithm, see its builder. All but ulysses and hierarchical have layout = "zigzag" (the
            default), "contiguous" or "balanced"; double_ring has cp_window_size, hybrid ulysses_degree, direct
            prefetch.

    Raises:
        ConfigError: the algorithm or an option is unknown or out of range, or the documents do not go together; names
            what is valid.
    """
    given: dict[str, tuple[object, type]] = {
        "documents": (documents, Documents),
        "topology": (topology, Topology),
        "attention": (attention, AttentionConfig),
        "kv_documents": (documents if kv_documents is None else kv_documents, Documents),
    }
    for what, (found, kind) in given.items():
        if not isinstance(found, kind):
            raise ConfigError(f"{what} is {found!r}; valid: {kind.__name__}(...)")
    name = algorithm_name(algorithm)
    valid = algorithm_options(name)
    for key, value in options.items():
        if key not in valid:
            known = ", ".join(valid) or "none"
            known += f"; {OTHER_OPTIONS[key]}" if key in OTHER_OPTIONS else ""
            raise ConfigError(f"option {key!r} is not one of algorithm {name!r}; valid: {known}")
        choices = CHOICES.get(key)
        if isinstance(valid[key], bool) and not isinstance(value, bool):
            raise ConfigError(f"option {key!r} of algorithm {name!r} is {value!r}; valid: true, false")
        if choices is not None and not (isinstance(value, str) and value in choices):
            raise ConfigError(f"option {key!r} of algorithm {name!r} is {value!r}; valid: {', '.join(choices)}")
    keys = documents if kv_documents is None else kv_documents
    if len(keys) != len(documents):
        raise ConfigError(
            f"kv_documents has {len(keys)} documents, documents {len(documents)}; valid: one length of keys for each "
            "document"
        )
    if attention.mask == "causal" and keys != documents:
        raise ConfigError(f"{CAUSAL_OTHER_KEYS[0]}; valid: {CAUSAL_OTHER_KEYS[1]}")
    return ALGORITHMS[name](documents, keys, topology, attention, **options)
