"""How far a run has come."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """State of a run after a step, apart from tensors.

    Attributes:
        step: number of finished optimizer steps.
        tokens: number of tokens trained on so far, over all ranks.
        seconds: time spent in steps so far.
        data: state of the data stream.
        run_id: names the run in its checkpoints, from its first start on.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data: dict[str, Any] | None = None
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
