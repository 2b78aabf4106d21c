"""Positions of time, height and width (mrope), one row each, of a whole micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError

#: Rows of positions: time, height, width.
POSITION_ROWS = 3


def mrope_rows(position_ids: Any, tokens: int) -> Tensor:
    """Return positions of time, height and width of all tokens, int64 [tokens, 3].

    Args:
        position_ids: [3, tokens] or [3, rows, tokens of a row].
        tokens: of the micro-batch.

    Raises:
        ConfigError: another shape or type.
    """
    positions = torch.as_tensor(position_ids)
    if positions.dim() not in (2, 3) or len(positions) != POSITION_ROWS or positions.numel() != POSITION_ROWS * tokens:
        raise ConfigError(
            f"position_ids has shape {list(positions.shape)}, but the plan has {tokens} tokens; valid: "
            f"[{POSITION_ROWS}, {tokens}] or [{POSITION_ROWS}, rows, tokens of a row], positions of time, height and "
            "width (mrope); leave positions in one dimension out: the documents of the plan determine them"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype is torch.bool:
        raise ConfigError(f"position_ids is {positions.dtype}; valid: integers")
    return positions.reshape(POSITION_ROWS, tokens).T.long()
