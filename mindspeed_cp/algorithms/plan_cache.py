"""Cache of recent plans, by the arguments of build_plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_cp.algorithms.kv_fetch.programs import staged
from mindspeed_cp.algorithms.registry import algorithm_name, build_plan, choose_latents, with_reduce_dtype
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology, document_pairs
from mindspeed_cp.plan.program import Plan

MAX_PLANS = 16
MAX_CACHED_TOKENS = 2**20  # in all cached plans; a device holds up to 1 KiB for each token of a plan (docs/ascend.md)


class PlanCache:
    """The most recently used plans, by documents' lengths, topology, attention (or those of all layers), algorithm and
    options.

    Rows repeat where documents are cut at the context, so that each chunk fills a row; rows of many short documents
    practically never do. A cached plan was proved and prepared when it was made. The newest plan always stays.

    Args:
        on_new_plan: called with every new plan before it is returned; None: nothing is called.
        build: makes a plan of the arguments of build_plan; None: build_plan.

    Attributes:
        hits, misses: number of plans that were in the cache, and that were made.
    """

    def __init__(
        self,
        on_new_plan: Callable[[Plan], None] | None = None,
        build: Callable[..., Plan] | None = None,
    ) -> None:
        self._on_new_plan, self._build = on_new_plan, build
        self._plans: OrderedDict[tuple[Any, ...], tuple[Plan, ...]] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Number of cached plans."""
        return sum(len(plans) for plans in self._plans.values())

    def get(
        self,
        documents: Documents,
        topology: Topology,
        attention: AttentionConfig,
        algorithm: str,
        options: dict[str, Any],
    ) -> Plan:
        """Return the plan of these arguments of build_plan, cached or new; errors as there, and those of
        on_new_plan."""
        return self.get_layers(documents, topology, (attention,), algorithm, options)[0]

    def get_layers(
        self,
        documents: Documents,
        topology: Topology,
        attentions: tuple[AttentionConfig, ...],
        algorithm: str,
        options: dict[str, Any],
    ) -> tuple[Plan, ...]:
        """Return the plans of these arguments of build_layer_plans, cached or new; errors as there, and those of
        on_new_plan."""
        key = documents, topology, attentions, algorithm, tuple(sorted(options.items()))
        plans = self._plans.get(key)
        if plans is not None:
            self._plans.move_to_end(key)
            self.hits += 1
            return plans
        plans = build_layer_plans(documents, topology, attentions, algorithm, self._build, **options)
        if self._on_new_plan is not None:
            for plan in plans:
                self._on_new_plan(plan)
        self.misses += 1
        self._plans[key] = plans
        while len(self._plans) > 1 and (len(self) > MAX_PLANS or self.tokens > MAX_CACHED_TOKENS):
            self._plans.popitem(last=False)
        return plans

    @property
    def tokens(self) -> int:
        """Number of tokens in all cached plans."""
        return sum(plan.documents.tokens for plans in self._plans.values() for plan in plans)


# Plans for the layers of a model that attend in different ways, over one layout of the rows.


def build_layer_plans(
    documents: Documents,
    topology: Topology,
    attentions: Sequence[AttentionConfig],
    algorithm: str = "ring",
    build: Callable[..., Plan] | None = None,
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
        build: makes a plan of the arguments of build_plan; None: build_plan.

    Returns:
        One plan for each attention, in their order.

    Raises:
        ConfigError: as for build_plan; or no attention is given, or `remap` is "hidden" and there are several.
    """
    if not attentions:
        raise ConfigError("no attention was given; valid: the AttentionConfig of one layer or more")
    # the one with the most visible pairs of all heads
    first = max(attentions, key=lambda each: each.heads * float(document_pairs(documents, documents, each).sum()))
    main = (build or build_plan)(documents, topology, first, algorithm, **options)
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
