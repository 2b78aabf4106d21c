"""The algorithms: one builder of plans each, and build_plan, which finds them by name. NumPy only."""

from mindspeed_cp.algorithms.direct import build_all_gather, build_direct
from mindspeed_cp.algorithms.double_ring import build_double_ring
from mindspeed_cp.algorithms.hierarchical import build_hierarchical
from mindspeed_cp.algorithms.hybrid import build_hybrid, build_ulysses
from mindspeed_cp.algorithms.layouts import LAYOUT_NAMES
from mindspeed_cp.algorithms.options import AlgorithmOption
from mindspeed_cp.algorithms.registry import (
    ALGORITHMS,
    ALIASES,
    AUTO,
    UNSUPPORTED_ALGORITHMS,
    Algorithm,
    algorithm_name,
    algorithm_name_error,
    algorithm_options,
    build_plan,
    register_algorithm,
)
from mindspeed_cp.algorithms.ring import build_ring
from mindspeed_cp.algorithms.states import build_state_plan

register_algorithm(
    "ring", build_ring, aliases=("p2p", "megatron_cp_algo"), use_for="long documents; little memory"
)  # fmt: skip
register_algorithm("double_ring", build_double_ring, use_for="long documents on several nodes")
register_algorithm(
    "ulysses", build_ulysses, aliases=("a2a", "ulysses_cp_algo"),
    use_for="at least as many heads as ranks; packed short documents",
)  # fmt: skip
register_algorithm(
    "hybrid", build_hybrid, aliases=("a2a+p2p", "hybrid_cp_algo"), use_for="more ranks than heads; several nodes"
)
register_algorithm(
    "all_gather", build_all_gather, aliases=("allgather", "kvallgather_cp_algo"),
    use_for="few ranks, fast links, memory to spare",
)  # fmt: skip
register_algorithm("direct", build_direct, use_for="full meshes; windows; packed documents")
register_algorithm(
    "hierarchical", build_hierarchical, use_for="documents of very different lengths; several nodes"
)  # fmt: skip

__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "AUTO",
    "LAYOUT_NAMES",
    "UNSUPPORTED_ALGORITHMS",
    "Algorithm",
    "AlgorithmOption",
    "algorithm_name",
    "algorithm_name_error",
    "algorithm_options",
    "build_plan",
    "build_state_plan",
    "register_algorithm",
]
