"""Progress display of a running training: a bar on a terminal, lines elsewhere, with the time that is left."""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mindspeed_cp.report.text import output_width, wrap_text

WIDE = 120  # columns of a terminal on which steps are shown with norm of gradients and learning rate


class Display:
    """Shows nothing; base class of the displays that show steps. Used on the first rank only."""

    def step(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Show a text that is not about one step."""

    def close(self) -> None:
        """End the display."""


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


def open_display(kind: str, step: int, steps: int, interval: int) -> Display:
    """Return the display that output.progress names.

    Args:
        kind: auto, bar, lines or none.
        step: number of steps done before.
        steps: number of steps of the run.
        interval: number of steps between lines.
    """
    if kind == "none":
        return Display()
    if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
        return _Bar(step, steps)
    return _Lines(steps, interval)


def _figures(line: dict[str, Any]) -> str:
    text = f"loss {line['loss']:.4f}  {line['tokens_per_s']:,.0f} tokens/s  imbalance {line['imbalance']:.3f}"
    return text if output_width() < WIDE else f"{text}  grad {line['grad_norm']:.3f}  lr {line['lr']:.2e}"


class _Lines(Display):
    def __init__(self, steps: int, interval: int) -> None:
        self._steps, self._interval = steps, interval
        self._seconds: deque[float] = deque(maxlen=20)  # of the latest steps

    def step(self, line: dict[str, Any]) -> None:
        self._seconds.append(line["seconds"])
        if line["step"] == 1 or line["step"] == self._steps or line["step"] % self._interval == 0:
            self.note(f"step {line['step']}/{self._steps}  {_figures(line)}{self._remaining(line['step'])}")

    def _remaining(self, step: int) -> str:
        """Return the expected time until the last step, by the median of the latest steps; empty after it."""
        if step >= self._steps:
            return ""
        seconds = round(median(self._seconds) * (self._steps - step))
        return f"  eta {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def note(self, text: str) -> None:
        with ignore_closed_terminal():
            print(wrap_text(text), flush=True)


class _Bar(Display):
    def __init__(self, step: int, steps: int) -> None:
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(20 if output_width() >= WIDE else 4),
            TextColumn("{task.fields[figures]}"), TextColumn("eta"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=Console(force_terminal=True), speed_estimate_period=120)
        self._task = self._progress.add_task("", total=steps, completed=step, figures="starting")
        self._progress.start()

    def step(self, line: dict[str, Any]) -> None:
        with ignore_closed_terminal():
            self._progress.update(self._task, completed=line["step"], figures=_figures(line))

    def note(self, text: str) -> None:
        with ignore_closed_terminal():
            self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        with ignore_closed_terminal():
            self._progress.stop()
