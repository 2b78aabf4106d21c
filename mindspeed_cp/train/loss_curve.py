"""loss.png, drawn by a short-lived process: its memory is not the rank's, and no picture can end a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_cp.train.run_files import RunFiles, error_text, iter_metrics

POINTS = 2000  # of a curve, at most twice as many; a longer run shows every second, fourth, ... step
_KEYS = ("step", "loss", "lr", "grad_norm")
_LIMIT_SECONDS = 600.0  # for the last picture


class LossCurve:
    """Draws loss.png from metrics.jsonl; used on the first rank only."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._process: subprocess.Popen[str] | None = None
        self._is_behind = False
        self._problem: str | None = None

    def draw(self) -> None:
        """Draw in the background; where the drawing before still runs, later."""
        if self._process is not None and self._process.poll() is None:
            self._is_behind = True
            return
        self._end()
        self._is_behind = False
        command = [sys.executable, "-m", "mindspeed_cp.train.loss_curve", str(self._files.folder)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            self._problem = error_text(error)

    def finish(self) -> str | None:
        """Wait for the picture of the newest lines; return what went wrong with it, or None."""
        self._end()
        if self._is_behind:
            self.draw()
            self._end()
        return self._problem

    def _end(self) -> None:
        """Wait for the process, and note how it ended."""
        if self._process is None:
            return
        try:
            _, text = self._process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, text = self._process.communicate()[0], f"it took more than {_LIMIT_SECONDS:g} s"
        self._problem = (text.strip().splitlines() or ["it was killed"])[-1] if self._process.returncode else None
        self._process = None


def thinned(lines: Iterator[dict[str, Any]], points: int = POINTS) -> list[dict[str, Any]]:
    """Return every n-th line, and the last one, with n the least power of two that leaves less than 2 * points."""
    kept: list[dict[str, Any]] = []
    stride, line = 1, None
    for number, line in enumerate(lines):
        if number % stride == 0:
            kept.append({key: line[key] for key in _KEYS})
            if len(kept) >= 2 * points:
                kept, stride = kept[::2], 2 * stride
    if line is not None and kept[-1]["step"] != line["step"]:
        kept.append({key: line[key] for key in _KEYS})
    return kept


def main() -> None:
    """Draw loss.png of the run in a folder, without taking a core from its ranks."""
    from mindspeed_cp.report.run.charts import draw_training_curves

    os.nice(10)
    files = RunFiles(Path(sys.argv[1]))
    draw_training_curves(thinned(iter_metrics(files.metrics)), files.loss_png, files.folder.name)


if __name__ == "__main__":
    main()
