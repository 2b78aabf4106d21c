"""The figures of metrics.jsonl as TensorBoard events: output.tensorboard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError


def check_tensorboard(settings: Settings) -> None:
    """Raise ConfigError if output.tensorboard is set, and tensorboard is not installed."""
    if settings.output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "output.tensorboard = true: tensorboard is not installed; pip install 'mindspeed-cp[tensorboard]', or use "
            "false: metrics.jsonl has the same figures"
        )


class TensorBoardWriter:
    """Writes one scalar for each figure of a step; used on the first rank only.

    Args:
        folder: where the events go.
        step: number of steps done before; events of later ones, of an abandoned future, are not shown.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def step(self, line: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        for key, value in line.items():
            if isinstance(value, (int, float)) and key != "step":
                self._writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
