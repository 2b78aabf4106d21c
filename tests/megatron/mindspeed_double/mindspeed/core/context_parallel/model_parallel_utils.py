"""MindSpeed's groups beside Megatron's."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from mindspeed.calls import CALLS

GROUPS: list[Any] = []


def initialize_model_parallel_wrapper(initialize: Callable[..., None]) -> Callable[..., None]:
    @wraps(initialize)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        CALLS["groups"] += 1
        GROUPS.append(dist.new_group(list(range(dist.get_world_size()))))  # of a window of the double ring

    return wrapper


def destroy_model_parallel_wrapper(destroy: Callable[[], None]) -> Callable[[], None]:
    @wraps(destroy)
    def wrapper() -> None:
        destroy()
        GROUPS.clear()

    return wrapper
