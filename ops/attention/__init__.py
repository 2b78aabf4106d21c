"""The attention operator: contract, backends, and the dense fp64 reference."""

from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.ops.attention.backends import BACKENDS, backend_for_device, backend_from_settings, get_backend
from mindspeed_cp.ops.attention.contract import (
    AttentionBackend,
    BackwardState,
    DropoutKey,
    ForwardState,
    Heads,
    LoweredCalls,
)
from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.reference import dense_attention, dense_packed_attention
from mindspeed_cp.ops.attention.sink import sink_gradient

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "BackwardState",
    "DropoutKey",
    "ForwardState",
    "GradientAccumulator",
    "Heads",
    "LoweredCalls",
    "OutputAccumulator",
    "attention",
    "attention_backward",
    "backend_for_device",
    "backend_from_settings",
    "dense_attention",
    "dense_packed_attention",
    "get_backend",
    "sink_gradient",
]
