"""The commands of a script with the values that its variables have where they stand.

Nothing is run. A variable whose value depends on a branch, a command or the environment has no value here but the
cause why, which stays in every word that uses it. The same holds in a loop and in a function for variables that other
commands may have set when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mindspeed_cp.convert.shell.branches import BLANK, NOWHERE, Choice, Value, merge_values
from mindspeed_cp.convert.shell.changes import FILE_READERS, Changes, changes_of, sets_positional
from mindspeed_cp.convert.shell.expand import Expander
from mindspeed_cp.convert.shell.parser import parse_script
from mindspeed_cp.convert.shell.words import Assignment, Branch, Command, Field, Piece, Statement, Unknown, field_text
from mindspeed_cp.errors import ConfigError

MAX_VISITS = 1_000_000  # of statements, for what loops and functions change; a launch script has some hundreds


_LOOP_ENDS = frozenset({"break", "continue"})


@dataclass(frozen=True)
class ScriptCommand:
    """A simple command after expansion.

    Attributes:
        fields: its words.
        start: offset in the script.
        line: 1-based line.
    """

    fields: tuple[Field, ...]
    start: int
    line: int


def read_script(source: str, name: str, defined: Mapping[str, str] | None = None) -> Iterator[ScriptCommand]:
    """Yield the commands of a script, with their words expanded.

    Args:
        source: text of the script.
        name: its name in errors.
        defined: values of variables, which take precedence over those that the script gives.

    Raises:
        ConfigError: a quote or a bracket is not closed, or the words become very many.
    """
    reader = _Evaluator(source, name, defined or {}, parse_script(source, name))
    for number, statement in enumerate(reader.statements):
        if isinstance(statement, Assignment):
            reader.assign(statement)
        elif isinstance(statement, Branch):
            reader.branch(statement, number)
        else:
            yield reader.command(statement)


class _Evaluator(Expander):
    def __init__(self, source: str, name: str, defined: Mapping[str, str], statements: list[Statement]) -> None:
        super().__init__(source, name, defined)
        self.statements = statements
        self.choices: list[Choice] = []
        self.entered: list[tuple[Branch, int, str]] = []  # branches that are open, with the arguments outside of them
        self.functions: dict[str, Changes] = {}  # what a call of each function changes, without what it calls
        self.visits = 0

    def command(self, command: Command) -> ScriptCommand:
        fields = [entry for word in command.words for entry in self.split(word)]
        line = self.line(command.start)
        words = list(map(field_text, fields))
        if words[:1] == ["eval"]:
            self._evaluate(fields[1:], line)
        elif words and words[0] in FILE_READERS:
            self._doubt(line)
        elif words and words[0] in self.functions:
            self._change(self._with_calls(self.functions[words[0]]), f"is set in the function {words[0]}")
        elif sets_positional(tuple(words)):
            self.arguments = f"is what line {line} leaves of the arguments"
        return ScriptCommand(tuple(fields), command.start, line)

    def assign(self, assignment: Assignment) -> None:
        name = assignment.name
        if name in self.defined:
            return
        value: Value
        if assignment.is_array:
            value = [entry for word in assignment.words for entry in self.split(word)]
        else:
            value = self.joined(assignment.words[0])
        old = self.values.get(name)
        if isinstance(old, list) and not isinstance(value, list):  # a text for an array is its first word
            kept = old[0] if assignment.appends and old else ()
            value = [(*kept, *value), *old[1:]]
        elif assignment.appends and old is not None:
            value = [*(old if isinstance(old, list) else [old]), *value] if isinstance(value, list) else (*old, *value)
        self.count(value if not isinstance(value, list) else tuple(piece for entry in value for piece in entry))
        self.set(name, value, self.line(assignment.start))

    def set(self, name: str, value: Value | None, line: int) -> None:
        if self.choices:
            choice = self.choices[-1]
            choice.before.setdefault(name, self.values.get(name))
            choice.lines[name] = line
        super().set(name, value, line)

    def branch(self, branch: Branch, number: int) -> None:
        if branch.border == "enter":
            self.entered.append((branch, number, self.arguments))
            self.choices.append(Choice())
            self._enter(branch, number)
            return
        choice = self.choices[-1]
        for name in choice.before:
            choice.values.setdefault(name, []).append(self.values.get(name))
        self._restore(choice)
        choice.branches += 1
        if branch.border == "leave":
            self.choices.pop()
            for name, values in choice.values.items():
                if not branch.complete or len(values) < choice.branches:
                    values.append(self.values.get(name))  # a branch that leaves it as it is
                self.set(name, self._merged(name, values, choice.lines[name]), choice.lines[name])
            self._leave()

    def _restore(self, choice: Choice) -> None:
        for name, value in choice.before.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value
        choice.before = {}

    def _merged(self, name: str, values: list[Value | None], line: int) -> Value | None:
        """Return the value of a variable after branches that end with these."""
        for value in values:
            self.count(tuple(piece for entry in value for piece in entry) if isinstance(value, list) else value or ())
        return merge_values(name, values, line)

    def _enter(self, branch: Branch, number: int) -> None:
        """Forget what a loop or a function may have set, or what is set behind a function, before it runs."""
        if branch.kind == "function":
            self._change(self._changes(number, len(self.statements)), "is set again behind the function's beginning")
            self.arguments = "is an argument of a function"
        elif branch.kind == "loop":
            changes = self._changes(number, branch.stop, with_locals=True)
            self._change(changes, "is set in a loop")
            if changes.shifts:
                self.arguments = "is what a loop leaves of the arguments"

    def _leave(self) -> None:
        branch, number, arguments = self.entered.pop()
        if branch.kind == "function":
            self.functions[branch.name] = self._changes(number, branch.stop)
            self.arguments = arguments
        elif branch.kind == "loop":
            changes = self._changes(number, branch.stop, with_locals=True)
            if _LOOP_ENDS & changes.calls:
                self._change(changes, "is set in a loop that may end before")

    def _changes(self, start: int, stop: int, with_locals: bool = False) -> Changes:
        self.visits += stop - start
        if self.visits > MAX_VISITS:
            raise ConfigError(
                f"{self.name}: has more loops and functions inside each other than a launch script has; give the flags "
                "behind --"
            )
        return self._with_calls(changes_of(self.statements[start + 1 : stop], with_locals=with_locals))

    def _with_calls(self, changes: Changes) -> Changes:
        """Return changes together with those of the functions that are called."""
        known: set[str] = set()
        names = [*changes.calls]
        total = replace(changes, variables=dict(changes.variables), replaced=set(changes.replaced))
        while names:
            name = names.pop()
            if name in self.functions and name not in known:
                known.add(name)
                called = self.functions[name]
                total.variables |= called.variables
                total.replaced |= called.replaced
                total.glued |= called.glued
                total.texts |= called.texts
                total.runs = called.runs if total.runs is None else total.runs
                names += called.calls
        return total

    def _change(self, changes: Changes, cause: str) -> None:
        """Let variables have an unknown value, or an unknown end where they are just appended to."""
        if changes.runs is not None:
            self._doubt(self.line(changes.runs))
        for name, offset in changes.variables.items():
            if name in self.defined:
                continue
            line = self.line(offset)
            old = self.values.get(name)
            replaced = name in changes.replaced or (isinstance(old, list) and name in changes.texts)
            if _is_unknown(old, name, wholly=replaced):
                continue
            end = Piece(f"${{{name}}}", NOWHERE, (NOWHERE,), Unknown(name, line, cause))
            kept = old if not replaced and old else None
            value: Value
            if isinstance(old, list):
                value = [*(kept or ()), (end,)]
            else:
                blank = () if name in changes.glued or not kept else (BLANK,)
                value = (*(kept or ()), *blank, end)
            self.count(tuple(piece for entry in value for piece in entry) if isinstance(value, list) else value)
            self.set(name, value, line)

    def _doubt(self, line: int) -> None:
        """Mark all values as such that a file may have set anew."""
        for name, value in list(self.values.items()):
            if name not in self.defined:
                marked: Value
                marked = [_doubted(word, line) for word in value] if isinstance(value, list) else _doubted(value, line)
                if marked != value:
                    self.set(name, marked, line)

    def _evaluate(self, fields: list[Field], line: int) -> None:
        """Forget the variables that `eval` sets."""
        if any(piece.unknown for entry in fields for piece in entry):
            self._doubt(line)
        try:
            statements = parse_script(" ".join(map(field_text, fields)), self.name)
        except ConfigError:
            self._doubt(line)
            return
        changes = changes_of(statements, with_locals=True)
        total = self._with_calls(changes)
        if total.runs is not None:
            self._doubt(line)
        if changes.shifts:
            self.arguments = f"is what line {line} leaves of the arguments"
        for name in total.variables:
            if name not in self.defined:
                end = Piece(f"${{{name}}}", NOWHERE, (NOWHERE,), Unknown(name, line, "is set by eval"))
                self.set(name, (end,), line)


def _is_unknown(value: Value | None, name: str, wholly: bool) -> bool:
    """Return True if a value has an unknown end of its own already, or is unknown as a whole."""
    fields = value if isinstance(value, list) else [value or ()]
    last = fields[-1][-1] if fields and fields[-1] else None
    ends = last is not None and last.unknown is not None and last.unknown.name == name
    return ends and (not wholly or sum(map(len, fields)) == 1)


def _doubted(pieces: Field, line: int) -> Field:
    return tuple(replace(piece, before_file=None if piece.unknown else piece.before_file or line) for piece in pieces)
