"""What the first rank writes and shows for each step: metrics.jsonl, settings.yaml, loss.png and the display."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device.select import cann_version, unknown_cann_note
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.yaml_file import read_settings_file
from mindspeed_cp.train.checkpoint_digests import DamagedCheckpointError
from mindspeed_cp.train.comparison import comparison_text
from mindspeed_cp.train.loss_curve import LossCurve
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.progress_display import open_display
from mindspeed_cp.train.rank_logs import open_own_log
from mindspeed_cp.train.resume import read_run_json
from mindspeed_cp.train.run_files import RunFiles, open_no_link, truncate_metrics, write_json, write_text
from mindspeed_cp.train.run_identity import changed_settings, run_complete_note
from mindspeed_cp.train.step import StepResult
from mindspeed_cp.train.stragglers import StragglerWatch
from mindspeed_cp.train.tensorboard_writer import TensorBoardWriter
from mindspeed_cp.train.world import unused_accelerator


def settings_before(files: RunFiles, step: int) -> Mapping[str, Any]:
    """Return the settings with which the checkpoint of a step was written; empty if they are not known.

    Checkpoints of older versions have none: those of settings.yaml count, which the last start wrote after its first
    step.
    """
    if not step:
        return {}
    try:
        saved = read_run_json(files.checkpoint(step)).get("settings")
        return saved if isinstance(saved, dict) else read_settings_file(files.settings).data
    except (ConfigError, DamagedCheckpointError):
        return {}


class MetricsWriter:
    """Writes and shows the steps of a run; used on the first rank only.

    Attributes:
        first_step: number of steps done before this start.
    """

    def __init__(
        self, files: RunFiles, settings: Settings, progress: Progress, parameters: int, device: torch.device
    ) -> None:
        self._files, self._settings = files, settings
        self.first_step = progress.step
        truncate_metrics(files.metrics, progress.step)
        self._curve = LossCurve(files) if settings.output.loss_png else None
        self._file = open_no_link(files.metrics)
        self._stragglers = StragglerWatch()
        self._rolled_back: list[str] = []
        self._tensorboard = TensorBoardWriter(files.tensorboard, progress.step) if settings.output.tensorboard else None
        self._has_settings = False  # written after the first step: a start that fails earlier keeps settings.yaml
        self._changed = changed_settings(settings_before(files, progress.step), settings)
        self._display = open_display(
            settings.output.progress, progress.step, settings.train.train_iters, settings.output.log_interval,
            open_own_log(files.logs),
        )  # fmt: skip
        suite = settings.context_parallel_suite
        algorithms = ", or by row ".join((suite.algorithm, *suite.row_candidates))
        restart = f" (restart {progress.restarts})" if progress.restarts else ""
        resumed = f", resumed after step {progress.step}{restart}" if progress.step else ""
        unused = unused_accelerator(device)
        for note in (
            f"{parameters:,} parameters, context {settings.data.seq_length:,} over {suite.context_parallel_size} ranks "
            f"({algorithms}) on {device.type}{resumed}",
            self._changed and f"this run was last started with other settings: {'; '.join(self._changed)}",
            run_complete_note(files, settings) if progress.step >= settings.train.train_iters else None,
            unknown_cann_note(cann_version()) if device.type == "npu" else None,
            unused,
        ):
            if note:
                self._display.note(note)

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Write and show one step."""
        line: dict[str, Any] = {
            "step": step,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / seconds,
            "imbalance": result.imbalance,
            "seconds": seconds,
            "documents": result.documents,
            **({"flat_tokens": result.flat_tokens} if self._settings.data.trajectories else {}),
            "replica_imbalance": result.replica_imbalance,
            **({"pooled": result.pools} if self._settings.data.balance == "pool" else {}),
            "planning_seconds": result.planning_seconds,
            "waiting_seconds": result.waiting_seconds,
            "plans": result.plans,
            "cached_plans": result.cached_plans,
            "slowest_rank": int(np.argmax(result.probe_seconds)),  # in a computation that is the same on all ranks
        }
        if result.problem is not None:
            line["problem"] = result.problem
        for key in ("loss", "grad_norm"):  # JSON has no NaN
            line[key] = line[key] if math.isfinite(line[key]) else None
        if self._rolled_back:
            line["rolled_back"], self._rolled_back = self._rolled_back, []
        if self._changed:
            line["changed_settings"], self._changed = self._changed, []
        if self._settings.context_parallel_suite.row_candidates:
            line["algorithms"] = result.algorithms  # those of the first replica's rows
        slow = self._stragglers.add(result.probe_seconds)
        if slow is not None:
            line["straggler"] = slow
            self._display.note(f"step {step}: {slow}")
        self._check_present()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.step(line)
        if not self._has_settings:
            write_text(self._files.settings, _as_yaml(self._settings))
            self._has_settings = True
        self._display.step(line)

    def roll_back(self, last_step: int, text: str) -> None:
        """Remove the lines after a step, to which the run goes back; the next line tells it, as `rolled_back`."""
        self._rolled_back.append(text)
        self._file.close()
        truncate_metrics(self._files.metrics, last_step)
        self._file = open_no_link(self._files.metrics)

    def _check_present(self) -> None:
        """Raise ConfigError if metrics.jsonl is no longer in the folder: all that is written would be lost."""
        own = os.fstat(self._file.fileno())
        try:
            there = os.stat(self._files.metrics)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise ConfigError(
                f"{self._files.metrics}: was removed or replaced while the run wrote it; what was in it is lost, and "
                "the run ends: leave the folder alone, and start it again"
            )

    def note(self, text: str) -> None:
        """Show a line that is not about one step."""
        self._display.note(text)

    def comparison(self, comparison: dict[str, Any]) -> None:
        """Keep the comparison of algorithms for the summary, and show it."""
        write_json(self._files.comparison, comparison)
        self._display.note(comparison_text(comparison))

    def draw(self) -> None:
        """Draw loss.png, in the background."""
        if self._curve is not None:
            self._curve.draw()

    def close(self) -> None:
        """Wait for loss.png, close metrics.jsonl and end the display."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        problem = self._curve and self._curve.finish()
        if problem:
            self._display.note(f"{self._files.loss_png} is not up to date: {problem}")
        self._display.close()


def _as_yaml(settings: Settings) -> str:
    import yaml

    return yaml.safe_dump(settings.model_dump(), sort_keys=False)
