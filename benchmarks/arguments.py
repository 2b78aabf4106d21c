"""Command-line arguments with one-line errors."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Arguments(argparse.ArgumentParser):
    """A parser that prints one-line errors without the usage text and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(2, f"{self.prog}: error: {message}\n")
