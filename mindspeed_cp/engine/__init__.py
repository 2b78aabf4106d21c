"""Runs a plan under autograd."""

from mindspeed_cp.engine.agenda import prepare
from mindspeed_cp.engine.agreement import check_agreement
from mindspeed_cp.engine.attention import context_parallel_attention

__all__ = ["check_agreement", "context_parallel_attention", "prepare"]
