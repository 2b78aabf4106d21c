"""Patches of Megatron's multi-token prediction, in effect while a model with planned attention runs its forward.

=====================================  ==========  ==========================================
problem                                versions    patch
=====================================  ==========  ==========================================
roll_tensor takes ranks to hold        0.16-       it rolls by the plan of the micro-batch,
Megatron's zig-zag of each document                  and counts the tokens of all ranks
full recomputation saves               0.16, 0.17  parameters stay outside of what is saved,
packed_seq_params as a tensor                        as in 0.18
full recomputation fails over          0.18        the layer inside gets it from
padding_mask, which it does not know                 packed_seq_params
process_mtp_loss weighs losses by the  0.17-       losses are weighed by the tokens of all
tokens of each rank                                  ranks
=====================================  ==========  ==========================================

Megatron 0.12 refuses packed_seq_params there, see :data:`PACKED`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import signature
from typing import Any, Protocol

from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from mindspeed_cp.megatron.patches.swap import replaced

#: True if this Megatron predicts several tokens of packed documents.
PACKED = "packed_seq_params" in signature(multi_token_prediction.roll_tensor).parameters

_LAYER = multi_token_prediction.MultiTokenPredictionLayer
_HAS_LOSS_FUNCTION = hasattr(multi_token_prediction, "process_mtp_loss")


class Rolls(Protocol):
    """What the patches call; see :class:`mindspeed_cp.megatron.adaptors.multi_token.PlannedRolls`."""

    ranks: int

    def roll(self, tensor: Tensor, shift: int, given: Any) -> Tensor:
        """Roll [..., 1, s] of this rank by `shift` tokens inside documents."""

    def total(self, values: Tensor) -> Tensor:
        """Sum values over all context-parallel ranks."""

    def rows_of_documents(self, like: Tensor, given: Any) -> Tensor:
        """Return 1.0 for rows of documents and 0.0 for rows of padding, of the shape of `like`."""


@contextmanager
def multi_token_by_plan(rolls: Rolls) -> Iterator[None]:
    """Let Megatron's multi-token prediction roll rows by `rolls` inside this block."""
    with ExitStack() as stack:
        # Megatron divides a rank's sum of losses by the count, and takes the mean over ranks; with a loss function of
        # its own it divides gradients by the count too, and never by less than 1.
        roll = _roll_tensor(rolls, 1 if _HAS_LOSS_FUNCTION else rolls.ranks)
        for module in (multi_token_prediction, gpt_model):
            if hasattr(module, "roll_tensor"):
                stack.enter_context(replaced(module, "roll_tensor", roll))
        recomputes = _recomputes(_LAYER._checkpointed_forward)
        if recomputes is not None:
            stack.enter_context(replaced(_LAYER, "_checkpointed_forward", recomputes))
        if _HAS_LOSS_FUNCTION:
            loss = _weighs_by_all_tokens(multi_token_prediction.process_mtp_loss, rolls)
            stack.enter_context(replaced(gpt_model, "process_mtp_loss", loss))
            helper = _logs_a_sum(multi_token_prediction.MTPLossLoggingHelper, rolls.ranks)
            stack.enter_context(replaced(multi_token_prediction, "MTPLossLoggingHelper", helper))
        yield


def _roll_tensor(rolls: Rolls, shares: int) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """Return a function for roll_tensor: rolled rows, and for a loss mask the counted tokens of all ranks / shares."""

    def roll_tensor(
        tensor: Tensor | None, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        if tensor is None:  # position_ids of a model without learned positions
            return None, None
        assert dims in (-1, tensor.dim() - 1), "Megatron rolls the last dimension"
        rolled = rolls.roll(tensor, -shifts, packed_seq_params)
        if not rolled.is_floating_point():  # nobody counts tokens, labels and positions
            return rolled, rolled.sum()
        return rolled, rolls.total(rolled).clamp(min=1) / shares

    return roll_tensor


def _recomputes(original: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function for _checkpointed_forward, or None where Megatron's own works."""
    accepted = signature(original).parameters
    if "packed_seq_params" not in accepted:
        return _saves_tensors_alone(original)
    return None if "padding_mask" in accepted else _takes_padding_mask(original)


def _takes_padding_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _checkpointed_forward(layer: Any, padding_mask: Any = None, **arguments: Any) -> Any:
        return original(layer, **arguments)  # the layer inside gets the rows of padding from packed_seq_params

    return _checkpointed_forward


def _saves_tensors_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _checkpointed_forward(layer: Any, forward: Callable[..., Any], **arguments: Any) -> Any:
        saved = {name: value for name, value in arguments.items() if value is None or isinstance(value, Tensor)}
        kept = {name: value for name, value in arguments.items() if name not in saved}

        def run(*values: Any, **named: Any) -> Any:
            return forward(**dict(zip(saved, values, strict=False)), **named, **kept)

        return original(layer, run, **saved)

    return _checkpointed_forward


def _weighs_by_all_tokens(original: Callable[..., Tensor], rolls: Rolls) -> Callable[..., Tensor]:
    """Return a function for process_mtp_loss, whose weight is (all tokens) / (all tokens that are left after a roll).

    Megatron has that weight from each rank's tokens. Without calculate_per_token_loss it divides by the count of
    roll_tensor alone, here that of all ranks; the factor has the rest.
    """

    @wraps(original)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Tensor:
        values: dict[str, Any] = signature(original).bind(*args, **kwargs).arguments
        given: Any = values.get("packed_seq_params")
        mask: Any = values.get("loss_mask")
        if values["labels"] is None and values.get("input_ids") is not None:
            tokens = values["input_ids"]
            mask = rolls.rows_of_documents(tokens, given) if mask is None else mask
            values["labels"], mask = rolls.roll(tokens, 1, given), rolls.roll(mask, 1, given)
        if values["labels"] is None:
            return original(**values)
        config = copy.copy(values["config"])
        config.calculate_per_token_loss = False
        config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * rolls.total(mask)
        return original(**{**values, "loss_mask": mask, "config": config})

    return process_mtp_loss


def _logs_a_sum(helper: type, ranks: int) -> type:
    """Return MTPLossLoggingHelper for losses that are a rank's share: the mean that it takes over ranks is the sum."""
    names = ("save_loss_to_tracker", "save_metrics_to_tracker")  # the second one in 0.19
    (name,) = (name for name in names if hasattr(helper, name))
    original = getattr(helper, name)

    def save(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        original(loss * ranks, *args, **kwargs)

    return type(helper.__name__, (helper,), {name: staticmethod(save)})
