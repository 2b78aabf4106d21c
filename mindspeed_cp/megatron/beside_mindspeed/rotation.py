"""Rotation beside MindSpeed: its fused operator, and Megatron's projections without any rotation."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor

from mindspeed_cp.megatron.beside_mindspeed.origin import is_active, replaced_by

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
