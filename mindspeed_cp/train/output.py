"""What the first rank writes and shows: metrics.jsonl, settings.yaml, TensorBoard, lines, and the summary."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import defaultdict, deque
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data.corpus import FileCorpus
from mindspeed_cp.device.select import cann_version, unknown_cann_note
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.report.text import Table, print_tables, wrap_text
from mindspeed_cp.train.checkpoint import Progress
from mindspeed_cp.train.comparison import comparison_table
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.run_files import RunFiles, truncate_metrics, write_text
from mindspeed_cp.train.step import StepResult

LAST_STEPS = 10  # averaged, because the loss of a single step depends on its documents
_SHOWN = (
    *("first_loss", "last_loss", "tokens", "tokens_per_s", "imbalance", "replica_imbalance", "pooled_steps"),
    *("planning_seconds", "waiting_seconds", "cut_documents", "skipped_steps", "metrics", "checkpoint"),
)


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
        files: those of the run.
        training: the model, its settings and the device of the ranks.
        step: number of steps done before this start.
    """

    def __init__(self, files: RunFiles, training: TrainingModel, step: int) -> None:
        self._files, self._settings = files, training.world.settings
        settings, device = training.world.settings, training.world.device
        truncate_metrics(files.metrics, step)
        self._file = open(files.metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._tensorboard: Any = None
        if settings.output.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Events of later steps, of an abandoned future, are not shown.
            self._tensorboard = SummaryWriter(str(files.tensorboard), purge_step=step + 1)
        self._seconds: deque[float] = deque(maxlen=20)  # of the latest steps
        self._totals: dict[str, float] = defaultdict(int)  # over the steps of this start
        self._losses: list[float] = []
        self._comparison: dict[str, Any] | None = None
        suite, context = settings.context_parallel_suite, settings.data.seq_length
        self.note(
            f"context {context:,} over {suite.context_parallel_size} ranks ({suite.algorithm}) on {device.type}"
            f"{f', resumed after step {step}' if step else ''}"
        )
        if step >= settings.train.train_iters:
            self.note(
                "this run is complete, so nothing is done: to go on, raise train.train_iters and set "
                "train.lr_decay_iters; to start anew, give another output.folder"
            )
        if device.type == "npu" and (note := unknown_cann_note(cann_version())):
            self.note(note)
        if device.type == "cpu" and torch.cuda.is_available():
            self.note("this machine has a CUDA device, which is not used; train.device: cuda uses it")

    def step(self, step: int, result: StepResult, seconds: float) -> None:
        """Write and show one step."""
        line: dict[str, Any] = {
            "step": step,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **{name: value if math.isfinite(value) else None  # JSON has no NaN
               for name, value in (("loss", result.loss), ("grad_norm", result.grad_norm))},
            "lr": result.lr,
            "seconds": seconds,
            "tokens_per_s": result.figures["tokens"] / seconds,
            **result.figures,
        }  # fmt: skip
        if result.problem is not None:
            line["problem"] = result.problem
            self.note(f"step {step}: {result.problem}; its update was left out")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for key, value in line.items() if self._tensorboard is not None else ():
            if isinstance(value, (int, float)) and key != "step":
                self._tensorboard.add_scalar(key, value, step)
        if not self._seconds:  # not earlier: a start that fails at once keeps the settings of the one before
            write_text(self._files.settings, yaml.safe_dump(self._settings.model_dump(mode="json"), sort_keys=False))
        if line["loss"] is not None:
            self._losses.append(line["loss"])
        self._seconds.append(seconds)
        for name in ("tokens", "documents", "seconds", "planning_seconds", "waiting_seconds"):
            self._totals[name] += line[name]
        for name in ("imbalance", "replica_imbalance"):
            self._totals[name] += line[name] * line["tokens"]
        self._totals["pooled_steps"] += line["pooled"]
        self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        step, steps, interval = line["step"], self._settings.train.train_iters, self._settings.output.log_interval
        if not interval or (step not in (1, steps) and step % interval):
            return
        seconds = round(median(self._seconds) * (steps - step))
        left = f"  eta {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}" if step < steps else ""
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        self.note(
            f"step {step}/{steps}  loss {loss}  {line['tokens_per_s']:,.0f} tokens/s  imbalance "
            f"{line['imbalance']:.3f}{left}"
        )

    def note(self, text: str) -> None:
        """Show a text, unless output.log_interval is 0."""
        if self._settings.output.log_interval:
            with suppress(OSError):  # of a closed terminal or a full disk, which must not end the run
                print(wrap_text(text), flush=True)

    def comparison(self, comparison: dict[str, Any]) -> None:
        """Keep the comparison of algorithms for the summary, and show it."""
        self._comparison = comparison
        if self._settings.output.log_interval:
            with suppress(OSError):
                print_tables([comparison_table(comparison)], sys.stdout)

    def summary(
        self, progress: Progress, saved: Path | None, stopped_by: str | None, corpus: FileCorpus
    ) -> dict[str, Any]:
        """Write summary.json and return its content; sums and means are of the steps of this start.

        Args:
            progress: state after the last step.
            saved: folder of the newest checkpoint.
            stopped_by: reason for a stop before the last step, or None.
            corpus: the training documents.
        """
        totals, settings, losses = self._totals, self._settings, self._losses[-LAST_STEPS:]
        summary = {
            "step": progress.step,
            "steps": settings.train.train_iters,
            "stopped_by": stopped_by,
            "first_loss": self._losses[0] if losses else None,
            "last_loss": sum(losses) / len(losses) if losses else None,
            "skipped_steps": progress.skipped_steps,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "tokens_per_s": totals["tokens"] / totals["seconds"] if totals["seconds"] else None,
            **{
                name: totals[name] / totals["tokens"] if totals["tokens"] else None
                for name in ("imbalance", "replica_imbalance")
            },
            **{name: totals[name] for name in ("planning_seconds", "waiting_seconds", "documents")},
            "pooled_steps": totals["pooled_steps"],
            "cut_documents": int((corpus.lengths > settings.data.seq_length).sum()),
            "comparison": self._comparison,
            "metrics": str(self._files.metrics),
            "checkpoint": str(saved) if saved else None,
        }
        write_text(self._files.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
        return summary

    def close(self) -> None:
        """Close metrics.jsonl and TensorBoard's events."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """Print a summary: as JSON, or as a table and, below it, why the run stopped."""
    if as_json:
        print(json.dumps(summary), flush=True)
        return
    with suppress(OSError):
        print_tables([_summary_table(summary)], sys.stdout)
        if summary["stopped_by"] is not None:
            text = (
                f"stopped by {summary['stopped_by']} after step {summary['step']}; the state is in "
                f"{summary['checkpoint']}, and the same command goes on from there"
            )
            print(wrap_text(text), flush=True)


def _summary_table(summary: dict[str, Any]) -> Table:
    rows = [("steps", f"{summary['step']:,} of {summary['steps']:,}")]
    for key in _SHOWN:
        value = summary[key]
        if value:
            text = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            rows.append((key.replace("_", " "), text))
    return Table("Summary", ("", ""), tuple(rows))
