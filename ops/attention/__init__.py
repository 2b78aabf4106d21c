"""The attention operator: contract, backends, and the dense fp64 reference."""

from mindspeed_cp.ops.attention.backends import BACKENDS, backend_for, backend_named, backend_of
from mindspeed_cp.ops.attention.contract import (
    AttentionBackend,
    BackwardState,
    DropoutKey,
    ForwardState,
    Heads,
    Lowered,
)
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.reference import dense_attention, dense_attention_of, dense_packed_attention

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "BackwardState",
    "DropoutKey",
    "ForwardState",
    "Heads",
    "Lowered",
    "attention",
    "attention_backward",
    "backend_for",
    "backend_named",
    "backend_of",
    "dense_attention",
    "dense_attention_of",
    "dense_packed_attention",
]
