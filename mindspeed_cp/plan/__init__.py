"""Plans: the problem, the records of programs, parts, and the proof.  NumPy only, independent of any algorithm."""

from mindspeed_cp.plan.parts import (
    combine,
    document_mask,
    part_ends,
    part_rows,
    select_documents,
    select_layout,
)
from mindspeed_cp.plan.problem import MASKS, RANK_LIMIT, UNLIMITED, AttentionConfig, Topology, alibi_slopes
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL, CONTENT, FULL, TILE, MessageBuilder, Messages
from mindspeed_cp.plan.states import StateConfig, StatePlan, StateProgram
from mindspeed_cp.plan.transfers import traffic
from mindspeed_cp.plan.verify import peak_bytes, verify_plan
from mindspeed_cp.plan.verify.states import verify_state_plan

__all__ = [
    "BAND",
    "CAUSAL",
    "CONTENT",
    "FULL",
    "MASKS",
    "RANK_LIMIT",
    "TILE",
    "UNLIMITED",
    "AttentionConfig",
    "MessageBuilder",
    "Messages",
    "Plan",
    "Program",
    "StateConfig",
    "StatePlan",
    "StateProgram",
    "Topology",
    "alibi_slopes",
    "combine",
    "document_mask",
    "part_ends",
    "part_rows",
    "peak_bytes",
    "select_documents",
    "select_layout",
    "traffic",
    "verify_plan",
    "verify_state_plan",
]  # fmt: skip
