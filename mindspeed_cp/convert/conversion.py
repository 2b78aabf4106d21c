"""What comes of a conversion: settings, remaining flags, and a line for each change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.convert.flag_table import Outcome


@dataclass(frozen=True)
class Change:
    """What became of a flag, and why.

    Attributes:
        flag: the flag and its values as given; of an added flag, as added; a setting that no flag gave is its key;
            the training script, where it needs lines.
        outcome: what became of it.
        became: settings, new words, the alternative, or what to do; empty if it stays or is left out.
        reason: why.
    """

    flag: str
    outcome: Outcome
    became: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        """Return the change as JSON has it."""
        return {"flag": self.flag, "outcome": self.outcome.value, "became": self.became, "reason": self.reason}


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        settings: keys of context_parallel_suite; None if a flag is refused.
        sections: sizes of the launch for `plan` and `simulate`: sections model, train and data; empty without sizes.
        kept: words behind the training script that stay.
        added: words that come to them.
        changes: a row for each flag, in the order of the command line, and for each added flag.
        notes: remarks on what was recorded, and on sizes that no flag gives.
        suite: the settings, checked; None if there are none.
    """

    settings: dict[str, Any] | None
    sections: dict[str, dict[str, Any]]
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
    def refused(self) -> tuple[Change, ...]:
        """The rows that are refused: no settings are written."""
        return tuple(change for change in self.changes if change.outcome is Outcome.REFUSED)

    @property
    def to_do(self) -> tuple[Change, ...]:
        """The rows without which the launch cannot be started as it is printed: by hand, or unknown."""
        return tuple(change for change in self.changes if change.outcome in (Outcome.BY_HAND, Outcome.UNKNOWN))

    @property
    def exit_code(self) -> int:
        """0: ready; 1: refused; 3: settings are made, and rows are to be looked at by hand."""
        return 1 if self.refused else 3 if self.to_do else 0

    def yaml(self) -> str:
        """Return the sections as a YAML file; only with settings."""
        sections = {SUITE_SECTION: self.settings, **self.sections}
        return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the conversion as JSON has it."""
        return {
            SUITE_SECTION: self.settings,
            **self.sections,
            "flags": list(self.flags),
            "changes": [change.as_dict() for change in self.changes],
            "notes": list(self.notes),
        }
