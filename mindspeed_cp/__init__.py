"""mindspeed-cp: context parallelism for very long and very uneven sequences.

A plan says who holds which tokens, who sends which keys and values to whom, and who computes which tile; everything
else runs, times, proves or draws that plan. Importing this package does not import torch;
`context_parallel_attention` and `check_agreement` do, when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_cp.cost.cluster import Cluster, load_cluster
from mindspeed_cp.cost.simulate import simulate
from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.errors import ConfigError, OperatorError, PeerError, PlanError
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan import AttentionConfig, Plan, Topology, build_plan, verify_plan

if TYPE_CHECKING:
    from mindspeed_cp.engine import check_agreement, context_parallel_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "Cluster",
    "ConfigError",
    "Documents",
    "Layout",
    "OperatorError",
    "PeerError",
    "Plan",
    "PlanError",
    "Timeline",
    "Topology",
    "build_plan",
    "check_agreement",
    "context_parallel_attention",
    "load_cluster",
    "simulate",
    "verify_plan",
]


def __getattr__(name: str) -> Any:
    if name in ("check_agreement", "context_parallel_attention"):
        from mindspeed_cp import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
