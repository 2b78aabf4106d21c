"""mindspeed-cp: context parallelism for very long and very uneven sequences.

A plan says which rank holds which tokens, sends which keys and values to which rank, and computes which tiles;
everything else runs, simulates, proves or draws that plan. Names are imported when they are first used, so that
importing this package is quick and does not import torch; only the functions whose names begin with
`context_parallel_`, and `check_agreement`, do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mindspeed_cp.errors import ConfigError, OperatorError, PeerError, PlanError, missing_package

if TYPE_CHECKING:
    from mindspeed_cp.algorithms import build_plan, build_state_plan, register_algorithm
    from mindspeed_cp.cluster.cluster import Cluster, load_cluster
    from mindspeed_cp.engine import (
        check_agreement,
        context_parallel_attention,
        context_parallel_conv1d,
        context_parallel_latent_attention,
        context_parallel_linear_attention,
        context_parallel_roll,
    )
    from mindspeed_cp.layout import Documents, Layout
    from mindspeed_cp.plan import (
        AttentionConfig,
        Plan,
        StateConfig,
        StatePlan,
        Topology,
        verify_plan,
        verify_state_plan,
    )
    from mindspeed_cp.simulate.simulator import simulate_plan
    from mindspeed_cp.simulate.timeline import Timeline

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
    "StateConfig",
    "StatePlan",
    "Timeline",
    "Topology",
    "build_plan",
    "build_state_plan",
    "check_agreement",
    "context_parallel_attention",
    "context_parallel_conv1d",
    "context_parallel_latent_attention",
    "context_parallel_linear_attention",
    "context_parallel_roll",
    "load_cluster",
    "register_algorithm",
    "simulate_plan",
    "verify_plan",
    "verify_state_plan",
]


_MODULES = {
    **dict.fromkeys(
        ("AttentionConfig", "Plan", "StateConfig", "StatePlan", "Topology", "verify_plan", "verify_state_plan"), "plan"
    ),
    **dict.fromkeys(("Cluster", "load_cluster"), "cluster.cluster"),
    **dict.fromkeys(("Documents", "Layout"), "layout"),
    **dict.fromkeys(("build_plan", "build_state_plan", "register_algorithm"), "algorithms"),
    **dict.fromkeys(
        (
            "check_agreement",
            "context_parallel_attention",
            "context_parallel_conv1d",
            "context_parallel_latent_attention",
            "context_parallel_linear_attention",
            "context_parallel_roll",
        ),
        "engine",
    ),
    "Timeline": "simulate.timeline",
    "simulate_plan": "simulate.simulator",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        raise (ConfigError(missing_package(error) or "") if missing_package(error) else error) from None
    globals()[name] = value
    return value
