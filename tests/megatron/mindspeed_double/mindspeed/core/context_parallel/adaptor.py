"""MindSpeed's attention over context-parallel ranks."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.transformer.module import MegatronModule
from mindspeed.calls import CALLS, never
from torch import nn


class MindSpeedCPDotProductAttention(MegatronModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        never("core attention")


class UlyssesContextAttention(nn.Module):
    def __init__(self, local_attention: nn.Module) -> None:
        super().__init__()
        self.local_attn = local_attention

    def forward(self, *args: Any, **kwargs: Any) -> None:
        never("Ulysses")


def attention_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        CALLS["Attention.__init__"] += 1
        if config.context_parallel_algo in ("ulysses_cp_algo", "hybrid_cp_algo"):
            self.core_attention = UlyssesContextAttention(self.core_attention)

    return wrapper
