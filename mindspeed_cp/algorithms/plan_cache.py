"""Cache of recent plans, by the arguments of build_plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_cp.algorithms.layer_plans import build_layer_plans
from mindspeed_cp.algorithms.registry import build_plan
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan

MAX_PLANS = 16
MAX_CACHED_TOKENS = 2**20  # in all cached plans; a device holds up to 1 KiB for each token of a plan (docs/ascend.md)


class PlanCache:
    """The most recently used plans, by documents' lengths, topology, attention (or those of all layers), algorithm and
    options.

    Rows repeat where documents are cut at the context, so that each chunk fills a row; rows of many short documents
    practically never do. A cached plan was proved and prepared when it was made.

    Args:
        on_new_plan: called with every new plan before it is returned; None: nothing is called.
        max_plans, max_tokens: bounds of the cache, in plans and in tokens of all plans; the newest plan always stays.
        build: makes a plan of the arguments of build_plan, for :meth:`get`; None: build_plan.

    Attributes:
        hits, misses: number of plans that were in the cache, and that were made.
    """

    def __init__(
        self,
        on_new_plan: Callable[[Plan], None] | None = None,
        max_plans: int = MAX_PLANS,
        max_tokens: int = MAX_CACHED_TOKENS,
        build: Callable[..., Plan] | None = None,
    ) -> None:
        self._on_new_plan, self._max_plans, self._max_tokens = on_new_plan, max_plans, max_tokens
        self._build = build
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
        build = self._build or build_plan
        key = documents, topology, attention, algorithm, tuple(sorted(options.items()))
        (plan,) = self._get(key, lambda: (build(documents, topology, attention, algorithm, **options),))
        return plan

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
        return self._get(key, lambda: build_layer_plans(documents, topology, attentions, algorithm, **options))

    def _get(self, key: tuple[Any, ...], build: Callable[[], tuple[Plan, ...]]) -> tuple[Plan, ...]:
        """Return the plans of a key, cached or new."""
        plans = self._plans.get(key)
        if plans is not None:
            self._plans.move_to_end(key)
            self.hits += 1
            return plans
        plans = build()
        if self._on_new_plan is not None:
            for plan in plans:
                self._on_new_plan(plan)
        self.misses += 1
        self._plans[key] = plans
        while len(self._plans) > 1 and (len(self) > self._max_plans or self.tokens > self._max_tokens):
            self._plans.popitem(last=False)
        return plans

    @property
    def tokens(self) -> int:
        """Number of tokens in all cached plans."""
        return sum(plan.documents.tokens for plans in self._plans.values() for plan in plans)
