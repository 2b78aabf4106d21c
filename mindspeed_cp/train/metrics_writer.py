"""What the first rank writes and shows for each step: metrics.jsonl, settings.yaml, loss.png and the display."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device.select import cann_version, unknown_cann_note
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.run.charts import draw_training_curves
from mindspeed_cp.train.comparison import comparison_text
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.progress_display import open_display
from mindspeed_cp.train.run_files import RunFiles, error_text, open_no_link, truncate_metrics, write_json, write_text
from mindspeed_cp.train.run_identity import changed_settings_note, run_complete_note
from mindspeed_cp.train.step import StepResult
from mindspeed_cp.train.world import unused_accelerator


class MetricsWriter:
    """Writes and shows the steps of a run; used on the first rank only.

    Attributes:
        first_step: number of steps done before this start.
        lines: lines of metrics.jsonl, those of earlier starts included.
    """

    def __init__(
        self, files: RunFiles, settings: Settings, progress: Progress, parameters: int, device: torch.device
    ) -> None:
        self._files, self._settings = files, settings
        self.first_step = progress.step
        self.lines = truncate_metrics(files.metrics, progress.step)
        self._file = open_no_link(files.metrics)
        self._drawing_failed: str | None = None
        self._has_settings = False  # written after the first step: a start that fails earlier keeps settings.yaml
        changed = changed_settings_note(files.settings, settings) if progress.step else None
        self._display = open_display(
            settings.output.progress, progress.step, settings.train.train_iters, settings.output.log_interval
        )
        suite = settings.context_parallel_suite
        algorithms = ", or by row ".join((suite.algorithm, *suite.row_candidates))
        resumed = f", resumed after step {progress.step}" if progress.step else ""
        unused = unused_accelerator(device)
        for note in (
            f"{parameters:,} parameters, context {settings.data.seq_length:,} over {suite.context_parallel_size} ranks "
            f"({algorithms}) on {device.type}{resumed}",
            changed,
            run_complete_note(files, settings) if progress.step >= settings.train.train_iters else None,
            unknown_cann_note(cann_version()) if device.type == "npu" else None,
            unused and f"{unused} was found but is not used: this version trains on the CPU or an NPU",
        ):
            if note is not None:
                self._display.note(note)

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Write and show one step."""
        line: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / seconds,
            "imbalance": result.imbalance,
            "seconds": seconds,
            "documents": result.documents,
            "replica_imbalance": result.replica_imbalance,
            "planning_seconds": result.planning_seconds,
            "waiting_seconds": result.waiting_seconds,
            "plans": result.plans,
            "cached_plans": result.cached_plans,
        }
        if self._settings.context_parallel_suite.row_candidates:
            line["algorithms"] = result.algorithms  # those of the first replica's rows
        self._check_present()
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if not self._has_settings:
            write_text(self._files.settings, _as_yaml(self._settings))
            self._has_settings = True
        self._display.step(line)

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
        """Draw loss.png; a picture that fails is a note, and ends no run."""
        try:
            draw_training_curves(self.lines, self._files.loss_png, self._files.folder.name)
        except Exception as error:
            note = f"loss.png cannot be drawn, and the training goes on: {type(error).__name__}: {error_text(error)}"
            if note != self._drawing_failed:
                self.note(note)
            self._drawing_failed = note

    def close(self) -> None:
        """End the display and close metrics.jsonl."""
        self._display.close()
        self._file.close()


def _as_yaml(settings: Settings) -> str:
    import yaml

    return yaml.safe_dump(settings.model_dump(), sort_keys=False)
