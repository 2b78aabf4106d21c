"""MINDSPEED_RULES: values of MindSpeed's arguments that planned attention does not support.

MindSpeed puts its arguments among Megatron's, and all of them into every TransformerConfig; an argument that is not
there is not looked at.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from mindspeed_cp.megatron.beside_mindspeed.origin import is_active
from mindspeed_cp.megatron.patches.imports import megatron_imports
from mindspeed_cp.schema.unsupported import unsupported


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

MINDSPEED_RULES = unsupported("mindspeed")
