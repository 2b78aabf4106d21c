"""Runs a plan under autograd."""

from mindspeed_cp.engine.agenda import prepare
from mindspeed_cp.engine.attention import context_parallel_attention

__all__ = ["context_parallel_attention", "prepare"]
