"""Runs a plan under autograd."""

from mindspeed_cp.engine.agreement import check_agreement
from mindspeed_cp.engine.all_ranks import Stepping, attend_in_process
from mindspeed_cp.engine.attention import context_parallel_attention, context_parallel_latent_attention
from mindspeed_cp.engine.attention_check import AttentionCheck, check_attention
from mindspeed_cp.engine.convolution import context_parallel_conv1d
from mindspeed_cp.engine.linear_attention import context_parallel_linear_attention, linear_attention_in_process
from mindspeed_cp.engine.rank_context import prepare
from mindspeed_cp.engine.roll import context_parallel_roll

__all__ = [
    "AttentionCheck",
    "Stepping",
    "attend_in_process",
    "check_agreement",
    "check_attention",
    "context_parallel_attention",
    "context_parallel_conv1d",
    "context_parallel_latent_attention",
    "context_parallel_linear_attention",
    "context_parallel_roll",
    "linear_attention_in_process",
    "prepare",
]
