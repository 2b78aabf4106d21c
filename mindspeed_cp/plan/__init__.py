"""What each rank sends and computes, step by step, and the proof that it is right.  NumPy only."""

from mindspeed_cp.plan.adjoint import adjoint
from mindspeed_cp.plan.build import ALGORITHMS, ALIASES, algorithm_name, build_plan
from mindspeed_cp.plan.config import MASKS, AttentionConfig, Topology
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CAUSAL, CONTENT, FULL, MESSAGE, RUN, TILE, MessageList, Messages
from mindspeed_cp.plan.verify import peak_bytes, verify_plan

__all__ = [
    "ALGORITHMS", "ALIASES", "CAUSAL", "CONTENT", "FULL", "MASKS", "MESSAGE", "RUN", "TILE",
    "AttentionConfig", "MessageList", "Messages", "Plan", "Program", "Topology",
    "adjoint", "algorithm_name", "build_plan", "peak_bytes", "verify_plan",
]  # fmt: skip
