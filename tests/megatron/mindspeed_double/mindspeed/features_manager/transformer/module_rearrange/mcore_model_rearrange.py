"""MindSpeed's order of weights under --overlap-param-gather."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def self_attention_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    return wrapper


def megatron_module_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(self: Any, config: Any) -> None:
        init(self, config)

    return wrapper
