"""The launch in a script: the command that starts the training, and what it hands to it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_cp.convert.command_line import Token
from mindspeed_cp.convert.shell import Piece, ScriptCommand, read_script
from mindspeed_cp.convert.shell.words import Field, field_text
from mindspeed_cp.errors import ConfigError

MAX_SCRIPT_BYTES = 2**17  # a launch script has some kilobytes

_PRINTERS = frozenset({"echo", "printf", ":", "cat"})
_SHELLS = frozenset({"sh", "bash", "zsh"})
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True)
class Launch:
    """Words of the command that starts the training.

    Attributes:
        launcher: words up to the training script, as of torchrun; empty without a script.
        entry: the word of the training script or module; None if none is seen.
        tokens: words behind it.
        name: of the script, for errors and comments; None without one.
        line: 1-based line of the command.
    """

    launcher: tuple[Token, ...]
    entry: Token | None
    tokens: tuple[Token, ...]
    name: str | None = None
    line: int | None = None


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
        ConfigError: the script cannot be parsed, or none or several of its commands have such flags.
    """
    launches: list[Launch] = []
    line_ends = [match.start() for match in re.finditer("\n", source)]
    for command in read_script(source, name, defined):
        fields = _launched_fields(command)
        if any(field_text(entry).partition("=")[0] in flags for entry in fields):
            tokens = [Token.from_field(entry, bisect_left(line_ends, _start(entry)) + 1) for entry in fields]
            launches.append(_make_launch(tokens, name, command.line))
    if line is not None:
        launches = [launch for launch in launches if launch.line == line]
    if not launches:
        where = "" if line is None else f" in a command at line {line}"
        raise ConfigError(
            f"{name}: no flag of context parallelism{where}, such as --context-parallel-size; give the script that "
            "starts the training, or flags behind --"
        )
    if len(launches) > 1 and len({tuple(token.text for token in launch.tokens) for launch in launches}) > 1:
        lines = ", ".join(str(launch.line) for launch in launches)
        raise ConfigError(
            f"{name}: several commands have flags of context parallelism, at lines {lines}; choose with --line"
        )
    return launches[0]


def _launched_fields(command: ScriptCommand) -> Sequence[Field]:
    """Return the words of a command; those of a text that it hands to a shell are split."""
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
    return [part for entry in texts for part in _split(entry)] if texts else fields


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


def _make_launch(tokens: list[Token], name: str, line: int) -> Launch:
    entry = next((number for number, token in enumerate(tokens) if token.text.endswith(".py")), None)
    if entry is None:
        modules = (number + 1 for number, token in enumerate(tokens[:-1]) if token.text == "-m")
        entry = next((number for number in modules if not tokens[number].text.startswith("torch.")), None)
    if entry is not None:
        return Launch(tuple(tokens[:entry]), tokens[entry], tuple(tokens[entry + 1 :]), name, line)
    start = next((number for number, token in enumerate(tokens) if token.is_flag), len(tokens))
    return Launch(tuple(tokens[:start]), None, tuple(tokens[start:]), name, line)
