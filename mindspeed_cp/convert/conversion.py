"""What comes of a conversion: settings, remaining flags, and a line for each change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.convert.command_line import Flag
from mindspeed_cp.convert.rules import Outcome


@dataclass(frozen=True)
class Change:
    """What became of a flag, and why.

    Attributes:
        flag: the flag and its values as given; of an added flag, as added; a setting that no flag gave is its key;
            the training script, where it needs lines.
        outcome: what became of it.
        became: settings, new words, the alternative, or what to do; empty if it stays or is left out.
        reason: why.
        line: line of the script, or None.
        source: the flag as it was read, or None.
    """

    flag: str
    outcome: Outcome
    became: str
    reason: str
    line: int | None = None
    source: Flag | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the change as JSON has it."""
        return {
            "flag": self.flag,
            "outcome": self.outcome.value,
            "became": self.became,
            "reason": self.reason,
            "line": self.line,
        }


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        settings: keys of context_parallel_suite; None if a flag is refused or not resolved.
        kept: words behind the training script that stay.
        added: words that come to them.
        changes: a row for each flag of the table, in the order of the command line, and for each added flag.
        notes: remarks on words that are not known.
        suite: the settings, checked; None if there are none.
    """

    settings: dict[str, Any] | None
    kept: tuple[str, ...]
    added: tuple[str, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    suite: SuiteSettings | None

    @property
    def flags(self) -> tuple[str, ...]:
        """The remaining command line behind the training script, with the added flags."""
        return (*self.kept, *self.added)

    @property
    def problems(self) -> tuple[Change, ...]:
        """The flags that are refused or not resolved."""
        return tuple(change for change in self.changes if change.outcome in (Outcome.REFUSED, Outcome.UNRESOLVED))

    def yaml(self) -> str:
        """Return the settings as the section of a YAML file; only with settings."""
        return yaml.safe_dump({SUITE_SECTION: self.settings}, sort_keys=False, allow_unicode=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the conversion as JSON has it."""
        return {
            SUITE_SECTION: self.settings,
            "flags": list(self.flags),
            "changes": [change.as_dict() for change in self.changes],
            "notes": list(self.notes),
        }
