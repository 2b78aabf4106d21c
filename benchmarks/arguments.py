"""Arguments whose mistakes are told in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Arguments(argparse.ArgumentParser):
    """A parser that says what is wrong and not how the program is called, which --help does; exit code 2."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        self.exit(2, f"{self.prog}: error: {message}\n")
