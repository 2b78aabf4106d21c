"""The launch in a script: the command that starts the training, and what it hands to it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_cp.convert.command_line import Token
from mindspeed_cp.convert.shell import Piece, ScriptCommand, Unknown, read_script
from mindspeed_cp.convert.shell.words import Field, field_text
from mindspeed_cp.errors import ConfigError

MAX_SCRIPT_BYTES = 2**17  # a launch script has some kilobytes

_PRINTERS = frozenset({"echo", "printf", ":", "cat"})
_SHELLS = frozenset({"sh", "bash", "zsh"})
_BLANKS = re.compile(r"\s+")
_REFERENCE = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$-])|\$\{(\w+)\}|\$\{[^}]*\}?|\$\([^)]*\)?|`[^`]*`?", re.ASCII)
_MODULE_FLAGS = ("-m", "--module")
#: Programs that take a training script or, behind -m, a module.
_LAUNCHERS = frozenset({"torchrun", "msrun", "accelerate", "deepspeed", "ascendspeed", "mindspeed"})


@dataclass(frozen=True)
class Launch:
    """Words of the command that starts the training.

    Attributes:
        launcher: words up to the training script, as of torchrun; empty without a script.
        entry: the word of the training script or module; None if none is seen.
        tokens: words behind it.
        name: of the script, for errors and comments; None without one.
        line: 1-based line of the command.
        number: the command's number among those of the script.
    """

    launcher: tuple[Token, ...]
    entry: Token | None
    tokens: tuple[Token, ...]
    name: str | None = None
    line: int | None = None
    number: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """Words behind the training script."""
        return tuple(token.text for token in self.tokens)


def read_script_file(path: str | Path) -> str:
    """Return the text of a script; raise ConfigError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte, or no UTF-8
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None)
        raise ConfigError(
            f"{path}: cannot be read: {reason or error}; give a launch script, or flags behind --"
        ) from None
    if len(content) > MAX_SCRIPT_BYTES:
        raise ConfigError(f"{path}: is larger than any launch script, {MAX_SCRIPT_BYTES:,} bytes; give flags behind --")
    if "\0" in text:
        raise ConfigError(f"{path}: is no text; give a launch script, or flags behind --")
    return text.replace("\r\n", "\n")


def find_launch(
    source: str,
    name: str,
    flags: Container[str],
    defined: Mapping[str, str] | None = None,
    line: int | None = None,
) -> Launch:
    """Return the command of a script that has flags to convert.

    Args:
        source: text of the script.
        name: its name, for errors.
        flags: names of the flags that are converted.
        defined: values of variables that the script does not give.
        line: line of the command, where several commands have such flags.

    Raises:
        ConfigError: the script cannot be parsed, none or several of its commands have such flags, or they stand before
            the training script.
    """
    launches = find_launches(source, name, flags, defined)
    if line is not None:
        launches = [launch for launch in launches if launch.line == line]
    if not launches:
        where = "" if line is None else f" in a command at line {line}"
        raise ConfigError(
            f"{name}: no flag of context parallelism{where}, such as --context-parallel-size; give the script that "
            "starts the training, or flags behind --"
        )
    if len({launch.words for launch in launches}) > 1:
        lines = ", ".join(str(launch.line) for launch in launches)
        raise ConfigError(
            f"{name}: several commands have flags of context parallelism, at lines {lines}; choose with --line"
        )
    launch = launches[0]
    early = next((token for token in launch.launcher if launch.entry and token.text.partition("=")[0] in flags), None)
    if early is not None and launch.entry is not None:
        raise ConfigError(
            f"{name}:{launch.line}: {early.text} stands before the training script, which seems to be "
            f"{launch.entry.text}, and would not be converted; give the flags behind --"
        )
    return launch


def find_launches(
    source: str, name: str, flags: Container[str], defined: Mapping[str, str] | None = None
) -> list[Launch]:
    """Return all commands of a script that have flags to convert; arguments as for :func:`find_launch`."""
    launches: list[Launch] = []
    line_ends = [match.start() for match in re.finditer("\n", source)]
    for number, command in enumerate(read_script(source, name, defined)):
        fields = _launched_fields(command, defined or {})
        if any(field_text(entry).partition("=")[0] in flags for entry in fields):
            tokens = [Token.from_field(entry, bisect_left(line_ends, _start(entry)) + 1) for entry in fields]
            launches.append(_make_launch(tokens, name, command.line, number))
    return launches


def _launched_fields(command: ScriptCommand, defined: Mapping[str, str]) -> Sequence[Field]:
    """Return the words of a command; those of a text that it hands to a shell are split, and what that shell expands
    is not known."""
    fields = command.fields
    words = [field_text(entry) for entry in fields]
    if not words or words[0] in _PRINTERS:
        return ()
    texts = [
        entry
        for shell, option, entry in zip(words, words[1:], fields[2:], strict=False)
        if Path(shell).name in _SHELLS and option.startswith("-") and option.endswith("c")
    ]
    if words[0] == "eval":
        texts = list(fields[1:])
    if not texts:
        return fields
    return [_expanded_later(part, defined, command.line) for entry in texts for part in _split(entry)]


def _expanded_later(pieces: Field, defined: Mapping[str, str], line: int) -> Field:
    """Return a word of a text for another shell: what that shell expands is not known, unless the user gave it."""
    return tuple(part for piece in pieces for part in _references(piece, defined, line))


def _references(piece: Piece, defined: Mapping[str, str], line: int) -> list[Piece]:
    if piece.unknown is not None:
        return [piece]
    parts: list[Piece] = []
    position = 0
    for match in _REFERENCE.finditer(piece.text):
        if match.start() > position:
            parts.append(piece.part(position, match.start()))
        name = match[1] or match[2] or ""
        if name in defined:
            parts.append(replace(piece.part(match.start(), match.end()), text=defined[name]))
        else:
            unknown = Unknown(name or match[0], line, "is read by the shell that the command starts")
            parts.append(replace(piece.part(match.start(), match.end()), unknown=unknown))
        position = match.end()
    return [*parts, *([piece.part(position, len(piece.text))] if position < len(piece.text) else [])]


def _split(pieces: Field) -> list[Field]:
    """Split a word at blanks, as a shell does that reads it as a command."""
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        position = 0
        for blank in _BLANKS.finditer(piece.text) if piece.unknown is None else ():
            if blank.start() > position:
                parts[-1].append(piece.part(position, blank.start()))
            parts.append([])
            position = blank.end()
        if position < len(piece.text):
            parts[-1].append(piece.part(position, len(piece.text)) if piece.unknown is None else piece)
    return [tuple(part) for part in parts if part]


def _start(pieces: Field) -> int:
    """Return the offset at which a word stands: that of the innermost text that is in the script."""
    return next((site[0] for piece in pieces[:1] for site in piece.sites if site != (0, 0)), 0)


def _make_launch(tokens: list[Token], name: str, line: int, number: int) -> Launch:
    entry = _entry(tokens)
    if entry is not None:
        return Launch(tuple(tokens[:entry]), tokens[entry], tuple(tokens[entry + 1 :]), name, line, number)
    start = next((position for position, token in enumerate(tokens) if token.is_flag), len(tokens))
    return Launch(tuple(tokens[:start]), None, tuple(tokens[start:]), name, line, number)


def _entry(tokens: Sequence[Token]) -> int | None:
    """Return the position of the training script (.py) or module (-m), whichever comes first; None without."""
    runs_python = False
    for position, token in enumerate(tokens):
        is_module = token.text in _MODULE_FLAGS and position + 1 < len(tokens)
        if is_module and runs_python and not tokens[position + 1].text.startswith("torch."):
            return position + 1
        if token.text.endswith(".py") and not token.is_flag:
            return position
        program = Path(token.text).name
        runs_python = runs_python or program.startswith("python") or program in _LAUNCHERS or bool(token.unknowns)
    return None
