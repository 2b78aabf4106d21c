"""What a run shows while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """Shows steps; used on the first rank only."""

    def step(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something else that happened."""

    def close(self) -> None:
        """The run ends."""


@contextmanager
def unless_hung_up() -> Iterator[None]:
    """What is printed inside is lost if the terminal was closed, and so is all output after it; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def open_display(kind: str, step: int, steps: int, interval: int) -> Display:
    """The display that output.progress asks for.

    Args:
        kind: auto, bar, lines or none.
        step: steps done before.
        steps: steps in all.
        interval: steps between lines.
    """
    if kind == "none":
        return _Nothing()
    if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
        return _Bar(step, steps)
    return _Lines(steps, interval)


def _figures(line: dict[str, Any]) -> str:
    return (
        f"loss {line['loss']:.4f}  {line['tokens_per_s']:,.0f} tokens/s  imbalance {line['imbalance']:.3f}  "
        f"grad {line['grad_norm']:.3f}  lr {line['lr']:.2e}"
    )


class _Nothing:
    def step(self, line: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, steps: int, interval: int) -> None:
        self._steps, self._interval = steps, interval

    def step(self, line: dict[str, Any]) -> None:
        if line["step"] == 1 or line["step"] == self._steps or line["step"] % self._interval == 0:
            self.note(f"step {line['step']}/{self._steps}  {_figures(line)}")

    def note(self, text: str) -> None:
        with unless_hung_up():
            print(text, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, step: int, steps: int) -> None:
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=Console(force_terminal=True), speed_estimate_period=120)
        self._task = self._progress.add_task("", total=steps, completed=step, figures="starting")
        self._progress.start()

    def step(self, line: dict[str, Any]) -> None:
        with unless_hung_up():
            self._progress.update(self._task, completed=line["step"], figures=_figures(line))

    def note(self, text: str) -> None:
        with unless_hung_up():
            self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        with unless_hung_up():
            self._progress.stop()
