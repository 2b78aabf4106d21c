"""The attention operator: contract, backends, and the dense fp64 reference."""

from mindspeed_cp.ops.attention.operator import attention, attention_backward
from mindspeed_cp.ops.attention.sink import sink_gradient

__all__ = ["attention", "attention_backward", "sink_gradient"]
