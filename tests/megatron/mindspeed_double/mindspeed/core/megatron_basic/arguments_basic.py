"""Puts all arguments into every TransformerConfig, whose class becomes one of its own."""

from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from typing import Any

from mindspeed.args_utils import ARGS


def config_init_wrapper(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        unknown = {name: value for name, value in vars(ARGS).items() if name not in kind.__dataclass_fields__}
        fields = [(name, type(value), field(init=False)) for name, value in unknown.items()]
        self.__class__ = make_dataclass(kind.__name__, fields, bases=(kind,))
        for name, value in unknown.items():
            setattr(self, name, value)
        init(self, *args, **kwargs)

    return wrapper
