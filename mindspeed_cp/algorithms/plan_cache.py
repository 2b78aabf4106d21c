"""Cache of recent plans, by the arguments of build_plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_cp.algorithms.registry import build_plan
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan

MAX_PLANS = 16
MAX_CACHED_TOKENS = 2**20  # in all cached plans; a device holds up to 1 KiB for each token of a plan (docs/ascend.md)


class PlanCache:
    """The most recently used plans, by documents' lengths, topology, attention, algorithm and options.

    Rows repeat where documents are cut at the context, so that each chunk fills a row; rows of many short documents
    practically never do. A cached plan was proved and prepared when it was made.

    Args:
        on_new_plan: called with every new plan before it is returned; None: nothing is called.
        max_plans, max_tokens: bounds of the cache, in plans and in tokens of all plans; the newest plan always stays.
        build: makes a plan of the arguments of build_plan; None: build_plan.

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
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Number of cached plans."""
        return len(self._plans)

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
        key = documents, topology, attention, algorithm, tuple(sorted(options.items()))
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            self.hits += 1
            return plan
        plan = (self._build or build_plan)(documents, topology, attention, algorithm, **options)
        if self._on_new_plan is not None:
            self._on_new_plan(plan)
        self.misses += 1
        self._plans[key] = plan
        while len(self._plans) > max(1, self._max_plans) or (len(self._plans) > 1 and self.tokens > self._max_tokens):
            self._plans.popitem(last=False)
        return plan

    @property
    def tokens(self) -> int:
        """Number of tokens in all cached plans."""
        return sum(plan.documents.tokens for plan in self._plans.values())
