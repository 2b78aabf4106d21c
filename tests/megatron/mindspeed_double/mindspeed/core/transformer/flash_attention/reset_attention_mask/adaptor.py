"""What MindSpeed puts in Megatron's place under --reset-attention-mask: packed_seq_params is a tensor of lengths."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.calls import never


def attention_forward(self: Any, *args: Any, **kwargs: Any) -> None:
    never("Attention.forward")


def gpt_forward_wrapper(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        never("GPTModel.forward")

    return wrapper


def p2p_ops_eod(**kwargs: Any) -> None:
    never("_p2p_ops")


def rotary_forward(self: Any, *args: Any, **kwargs: Any) -> None:
    never("RotaryEmbedding.forward")


def get_rotary_seq_len(self: Any, *args: Any, **kwargs: Any) -> None:
    never("RotaryEmbedding.get_rotary_seq_len")
