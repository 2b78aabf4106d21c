"""Modelled time of a plan: one layer on the cluster whose speeds the planner used, and the lower bound of its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_cp.choose.lower_bounds import balanced_lower_bound
from mindspeed_cp.cluster import ComputeCost, LayerCost, cluster_of, load_cluster
from mindspeed_cp.plan import AttentionConfig, Plan
from mindspeed_cp.simulate.simulator import simulate_plan


@dataclass(frozen=True)
class ModelledTime:
    """Modelled time of one layer, forward and backward, linear layers too.

    Attributes:
        cluster: name of the cluster.
        remark: how the cluster differs from a named one; empty if it does not.
        seconds: until the last rank is done; None: not simulated.
        bound: seconds that no plan of the batch can beat; None: not simulated.
        left_out: why the plan was not simulated; empty if it was.
    """

    cluster: str
    remark: str = ""
    seconds: float | None = None
    bound: float | None = None
    left_out: str = ""

    @property
    def fraction(self) -> float | None:
        """The lower bound over the modelled time, as `mindspeed-cp simulate` has it; None: not simulated."""
        return None if self.seconds is None or self.bound is None else self.bound / self.seconds

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table of the plan."""
        rows = [("cluster", self.cluster + self.remark)]
        if self.seconds is None or self.bound is None or self.fraction is None:
            return [*rows, ("a layer, modelled", f"left out: {self.left_out}")]
        digits = 2 if self.bound >= 1e-3 else 4
        whole, bound = (f"{seconds * 1e3:,.{digits}f} ms" for seconds in (self.seconds, self.bound))
        return [
            *rows,
            ("a layer, modelled", f"{whole}, forward and backward, linear layers too"),
            ("... lower bound", f"{bound}, {100 * self.fraction:.1f} % of it"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the cluster and the times in seconds as JSON values."""
        return {
            "cluster": self.cluster,
            "modelled": {
                "cluster_remark": self.remark.strip(" ()") or None,
                "seconds": self.seconds,
                "bound": self.bound,
                "fraction_of_bound": self.fraction,
                "left_out": self.left_out or None,
            },
        }


def modelled_time(plan: Plan, attention: AttentionConfig, layer: LayerCost, left_out: str = "") -> ModelledTime:
    """Simulate a plan on the cluster of its topology.

    Args:
        plan: any plan.
        attention: attention for which it was built.
        layer: linear part of the layer.
        left_out: why it is not simulated, and the cluster is only named; empty: simulate it.
    """
    topology, cluster, remark = plan.topology, cluster_of(plan.topology), ""
    if topology.cluster is None:
        remark = " (no cluster is named)"
        if topology.ranks_per_node > load_cluster(cluster.name).ranks_per_node:
            remark = f" (no cluster is named; nodes of {topology.ranks_per_node} ranks are imagined)"
    if not left_out and not plan.documents.tokens:
        left_out = "the batch has no tokens"
    if left_out:
        return ModelledTime(cluster.name, remark, left_out=left_out)
    seconds = simulate_plan(plan, cluster, layer).total
    cost = ComputeCost(cluster, attention, layer)
    bound = balanced_lower_bound(plan.documents, plan.ranks, cost, plan.kv_documents)
    return ModelledTime(cluster.name, remark, seconds, bound)
