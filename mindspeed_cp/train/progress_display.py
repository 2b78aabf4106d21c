"""Progress display of a running training: a bar on a terminal, lines elsewhere, with the time that is left."""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any, TextIO

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


def open_display(kind: str, step: int, steps: int, interval: int, log: TextIO | None = None) -> Display:
    """Return the display that output.progress names.

    Args:
        kind: auto, bar, lines or none.
        step: number of steps done before.
        steps: number of steps of the run.
        interval: number of steps between lines.
        log: file that gets the lines, whatever is shown; closed with the display.
    """
    if log is not None:
        return _Both(open_display(kind, step, steps, interval), _Lines(steps, interval, log))
    if kind == "none":
        return Display()
    if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
        return _Bar(step, steps)
    return _Lines(steps, interval)


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


class _Lines(Display):
    def __init__(self, steps: int, interval: int, log: TextIO | None = None) -> None:
        self._steps, self._interval, self._log = steps, interval, log
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
        if self._log is None:
            with ignore_closed_terminal():
                print(wrap_text(text), flush=True)
            return
        with suppress(OSError):  # metrics.jsonl tells of a full disk
            print(text, file=self._log, flush=True)

    def close(self) -> None:
        if self._log is not None:
            with suppress(OSError):
                self._log.close()


class _Both(Display):
    def __init__(self, *displays: Display) -> None:
        self._displays = displays

    def step(self, line: dict[str, Any]) -> None:
        for display in self._displays:
            display.step(line)

    def note(self, text: str) -> None:
        for display in self._displays:
            display.note(text)

    def close(self) -> None:
        for display in self._displays:
            display.close()


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
