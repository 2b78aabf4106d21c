"""Plans for the layers of a model that attend in different ways, over one layout of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.algorithms.latent_choice import choose_latents
from mindspeed_cp.algorithms.registry import algorithm_name, build_plan, with_reduce_dtype
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.pairs import document_pairs
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan


def build_layer_plans(
    documents: Documents,
    topology: Topology,
    attentions: Sequence[AttentionConfig],
    algorithm: str = "ring",
    **options: Any,
) -> tuple[Plan, ...]:
    """Build a plan for each of the different attentions of a model's layers, such that every rank holds the same rows.

    The plan of the attention with the most visible pairs is built first and decides who holds which rows. Where the
    algorithm would place documents otherwise for another attention (hierarchical, or layout "balanced"), that plan
    keeps these rows and fetches the keys that its mask needs, as hierarchical does (algorithm "kv_fetch").

    Args:
        documents: lengths of the documents in the packed batch.
        topology: context-parallel ranks.
        attentions: the different attentions of the layers.
        algorithm, options: as for :func:`mindspeed_cp.build_plan`.

    Returns:
        One plan for each attention, in their order.

    Raises:
        ConfigError: as for build_plan; or no attention is given, or `remap` is "hidden" and there are several.
    """
    if not attentions:
        raise ConfigError("no attention was given; valid: the AttentionConfig of one layer or more")
    first = max(attentions, key=lambda attention: _work(documents, attention))
    main = build_plan(documents, topology, first, algorithm, **options)
    if len(set(attentions)) > 1 and main.linear_layout is not None:
        raise ConfigError("remap moves hidden states; valid for layers that attend in different ways: 'off', 'qkv'")
    return tuple(
        main if attention == first else _over_layout_of(main, attention, algorithm, options) for attention in attentions
    )


def _over_layout_of(main: Plan, attention: AttentionConfig, algorithm: str, options: dict[str, Any]) -> Plan:
    """Return a plan of another attention for the rows of a plan."""
    if algorithm_name(algorithm) != "hierarchical" and options.get("layout") != "balanced":
        plan = build_plan(main.documents, main.topology, attention, algorithm, **options)
        if plan.batch_layout.same_as(main.batch_layout):
            return plan
    layout, topology = main.layout, main.topology

    def fetch(attention: AttentionConfig) -> Plan:
        programs = staged(layout, layout, attention, topology)
        plan = Plan("kv_fetch", attention, topology, layout, layout, layout, layout, *programs)
        return with_reduce_dtype(plan, main.reduce_dtype)

    return choose_latents(fetch, topology, attention, str(options.get("latents") or "auto"))


def _work(documents: Documents, attention: AttentionConfig) -> float:
    """Return the visible pairs of all heads."""
    return attention.heads * float(document_pairs(documents, documents, attention).sum())
