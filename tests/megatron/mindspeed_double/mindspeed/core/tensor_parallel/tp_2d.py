"""MindSpeed's 2-D tensor parallelism."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class MindSpeedRotaryEmbedding2D(RotaryEmbedding):
    pass


def self_attention_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    return wrapper
