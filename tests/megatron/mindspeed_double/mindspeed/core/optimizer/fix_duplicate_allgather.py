"""MindSpeed's wrapper of the optimizer."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.calls import CALLS


def get_megatron_optimizer_wrapper(get: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CALLS["optimizer"] += 1
        return get(*args, **kwargs)

    return wrapper
