"""Whether MindSpeed is active in this process, and which of its modules replaced an attribute of Megatron."""

from __future__ import annotations

import sys
from typing import Any

#: Packages that patch Megatron in MindSpeed's way.
PACKAGES = ("mindspeed", "mindspeed_llm", "mindspeed_mm")

#: The module of MindSpeed that every way of patching goes through.
PATCHER = "mindspeed.patch_utils"

#: True if MindSpeed's patcher was there when this package, and with it Megatron, was imported.
MINDSPEED_WAS_FIRST = PATCHER in sys.modules


def is_active() -> bool:
    """Return True if MindSpeed's patcher was imported."""
    return PATCHER in sys.modules


def replaced_by(name: str) -> list[str]:
    """Return the modules of MindSpeed that replaced or wrapped an attribute, the outermost wrapper first.

    Wrappers carry the module name of what they wrap, so that the module in which their code was compiled counts.
    Nothing is imported: an attribute of a module that nobody has imported is not replaced.

    Args:
        name: dotted name of a function, class or method: ``megatron.core.transformer.attention.Attention.forward``.
    """
    layers, value = [], _value(name)
    while value is not None:
        layers.append(_module_of(value))
        value = getattr(value, "__wrapped__", None)
    return [module for module in layers if module.split(".")[0] in PACKAGES]


def _value(name: str) -> Any:
    """Return the attribute as its owner holds it, None if there is none."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(words[:count]))
        if value is None:
            continue
        for word in words[count:-1]:
            value = getattr(value, word, None)
        # A method that a class only inherits is its parent's, which has a name of its own.
        return vars(value).get(words[-1]) if value is not None else None
    return None


def _module_of(value: Any) -> str:
    inner = getattr(value, "__func__", value)
    scope = getattr(inner, "__globals__", None)
    return str(scope.get("__name__", "") if scope is not None else getattr(inner, "__module__", ""))
