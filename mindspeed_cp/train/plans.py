"""Plans that were made lately, by what they were made from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Plan, Topology, build_plan

PLANS_KEPT = 16  # each holds what its ranks send and compute, and what a device needs of that


class PlanCache:
    """The plans of the last PLANS_KEPT signatures: documents' lengths, topology, attention, algorithm and options.

    Rows come again with equal lengths where documents are cut at the context, which then fill a row each; rows of many
    short documents practically never do. A plan that is found needs no proof and no agenda: it had both when it was
    made.

    Args:
        ready: called with every plan that is made, before anyone gets it.
        most: how many are kept; the one that was not asked for longest goes first.
    """

    def __init__(self, ready: Callable[[Plan], None], most: int = PLANS_KEPT) -> None:
        self._ready, self._most = ready, most
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.made = self.found = 0

    def __len__(self) -> int:
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
        if len(self._plans) > self._most:
            self._plans.popitem(last=False)
        return plan
