"""What planned attention keeps, leaves unused and refuses of MindSpeed's patches of Megatron (docs/mindspeed.md).

MindSpeed replaces attributes of Megatron when ``mindspeed.megatron_adaptor`` is imported, by the flags on the command
line. mindspeed.yaml says of each attribute that concerns attention, positions, batches, losses or groups
what becomes of it, and :func:`check_mindspeed` looks at what is really replaced; :data:`MINDSPEED_RULES` refuses the
flags whose patches would contradict a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.patches.imports import megatron_imports
from mindspeed_cp.schema.unsupported import unsupported

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


#: Lines of MindSpeed, by the Megatron that they are for.
LINES = ("0.12", "0.16", "0.18")


@dataclass(frozen=True)
class Replacement:
    """Attributes of Megatron that MindSpeed replaces for one purpose: a row of mindspeed.yaml.

    Attributes:
        names: dotted names.
        flag: flag that makes MindSpeed replace them; "always" if none is needed.
        verdict: "kept": MindSpeed's is used; "unused": nothing calls it with planned attention; "unsupported": an
            error.
        reason: why.
        lines: those of :data:`LINES` that do so.
        kept: of an unsupported row, modules of MindSpeed whose replacement of the same names changes nothing.
    """

    names: Sequence[str]
    flag: str
    verdict: str
    reason: str
    lines: Sequence[str] = LINES
    kept: Sequence[str] = ()


@cache
def replacements() -> tuple[Replacement, ...]:
    """Return the replaced attributes of mindspeed.yaml."""
    rows = yaml.safe_load(Path(__file__).with_name("mindspeed.yaml").read_text("utf-8"))["replaced"]
    return tuple(Replacement(**{**row, "names": [f"megatron.{name}" for name in row["names"]]}) for row in rows)


def check_mindspeed() -> None:
    """Raise ConfigError if MindSpeed was imported too late, or replaced what plans need as Megatron has it.

    `install`, `install_model` and the hooks of :mod:`mindspeed_cp.megatron.pretrain` call it. Without MindSpeed it does
    nothing.
    """
    if not is_active():
        return
    if not MINDSPEED_WAS_FIRST:
        raise ConfigError(
            "mindspeed was imported after mindspeed_cp.megatron, whose classes derive from what MindSpeed replaces; "
            "valid: `import mindspeed.megatron_adaptor` as the first import of the training script"
        )
    for row in replacements():
        if row.verdict != "unsupported":
            continue
        for name in row.names:
            contrary = [module for module in replaced_by(name) if module not in row.kept]
            owner = contrary[0].split(".")[0] if contrary else ""
            if owner in ("mindspeed_llm", "mindspeed_mm"):
                raise ConfigError(
                    f"{name} is replaced by {contrary[0]}, whatever the flags, since {owner} brings model and rotary "
                    "positions of its own; valid with planned attention: `import mindspeed.megatron_adaptor` in place "
                    f"of {owner}'s adaptor, in Megatron's pretrain_gpt.py or a script of yours, whose get_batch may "
                    f"read {owner}'s data sets (planned_batch_from)"
                )
            if contrary:
                raise ConfigError(
                    f"{name} is replaced by {contrary[0]}; valid with planned attention: Megatron's own "
                    f"({row.reason}); leave out {row.flag}"
                )


#: (x [rows, heads, dim], cos and sin [rows, 1, dim], whether channels are interleaved) -> x rotated
RotationOperator = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

_ROTATION = "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd"


def rotation_operator(config: Any) -> RotationOperator | None:
    """Return the operator by which MindSpeed's patches rotate under ``--use-fused-rotary-pos-emb``; None without."""
    if not (is_active() and getattr(config, "use_fused_rotary_pos_emb", False)):
        return None
    from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        rotated: Tensor = npu_rotary_position_embedding(
            x[:, None].contiguous(), cos[:, None], sin[:, None], int(interleaved)
        )
        return rotated[:, 0]

    return rotate


def without_rotation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Megatron's multi-latent attention in which apply_rotary_pos_emb returns its input.

    Megatron's own rotation leaves channels alone for which there is no embedding. MindSpeed's splits the channels of
    each pair first, whatever the embedding, and would be called again where the projections are recomputed. So the
    method, and all functions that it makes, get a copy of their module's names, in which there is no rotation.

    Without MindSpeed's rotation the method itself is returned.
    """
    if not replaced_by(_ROTATION) or not isinstance(method, FunctionType):
        return method
    names = {**method.__globals__, "apply_rotary_pos_emb": _unrotated}
    copy = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _unrotated(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return t


def _layers_lack_padding(config: Any) -> bool:
    """True if a layer's forward is not given the padding mask that Megatron-core hands to it (MindSpeed for 0.16)."""
    if not is_active():
        return False
    with megatron_imports():
        from megatron.core.transformer.transformer_block import TransformerBlock
        from megatron.core.transformer.transformer_layer import TransformerLayer

    handed = "padding_mask" in signature(TransformerBlock.forward).parameters
    own = signature(TransformerLayer.forward).parameters
    return handed and "padding_mask" not in own and not any(x.kind is x.VAR_KEYWORD for x in own.values())


#: Conditions of rows that depend on the MindSpeed at hand.
MINDSPEED_CONDITIONS = {
    "MindSpeed at work": lambda config: is_active(),
    "layers without padding_mask": _layers_lack_padding,
}

#: Values of MindSpeed's arguments that planned attention does not support. MindSpeed puts its arguments among
#: Megatron's, and all of them into every TransformerConfig; an argument that is not there is not looked at.
MINDSPEED_RULES = unsupported("mindspeed")
