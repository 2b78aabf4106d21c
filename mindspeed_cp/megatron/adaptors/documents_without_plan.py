"""Refuse a micro-batch that has documents but no plan: attention would cross them without a word."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError

_REMEDY = (
    "pass packed_seq_params of a plan of the documents (mindspeed_cp.megatron.planned_batch, or get_batch of "
    "mindspeed_cp.megatron.pretrain)"
)

#: Arguments of Megatron's training scripts that say that rows consist of documents.
_DOCUMENT_FLAGS = ("reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking")


def refuse_documents_without_plan(position_ids: Tensor | None, cp_group: Any) -> None:
    """Raise ConfigError if anything says that a micro-batch without plan has documents inside its rows.

    That are the arguments of Megatron's training script, if this process has any, and positions that differ from those
    of whole rows, which every rank holds as two chunks, as Megatron cuts them.

    Args:
        position_ids: this rank's positions, [batch_size, rows]; None on later pipeline stages.
        cp_group: the context-parallel group.
    """
    for flag in _DOCUMENT_FLAGS:
        if getattr(_training_arguments(), flag, False):
            raise ConfigError(
                f"{flag} is True, but the micro-batch has no plan, without which attention would cross its documents; "
                f"{_REMEDY}"
            )
    if position_ids is None or position_ids.dim() != 2 or not position_ids.shape[1]:
        return
    expected = _positions_of_whole_rows(position_ids.shape[1], cp_group.size(), cp_group.rank(), position_ids)
    if expected is not None and not torch.equal(position_ids, expected.expand_as(position_ids)):
        row, column = (position_ids != expected).nonzero()[0].tolist()
        raise ConfigError(
            f"position_ids[{row}, {column}] is {int(position_ids[row, column])} and would be {int(expected[column])} "
            f"in a whole row, so that the row has documents or padding, but the micro-batch has no plan; {_REMEDY}"
        )


def _positions_of_whole_rows(rows: int, ranks: int, rank: int, like: Tensor) -> Tensor | None:
    """Return the positions of chunks `rank` and 2 * ranks - 1 - rank; None for an odd number of rows, which attention
    refuses."""
    if ranks == 1:
        return torch.arange(rows, device=like.device, dtype=like.dtype)
    if rows % 2:
        return None
    half = torch.arange(rows // 2, device=like.device, dtype=like.dtype)
    return torch.cat([half + rank * len(half), half + (2 * ranks - 1 - rank) * len(half)])


def _training_arguments() -> Any:
    """Return the arguments of Megatron's training script; None where no such script runs."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
