"""MindSpeed's heads in unequal numbers on tensor-parallel ranks."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def attention_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    return wrapper
