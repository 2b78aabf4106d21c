"""What the first rank writes and shows for each step: metrics.jsonl, settings.yaml, TensorBoard, and a bar or lines."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.device.select import cann_version, unknown_cann_note
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import output_width, wrap_text
from mindspeed_cp.train.comparison import comparison_text
from mindspeed_cp.train.identity import changed_settings, run_complete_note
from mindspeed_cp.train.run_files import RunFiles, error_text, iter_metrics, truncate_metrics, write_json, write_text
from mindspeed_cp.train.step import StepResult
from mindspeed_cp.train.world import unused_accelerator

WIDE = 120  # columns of a terminal on which steps are shown with norm of gradients and learning rate


def check_tensorboard(settings: Settings) -> None:
    """Raise ConfigError if output.tensorboard is set, and tensorboard is not installed."""
    if settings.output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "output.tensorboard = true: tensorboard is not installed; pip install 'mindspeed-cp[tensorboard]', or use "
            "false: metrics.jsonl has the same figures"
        )


class RunWriter:
    """Writes and shows the steps of a run; used on the first rank only.

    Args:
        files, settings: of the run.
        step: number of steps done before this start.
        before: settings with which the checkpoint was written that the run goes on from; empty: there is none.
        parameters: weights of the model.
        device: device of the ranks.

    Attributes:
        first_step: number of steps done before this start.
    """

    def __init__(
        self,
        files: RunFiles,
        settings: Settings,
        step: int,
        before: dict[str, Any],
        parameters: int,
        device: torch.device,
    ) -> None:
        self._files, self._settings, self.first_step = files, settings, step
        truncate_metrics(files.metrics, step)
        self._file = open(files.metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._tensorboard: Any = None
        if settings.output.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Events of later steps, of an abandoned future, are not shown.
            self._tensorboard = SummaryWriter(str(files.tensorboard), purge_step=step + 1)
        self._has_settings = False  # written after the first step: a start that fails earlier keeps settings.yaml
        self._changed = changed_settings(before, settings)
        self._display = Display(
            settings.output.progress, step, settings.train.train_iters, settings.output.log_interval
        )
        suite = settings.context_parallel_suite
        algorithms = ", or by row ".join((suite.algorithm, *suite.row_candidates))
        for note in (
            f"{parameters:,} parameters, context {settings.data.seq_length:,} over {suite.context_parallel_size} ranks "
            f"({algorithms}) on {device.type}{f', resumed after step {step}' if step else ''}",
            self._changed and f"this run was last started with other settings: {'; '.join(self._changed)}",
            run_complete_note(files, settings) if step >= settings.train.train_iters else None,
            unknown_cann_note(cann_version()) if device.type == "npu" else None,
            unused_accelerator(device),
        ):
            if note:
                self.note(note)

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Write and show one step."""
        settings = self._settings
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
            **({"flat_tokens": result.flat_tokens} if settings.data.trajectories else {}),
            "replica_imbalance": result.replica_imbalance,
            **({"pooled": result.pools} if settings.data.balance == "pool" else {}),
            "planning_seconds": result.planning_seconds,
            "waiting_seconds": result.waiting_seconds,
            "plans": result.plans,
            "cached_plans": result.cached_plans,
        }
        if result.problem is not None:
            line["problem"] = result.problem
            self.note(f"step {step}: {result.problem}; its update was left out")
        if self._changed:
            line["changed_settings"], self._changed = self._changed, []
        if settings.context_parallel_suite.row_candidates:
            line["algorithms"] = result.algorithms  # those of the first replica's rows
        for key in ("loss", "grad_norm"):  # JSON has no NaN
            line[key] = line[key] if math.isfinite(line[key]) else None
        self._check_present()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for key, value in line.items() if self._tensorboard is not None else ():
            if isinstance(value, (int, float)) and key != "step":
                self._tensorboard.add_scalar(key, value, step)
        if not self._has_settings:
            import yaml

            write_text(self._files.settings, yaml.safe_dump(settings.model_dump(), sort_keys=False))
            self._has_settings = True
        self._display.step(line)

    def _check_present(self) -> None:
        """Raise ConfigError if metrics.jsonl is no longer in the folder: all that is written would be lost."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise ConfigError(
                f"{self._files.metrics}: was removed while the run wrote it; what was in it is lost, and the run ends: "
                "leave the folder alone, and start it again"
            )

    def note(self, text: str) -> None:
        """Show a line that is not about one step."""
        self._display.note(text)

    def comparison(self, comparison: dict[str, Any]) -> None:
        """Keep the comparison of algorithms for the summary, and show it."""
        write_json(self._files.comparison, comparison)
        self.note(comparison_text(comparison))

    def close(self) -> None:
        """Draw loss.png, close metrics.jsonl and end the display."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._settings.output.loss_png:
            from mindspeed_cp.report.run.charts import draw_training_curves

            try:
                lines = list(iter_metrics(self._files.metrics))
                if lines:
                    draw_training_curves(lines, self._files.loss_png, self._files.folder.name)
            except Exception as error:  # no picture may end a run
                self.note(f"{self._files.loss_png} is not up to date: {error_text(error)}")
        self._display.close()


@contextmanager
def ignore_closed_terminal() -> Iterator[None]:
    """Discard the output of this block and all later output if the terminal was closed; other errors are raised."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


class Display:
    """Shows steps: a bar on a terminal, lines elsewhere, with the time that is left.

    Args:
        kind: output.progress: auto, bar, lines or none.
        step: number of steps done before.
        steps: number of steps of the run.
        interval: number of steps between lines.
    """

    def __init__(self, kind: str, step: int, steps: int, interval: int) -> None:
        self._is_silent, self._steps, self._interval = kind == "none", steps, interval
        self._seconds: deque[float] = deque(maxlen=20)  # of the latest steps
        self._bar: Bar | None = None
        if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
            columns = (
                TextColumn("step"), MofNCompleteColumn(), BarColumn(20 if output_width() >= WIDE else 4),
                TextColumn("{task.fields[figures]}"), TextColumn("eta"), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Bar(*columns, console=Console(force_terminal=True), speed_estimate_period=120)
            self._task = self._bar.add_task("", total=steps, completed=step, figures="starting")
            self._bar.start()

    def step(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        step = line["step"]
        self._seconds.append(line["seconds"])
        if self._bar is not None:
            with ignore_closed_terminal():
                self._bar.update(self._task, completed=step, figures=_figures(line))
        elif step == 1 or step == self._steps or step % self._interval == 0:
            seconds = round(median(self._seconds) * (self._steps - step))
            left = f"  eta {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}" if step < self._steps else ""
            self.note(f"step {step}/{self._steps}  {_figures(line)}{left}")

    def note(self, text: str) -> None:
        """Show a text that is not about one step."""
        with ignore_closed_terminal():
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            elif not self._is_silent:
                print(wrap_text(text), flush=True)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            with ignore_closed_terminal():
                self._bar.stop()


def _figures(line: dict[str, Any]) -> str:
    text = (
        f"loss {_figure(line['loss'], '.4f')}  {line['tokens_per_s']:,.0f} tokens/s  imbalance {line['imbalance']:.3f}"
    )
    if output_width() < WIDE:
        return text
    return f"{text}  grad {_figure(line['grad_norm'], '.3f')}  lr {line['lr']:.2e}"


def _figure(value: float | None, form: str) -> str:
    """Return a figure; that of a skipped step may be missing."""
    return "-" if value is None else format(value, form)
