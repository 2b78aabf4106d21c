"""What each rank sends and computes, step by step, and the proof that it is right.  NumPy only."""

from mindspeed_cp.plan.adjoint import adjoint
from mindspeed_cp.plan.build import (
    ALGORITHMS,
    ALIASES,
    AUTO,
    LATER_ALGORITHMS,
    algorithm_name,
    algorithm_options,
    build_plan,
    no_algorithm,
)
from mindspeed_cp.plan.combine import combine, conclusions, default_order, documents_of, is_in, layout_of, rows_of
from mindspeed_cp.plan.config import MASKS, MOST_RANKS, UNLIMITED, AttentionConfig, Topology, alibi_slopes
from mindspeed_cp.plan.head_split import head_split_part
from mindspeed_cp.plan.placement import LAYOUTS
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL, CONTENT, FULL, MESSAGE, RUN, TILE, MessageList, Messages
from mindspeed_cp.plan.traffic import TRAFFIC, traffic
from mindspeed_cp.plan.verify import peak_bytes, verify_plan

__all__ = [
    "ALGORITHMS", "ALIASES", "AUTO", "BAND", "CAUSAL", "CONTENT", "FULL", "LATER_ALGORITHMS", "LAYOUTS", "MASKS",
    "MESSAGE", "MOST_RANKS",
    "RUN", "TILE", "TRAFFIC", "UNLIMITED", "AttentionConfig", "MessageList", "Messages", "Plan", "Program", "Topology",
    "adjoint", "algorithm_name", "algorithm_options", "alibi_slopes", "build_plan", "combine", "conclusions",
    "default_order", "documents_of", "head_split_part", "is_in", "layout_of", "no_algorithm", "peak_bytes", "rows_of",
    "traffic", "verify_plan",
]  # fmt: skip
