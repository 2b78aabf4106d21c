"""A row of the table of flags, and the flags of a launch as the rows' conditions read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What becomes of a flag."""

    SETTING = "setting"  # a key of context_parallel_suite; the flag is left out
    STAYS_AS_SETTING = "setting, stays"  # a key of context_parallel_suite; the flag stays
    STAYS = "stays"
    REMOVED = "left out"
    REPLACED = "replaced"
    BY_HAND = "by hand"  # it stays, and the user has to do something that no flag does
    REFUSED = "refused"
    ADDED = "added"
    UNKNOWN = "unknown"  # it stays; no table has it
    NEXT = "next"  # what every training script needs

    @property
    def stays(self) -> bool:
        """True if the flag is among the remaining flags as it was."""
        return self in (Outcome.STAYS_AS_SETTING, Outcome.STAYS, Outcome.BY_HAND, Outcome.UNKNOWN)


#: The alternative to a flag that changes what the model computes, where none is at hand.
ANOTHER_MODEL = "none: without the flag it is another model; train this one without the suite"


def is_number_above(text: str, bound: float) -> bool:
    """Return True for a number above a bound, and for a word that is no number, whose value is not known."""
    try:
        return not float(text) <= bound
    except ValueError:
        return True


@dataclass(frozen=True)
class Given:
    """The flags of a launch, as conditions read them.

    Attributes:
        values: values of each flag as it counts (the last one of a name).
        settings: keys of context_parallel_suite that the user gave beside the flags.
        default_algorithm: name of the algorithm that no flag gives.
    """

    values: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, object]
    default_algorithm: str = "p2p"

    def has(self, flag: str) -> bool:
        """Return True if a flag is given."""
        return flag in self.values

    def value(self, flag: str, default: str = "") -> str:
        """Return the values of a flag with blanks between them."""
        return " ".join(self.values[flag]) if flag in self.values else default

    def number(self, flag: str, default: int) -> int | None:
        """Return the value of a flag as a whole number, None if it is none; the default without the flag."""
        text = self.value(flag, str(default))
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    def is_above(self, flag: str, bound: int, default: int = 0) -> bool:
        """Return True if the value of a flag is a whole number above a bound."""
        number = self.number(flag, default)
        return number is not None and number > bound

    @property
    def algorithm(self) -> str:
        """Name of the algorithm as the flags give it: MindSpeed's flag counts before Megatron's."""
        given = self.values.get("--context-parallel-algo") or self.values.get("--cp-comm-type")
        names = given or (self.default_algorithm,)
        name = names[0] if len(set(names)) == 1 else "several"
        return str(self.settings.get("algorithm", name))

    @property
    def is_ring(self) -> bool:
        """True for the ring, of which windows make a double ring."""
        return self.algorithm in ("megatron_cp_algo", "p2p", "ring", "double_ring")

    @property
    def is_hybrid(self) -> bool:
        """True for Ulysses inside and a ring outside."""
        return self.algorithm in ("hybrid_cp_algo", "a2a+p2p", "hybrid")


@dataclass(frozen=True)
class Condition:
    """A condition on the other flags: its words in the table, and its test."""

    text: str
    holds: Callable[[Given], bool]


@dataclass(frozen=True)
class FlagRule:
    """What becomes of a flag.

    Attributes:
        flag: with its dashes.
        arity: number of values; MANY: all words up to the next flag.
        outcome: what becomes of it.
        reason: why, as a sentence without a point.
        value: value for which the rule is; None: any.
        settings: keys of context_parallel_suite with their values; None: the value of the flag.
        becomes: REPLACED: new value; REFUSED: the alternative; by hand: what to do.
        when: condition on the other flags; None: always.
        check: raises ConfigError for a value that the training script would refuse; None: any value is taken.
        key: REFUSED: key of context_parallel_suite that, given by --set, decides in place of the flag.
    """

    flag: str
    arity: int
    outcome: Outcome
    reason: str
    value: str | None = None
    settings: tuple[tuple[str, str | int | None], ...] = ()
    becomes: str = ""
    when: Condition | None = None
    key: str = ""
    check: Callable[[str], None] | None = None

    def fits(self, values: tuple[str, ...], given: Given) -> bool:
        """Return True if the rule is for these values of the flag beside the other flags."""
        text = " ".join(dict.fromkeys(values))
        return self.value in (None, text) and (self.when is None or self.when.holds(given))


@dataclass(frozen=True)
class Added:
    """A flag that a conversion adds.

    Attributes:
        words: the flag and its values; SUITE_FILE stands for the path of the settings.
        reason: why, as a sentence without a point.
        when: condition on the flags; None: always. A flag that is given is not added.
        by_hand: what the user has to do; then nothing is added.
    """

    words: tuple[str, ...]
    reason: str
    when: Condition | None = None
    by_hand: str = ""
