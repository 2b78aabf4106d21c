"""Algorithms by name: register_algorithm, algorithm_options and build_plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed_cp.algorithms.options import AlgorithmOption, read_options
from mindspeed_cp.cluster.cluster import cluster_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology, documents_error
from mindspeed_cp.plan.program import Plan
from mindspeed_cp.schema.messages import closest_names, did_you_mean, short_repr
from mindspeed_cp.schema.numbers import check_type
from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.tile_work import COARSE_SPANS

Builder = Callable[..., Plan]


@dataclass(frozen=True)
class Algorithm:
    """A registered algorithm.

    Attributes:
        name: its name in settings and on the command line.
        builder: function of (documents, kv_documents, topology, attention, *, options) that returns a plan.
        options: options that the builder declares, by name.
        summary: first line of the builder's docstring.
        aliases: names that Megatron and MindSpeed use.
        use_for: when to use it, for the table in docs/algorithms.md.
    """

    name: str
    builder: Builder
    options: dict[str, AlgorithmOption]
    summary: str
    aliases: tuple[str, ...] = ()
    use_for: str = ""


#: Types in which gradients of keys and values may travel.
ReduceDtype = Literal["float32", "bfloat16"]

#: What travels in multi-head latent attention (:func:`choose_latents`).
Latents = Literal["auto", "on", "off"]


def _common_options(
    documents: Documents,
    kv_documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    *,
    reduce_dtype: ReduceDtype = "float32",
    latents: Latents = "auto",
) -> None:
    """Declare the options that every algorithm has.

    Args:
        reduce_dtype: type in which gradients of keys and values travel between ranks; each rank sums them in float32.
            bfloat16 sends half the bytes and rounds every message, in a ring at each hop
        latents: multi-head latent attention: on, latents travel between ranks and readers expand them; off, keys and
            values of all heads travel; auto, what the cost model has faster. Other attention has no latents
    """


#: Options of all algorithms, by name.
COMMON_OPTIONS = read_options(_common_options)

#: Registered algorithms by name, in the order of registration.
ALGORITHMS: dict[str, Algorithm] = {}

#: Names that Megatron and MindSpeed use, with the name in this project.
ALIASES: dict[str, str] = {}

#: In training settings: choose an algorithm by simulation before the training starts.
AUTO = "auto"

#: Algorithms of other projects that this version does not have, with the nearest one that it has.
UNSUPPORTED_ALGORITHMS = {
    "adaptive_cp_algo": "direct, which sends only what the mask lets others see",
    "hybrid_adaptive_cp_algo": "hybrid",
}

#: Options under the names of other projects, with the way to write them here.
OPTION_HINTS = {
    "hierarchical_context_parallel_sizes": "[degree, rest] is algorithm hybrid with ulysses_degree = degree",
    "ulysses_degree_in_cp": "write ulysses_degree",
    "window_size": "write cp_window_size",
}


def register_algorithm(name: str, builder: Builder, *, aliases: tuple[str, ...] = (), use_for: str = "") -> None:
    """Add an algorithm, so that `build_plan`, the simulator, the reports and `auto` take it by its name.

    Args:
        name: name of the algorithm.
        builder: function of (documents, kv_documents, topology, attention, *, options) that returns a plan. Its
            keyword-only arguments are the options: annotated bool, int, float, str or Literal (also `| None`, and
            Annotated with the limits of `mindspeed_cp.algorithms.options`), with a default and a line in the
            docstring's Args.
        aliases: other names of the algorithm.
        use_for: when to use it, for tables.

    Raises:
        ConfigError: a name is taken, or the builder does not declare its options in this way.
    """
    for given in (name, *aliases):
        if given in (*ALGORITHMS, *ALIASES, *UNSUPPORTED_ALGORITHMS, AUTO):
            raise ConfigError(f"algorithm name {given!r} is taken; valid: any other name")
    options = read_options(builder)
    for given in COMMON_OPTIONS:
        if given in options:
            raise ConfigError(f"builder of {name!r}: option {given!r} belongs to all algorithms; valid: another name")
    summary = (inspect.getdoc(builder) or "").split("\n", 1)[0]
    ALGORITHMS[name] = Algorithm(name, builder, options | COMMON_OPTIONS, summary, aliases, use_for)
    ALIASES.update(dict.fromkeys(aliases, name))


def algorithm_options(name: str) -> dict[str, AlgorithmOption]:
    """Return the options of an algorithm by name.

    Raises:
        ConfigError: there is no such algorithm.
    """
    return dict(ALGORITHMS[algorithm_name(name)].options)


def algorithm_name(name: str) -> str:
    """Return this project's name of an algorithm that is given under any of its names.

    Raises:
        ConfigError: there is no such algorithm.
    """
    problem = algorithm_name_error(name)
    if problem is not None:
        raise ConfigError(f"algorithm is {name!r}: {problem.removeprefix('is ')}")
    return ALIASES.get(name, name)


def algorithm_name_error(name: object) -> str | None:
    """Return the error text for an unknown algorithm name, with the valid names; None for a known name."""
    names = [*ALGORITHMS, *ALIASES]
    valid = f"valid: {', '.join(names)}"
    if not isinstance(name, str):
        return f"must be a name; {valid}"
    if name in names:
        return None
    if name == AUTO:
        return (
            "auto does not build a plan; it chooses an algorithm before training, as "
            f"mindspeed_cp.choose.choose_algorithm does; {valid}"
        )
    if name in UNSUPPORTED_ALGORITHMS:
        return f"is not in this version; nearest: {UNSUPPORTED_ALGORITHMS[name]}; {valid}"
    return f"unknown algorithm; {did_you_mean(closest_names(name, names))}{valid}"


def build_plan(
    documents: Documents,
    topology: Topology,
    attention: AttentionConfig,
    algorithm: str = "ring",
    kv_documents: Documents | None = None,
    **options: object,
) -> Plan:
    """Build the plan of one attention layer for one packed batch. The same input gives the same plan on every rank.

    Args:
        documents: lengths of the documents in the packed batch.
        topology: context-parallel ranks.
        attention: attention of one layer on one tensor-parallel rank. If it has latents, the plan's own attention says
            whether these travel.
        algorithm: a registered name (`ALGORITHMS`), or the name that Megatron or MindSpeed uses (`ALIASES`).
        kv_documents: in cross-attention, lengths of the keys and values of each document; `documents` then has the
            lengths of the queries. Only with mask "full".
        **options: options of the algorithm; `algorithm_options` lists them.

    Raises:
        ConfigError: the algorithm or an option is unknown or out of range, or documents and kv_documents do not match.
    """
    kv_documents = documents if kv_documents is None else kv_documents
    for argument, value in (("documents", documents), ("kv_documents", kv_documents)):
        check_type(argument, value, Documents, "Documents(...)")
    check_type("topology", topology, Topology, "Topology(...)")
    check_type("attention", attention, AttentionConfig, "AttentionConfig(...)")
    name = algorithm_name(algorithm)
    known = ALGORITHMS[name].options
    for key, given in options.items():
        if key not in known:
            hint = did_you_mean(closest_names(key, known))
            valid = ", ".join(known) + (f"; {OPTION_HINTS[key]}" if key in OPTION_HINTS else "")
            raise ConfigError(f"algorithm {name!r} has no option {key!r}; {hint}valid: {valid}")
        problem = known[key].problem(given, topology.ranks)
        if problem is not None:
            raise ConfigError(f"{key} is {short_repr(given)}; valid: {problem}")
    error = documents_error(documents, kv_documents, attention)
    if error is not None:
        raise ConfigError(error)
    # Counts of bytes of a plan, over all ranks and messages, are int64.
    row = (attention.kv_heads + attention.heads) * (attention.head_dim + attention.head_dim_v)
    upper_bound = row * (64 * documents.tokens + 16 * kv_documents.tokens * topology.ranks)
    if upper_bound >= 2**63:
        raise ConfigError(
            f"attention has {row:,} channels of q, k, v and out, for {documents.tokens:,} tokens over "
            f"{topology.ranks:,} ranks: messages may have {upper_bound:.1e} bytes; valid: below {2.0**63:.1e}; give "
            "fewer heads, channels, tokens or ranks"
        )
    reduce_dtype = str(options.pop("reduce_dtype", None) or "float32")
    latents = str(options.pop("latents", None) or "auto")

    def build(attention: AttentionConfig) -> Plan:
        plan = ALGORITHMS[name].builder(documents, kv_documents, topology, attention, **options)
        return plan if reduce_dtype == plan.reduce_dtype else with_reduce_dtype(plan, reduce_dtype)

    return choose_latents(build, topology, attention, latents)


def with_reduce_dtype(plan: Plan, reduce_dtype: str) -> Plan:
    """Return a plan whose gradients of keys and values travel in another type."""
    parts = tuple(replace(part, reduce_dtype=reduce_dtype) for part in plan.parts)
    return replace(plan, parts=parts, reduce_dtype=reduce_dtype)


# What travels in multi-head latent attention: latents, or keys and values of all heads.
#
# A latent is a few channels of a token in the place of all its heads' keys and values: of DeepSeek-V3's 128 heads of
# 192 + 128 channels, 576 instead of 40,960. But every rank that reads a token expands its latent again, in the forward
# and in the backward, where otherwise its owner expands it once. So latents are fast where links are the limit, and
# slow where messages are hidden behind short tiles anyway. The cost model decides, for each plan by itself.


def choose_latents(
    build: Callable[[AttentionConfig], Plan], topology: Topology, attention: AttentionConfig, latents: str
) -> Plan:
    """Return the plan in which latents travel, or the one in which keys and values do (`Plan.attention` says which).

    Args:
        build: function of the attention, with latents or without, that returns the plan.
        topology: the ranks, on the cluster that the cost model assumes.
        attention: of one layer; with latents if the caller can give these.
        latents: "on", "off", or "auto": latents if the modelled layer is faster with them than without.

    Raises:
        ConfigError: latents is "on" for an attention that has none.
    """
    if attention.latent is None:
        if latents == "on":
            raise ConfigError(
                "latents is 'on', but attention.latent is None; valid: 'auto' or 'off', or an attention with "
                "latent=(channels of the latent, channels of k that all heads share)"
            )
        return build(attention)
    if latents == "on":
        return build(attention)
    expanded = build(attention.expanded)
    sends_keys = any(len(part.forward.fetch) or part.kv_redistribution is not None for part in expanded.parts_or_self)
    if latents == "off" or not sends_keys:
        return expanded
    plan, cluster = build(attention), cluster_of(topology)
    seconds, expanded_seconds = (simulate_plan(x, cluster, None, COARSE_SPANS).total for x in (plan, expanded))
    return plan if seconds < expanded_seconds else expanded
