"""Flags of Megatron and MindSpeed to settings and remaining flags, by the table of rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from mindspeed_cp.algorithms import AUTO
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.aliases import read_algorithm
from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.convert.command_line import Flag, Token, read_flags
from mindspeed_cp.convert.conversion import Change, Conversion
from mindspeed_cp.convert.launch import Launch
from mindspeed_cp.convert.nodes import nodes_change
from mindspeed_cp.convert.notes import unknown_notes
from mindspeed_cp.convert.rules import ADDED_FLAGS, ARITIES, LLM_FLAGS, RULES, FlagRule, Given, Outcome
from mindspeed_cp.convert.rules.parallel import SPEC_WORDS, SUITE_FILE
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import format_value
from mindspeed_cp.schema.yaml_file import SettingsFile, apply_overrides, with_file_location

#: The algorithms that Megatron and MindSpeed-LLM take where no flag names one.
MEGATRON_ALGORITHM = "p2p"
LLM_ALGORITHM = "ulysses_cp_algo"

#: Training scripts of Megatron and MindSpeed-LLM that build their layers from --spec.
SCRIPTS_WITH_SPEC = ("pretrain_gpt.py", "posttrain_gpt.py")

#: Outcomes that need the value of the flag.
_NEEDS_VALUE = (Outcome.SETTING, Outcome.STAYS_AS_SETTING, Outcome.REPLACED)

_SCRIPT_LINES = "three to five lines of it: arguments, model provider and forward step (docs/megatron.md)"
_SCRIPT_REASON = "it takes --cp-plan and the plans from mindspeed_cp.megatron.pretrain"


def convert_launch(launch: Launch, overrides: Iterable[str] = (), output: str = "suite.yaml") -> Conversion:
    """Convert the flags of a launch.

    Args:
        launch: the flags, of a script or given one by one.
        overrides: settings `key=value` that take precedence over flags.
        output: path of the settings, for the flag that names it.

    Raises:
        ConfigError: a flag lacks its value, or has one that the settings do not take; names the flag.
    """
    override_file = _override_file(overrides)
    words, flags = read_flags(launch.tokens, ARITIES)
    values = {flag.name: flag.values for flag in flags}
    default = LLM_ALGORITHM if not LLM_FLAGS.isdisjoint(values) else MEGATRON_ALGORITHM
    given = Given(values, override_file.data[SUITE_SECTION], default)
    work = _Work(given, override_file)
    last = {flag.name: number for number, flag in enumerate(flags)}
    for number, flag in enumerate(flags):
        work.convert(flag, counts=last[flag.name] == number)
    work.add_defaults(launch)
    work.add_flags(output, launch.entry)
    notes = unknown_notes(launch)
    problems = any(change.outcome in (Outcome.REFUSED, Outcome.UNRESOLVED) for change in work.changes)
    suite = None if problems else work.suite(launch.name)
    return Conversion(
        None if suite is None else _section(suite),
        (*(token.text for token in words), *work.remaining),
        tuple(work.added),
        tuple(work.changes),
        notes,
        suite,
    )


@dataclass
class _Work:
    """A conversion at work.

    Attributes:
        given: the flags as conditions read them.
        overrides: settings of the user.
        settings: keys of the settings, with value and the flag that gave it.
        remaining: words of the remaining command line.
        added: words that are added to it.
        changes: rows so far.
    """

    given: Given
    overrides: SettingsFile
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    remaining: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def convert(self, flag: Flag, counts: bool) -> None:
        """Convert a flag; `counts` is False if a later flag of the same name takes precedence.

        Raises:
            ConfigError: the training script would refuse the value.
        """
        values = flag.values
        named = [candidate for candidate in RULES if candidate.flag == flag.name]
        rule = next((candidate for candidate in named if candidate.fits(values, self.given)), None)
        chosen_by_value = any(candidate.is_read or candidate.value is not None for candidate in named)
        needs_value = ARITIES.get(flag.name) != 0 and (
            chosen_by_value or (rule is not None and rule.outcome in _NEEDS_VALUE)
        )
        if flag.unknowns and needs_value:
            self._unresolved(flag)
            return
        if rule is None:
            self.remaining += [token.text for token in (*flag.tokens, *flag.rest)]
            return
        if rule.check is not None and not flag.unknowns:
            for value in values:
                rule.check(value)
        if not counts and rule.outcome is not Outcome.STAYS:
            self._row(
                flag, Outcome.STAYS if rule.outcome.stays else Outcome.REMOVED, "", "a later one takes precedence"
            )
        elif taken := self._overridden(rule):
            given = ", ".join(f"{key}={format_value(value).strip(chr(34))}" for key, value in taken.items())
            self._row(flag, Outcome.REMOVED, "", f"--set {given} takes its place")
        else:
            self._apply(rule, flag)

    def _overridden(self, rule: FlagRule) -> dict[str, Any]:
        """Return the user's settings if they decide all that a row would; empty if the row is applied."""
        keys = (rule.key,) if rule.key else tuple(key for key, _ in rule.settings)
        given = self.overrides.data[SUITE_SECTION]
        return {key: given[key] for key in keys} if keys and all(key in given for key in keys) else {}

    def _apply(self, rule: FlagRule, flag: Flag) -> None:
        became = rule.becomes
        if rule.settings:
            given = self.overrides.data[SUITE_SECTION]
            settings = {
                key: _read_value(flag) if value is None else value for key, value in rule.settings if key not in given
            }
            self.settings |= {key: (value, flag.text) for key, value in settings.items()}
            became = ", ".join(f"{key}: {format_value(value).strip(chr(34))}" for key, value in settings.items())
        if rule.outcome is Outcome.REPLACED:
            became = f"{flag.name} {rule.becomes}"
            self.remaining += [flag.name, rule.becomes]
        self._row(flag, rule.outcome, became, rule.reason)

    def _row(self, flag: Flag, outcome: Outcome, became: str, reason: str) -> None:
        if outcome is not Outcome.STAYS:
            reason += _doubts(flag)
        self.changes.append(Change(flag.text, outcome, became, reason, flag.line, flag))
        self.remaining += [token.text for token in (*(flag.tokens if outcome.stays else ()), *flag.rest)]

    def _unresolved(self, flag: Flag) -> None:
        names = "; ".join(dict.fromkeys(map(str, flag.unknowns)))
        variable = flag.unknowns[0].name.lstrip("${").rstrip("}")
        is_name = flag.unknowns[0].is_variable and (variable.isidentifier() or variable.isdigit())
        instead = f"--define {variable}=VALUE" if is_name else "a value in its place"
        self._row(flag, Outcome.UNRESOLVED, f"give {instead}", names)

    def add_defaults(self, launch: Launch) -> None:
        """Add what the flags mean by being left out: the algorithm, and the nodes of the launcher."""
        if not self.given.has("--context-parallel-size"):
            reason = "--context-parallel-size is not given: Megatron's default is one rank"
            self.changes.append(Change("context_parallel_size", Outcome.SETTING, "context_parallel_size: 1", reason))
        named = any(map(self.given.has, ("--context-parallel-algo", "--cp-comm-type")))
        if not named and "algorithm" not in {*self.settings, *self.overrides.data[SUITE_SECTION]}:
            algorithm, flag = read_algorithm("algorithm", self.given.default_algorithm), "--cp-comm-type"
            reason = (
                f"neither --context-parallel-algo nor --cp-comm-type is given: Megatron's default is the {algorithm}"
            )
            if self.given.default_algorithm == LLM_ALGORITHM:
                flag, known = "--context-parallel-algo", next(name for name in self.given.values if name in LLM_FLAGS)
                reason = f"no flag names one, and {known} is of MindSpeed-LLM, whose default is {LLM_ALGORITHM}"
            self.settings["algorithm"] = (algorithm, f"the default of {flag}")
            self.changes.append(Change("algorithm", Outcome.SETTING, f"algorithm: {algorithm}", reason))
        if "nodes" not in self.overrides.data[SUITE_SECTION]:
            change = nodes_change(launch.launcher, self.given)
            if change is not None:
                self.changes.append(change)
                if change.outcome is Outcome.STAYS_AS_SETTING:
                    self.settings["nodes"] = (int(change.became.split()[-1]), change.flag)

    def add_flags(self, output: str, entry: Token | None) -> None:
        """Add the flags that planned attention needs, and tell what the training script needs itself."""
        for added in ADDED_FLAGS:
            if self.given.has(added.words[0]) or not (added.when is None or added.when.holds(self.given)):
                continue
            words = [output if word == SUITE_FILE else word for word in added.words]
            by_hand = added.by_hand
            if added.words == SPEC_WORDS and not by_hand and entry is not None and not _takes_spec(entry):
                by_hand = (
                    f"add it to the flags if {entry.text} builds its layers from args.spec, as pretrain_gpt.py does; "
                    "if it makes a spec of its own, call mindspeed_cp.megatron.install there (docs/megatron.md, A "
                    "script with a batch, loss and layers of your own)"
                )
            if by_hand:
                self.changes.append(Change(" ".join(words), Outcome.BY_HAND, by_hand, added.reason))
            else:
                self.changes.append(Change(" ".join(words), Outcome.ADDED, "", added.reason))
                self.added += words
        script = "the training script" if entry is None else entry.text
        self.changes.append(Change(script, Outcome.BY_HAND, _SCRIPT_LINES, _SCRIPT_REASON))

    def suite(self, name: str | None) -> SuiteSettings:
        """Return the settings, checked; an error names the flag that gave the value."""
        values = {"context_parallel_size": (1, "the default of --context-parallel-size")} | self.settings
        for key in self.overrides.data[SUITE_SECTION]:
            values.pop(key, None)
        section = {key: value for key, (value, _) in values.items()} | self.overrides.data[SUITE_SECTION]
        place = "" if name is None else f"{name}: "
        lines: dict[str, int | str] = {f"{SUITE_SECTION}.{key}": f"{place}{flag}" for key, (_, flag) in values.items()}
        file = SettingsFile(name or "flags", {SUITE_SECTION: section}, {**self.overrides.lines, **lines})
        return with_file_location(file, f"{SUITE_SECTION}.", lambda: SuiteSettings(**section))


def _takes_spec(entry: Token) -> bool:
    """Return True if a training script is known to build its layers from --spec."""
    return PurePosixPath(entry.text).name in SCRIPTS_WITH_SPEC


def _doubts(flag: Flag) -> str:
    """Return the words that tell that a value may be another one when the script runs."""
    default = next((token.default_line for token in flag.tokens if token.default_line is not None), None)
    if default is not None:
        return f"; the value is the default of line {default}, unless the environment has another"
    file = next((token.file_line for token in flag.tokens if token.file_line is not None), None)
    return "" if file is None else f"; line {file} runs what is not read here: see that it sets no other value"


def _override_file(overrides: Iterable[str]) -> SettingsFile:
    """Return the overrides of the section, whose keys may lack the section's name."""
    prefix = f"{SUITE_SECTION}."
    named = (text if text.strip().startswith(prefix) else prefix + text for text in overrides)
    file = apply_overrides(SettingsFile("--set", {SUITE_SECTION: {}}), named)
    if "context_parallel_size" in file.data[SUITE_SECTION]:
        raise ConfigError("--set context_parallel_size: Megatron needs the same number; change --context-parallel-size")
    if file.data[SUITE_SECTION].get("algorithm") == AUTO or "candidates" in file.data[SUITE_SECTION]:
        raise ConfigError(
            "--set: algorithm auto and candidates are not in Megatron's own scripts; name the algorithm that "
            "`mindspeed-cp simulate --choose` finds for the lengths of your documents"
        )
    return file


def _section(suite: SuiteSettings) -> dict[str, Any]:
    """Return the given keys of the settings, the ranks and the algorithm first."""
    given = {key: value for key, value in suite.model_dump(exclude_unset=True).items() if key not in suite.options}
    first = ("context_parallel_size", "nodes", "algorithm")
    ordered = {key: given[key] for key in first if key in given}
    return ordered | suite.options | {key: value for key, value in given.items() if key not in first}


def _read_value(flag: Flag) -> Any:
    """Return the value of a flag: a whole number, a list of these, or text."""
    values = [int(text) if _is_number(text) else text for text in flag.values]
    return values if ARITIES[flag.name] != 1 else values[0]


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 19
