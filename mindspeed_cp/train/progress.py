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
        losses: of the newest steps that were not skipped, which spikes are measured against.
        spike: the loss of the newest step is a spike: `latest` does not move to its checkpoint.
        restarts: how often the run was started again.
        rollbacks: how often it went back to a checkpoint because of a bad step.
        skipped_steps: steps whose update was left out.
        run_id: names the run in its checkpoints, from its first start on.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    data: dict[str, Any] | None = None
    losses: tuple[float, ...] = ()
    spike: bool = False
    restarts: int = 0
    rollbacks: int = 0
    skipped_steps: int = 0
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
