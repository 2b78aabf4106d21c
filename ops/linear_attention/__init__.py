"""Operators of linear attention over segments: the contract, a chunked form in torch, and fla-core."""

from mindspeed_cp.ops.linear_attention.chunked import ChunkedOperator
from mindspeed_cp.ops.linear_attention.contract import SegmentTable, StateInputs, StateOperator
from mindspeed_cp.ops.linear_attention.fla import FlaOperator
from mindspeed_cp.ops.linear_attention.operators import operator_for_device

__all__ = ["ChunkedOperator", "FlaOperator", "SegmentTable", "StateInputs", "StateOperator", "operator_for_device"]
