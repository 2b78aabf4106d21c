"""Plans that were made lately, by what they were made from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Plan, Topology, build_plan

PLANS_KEPT = 16
TOKENS_KEPT = 2**20  # of those plans together; a device holds up to 1 KiB for each token of a plan (docs/ascend.md)


class PlanCache:
    """The newest plans by their signature: documents' lengths, topology, attention, algorithm and options.

    Rows come again with equal lengths where documents are cut at the context, which then fill a row each; rows of many
    short documents practically never do. A plan that is found needs no proof and no agenda: it had both when it was
    made.

    Args:
        ready: called with every plan that is made, before anyone gets it.
        most, tokens: how many are kept, of how many tokens together, but one at least; what was not asked for longest
            goes first.
    """

    def __init__(self, ready: Callable[[Plan], None], most: int = PLANS_KEPT, tokens: int = TOKENS_KEPT) -> None:
        self._ready, self._most, self._tokens = ready, most, tokens
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.made = self.found = 0

    def __len__(self) -> int:
        """Plans that are kept."""
        return len(self._plans)

    def get(
        self,
        documents: Documents,
        topology: Topology,
        attention: AttentionConfig,
        algorithm: str,
        options: dict[str, Any],
    ) -> Plan:
        """`build_plan` of the same arguments, or the plan that it gave before; its errors, and those of `ready`."""
        key = documents, topology, attention, algorithm, tuple(sorted(options.items()))
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            self.found += 1
            return plan
        plan = build_plan(documents, topology, attention, algorithm, **options)
        self._ready(plan)
        self.made += 1
        self._plans[key] = plan
        while len(self._plans) > max(1, self._most) or (len(self._plans) > 1 and self.tokens > self._tokens):
            self._plans.popitem(last=False)
        return plan

    @property
    def tokens(self) -> int:
        """Of all plans that are kept."""
        return sum(plan.documents.tokens for plan in self._plans.values())
