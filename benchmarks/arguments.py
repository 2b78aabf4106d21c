"""Command lines of the benchmarks: every error is one line, with exit code 2."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


class Arguments(argparse.ArgumentParser):
    """A parser that prints errors without the usage text; its help is the docstring of a module."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """Return a whole number from 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Return a whole number from 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}; valid: a whole number from {least}")
    return int(text)


def new_file(text: str) -> Path:
    """Return the path of a file that can be written."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    return path
