"""Conversion of flags, and of a launch script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mindspeed_cp.convert.command_line import word_tokens
from mindspeed_cp.convert.conversion import Conversion
from mindspeed_cp.convert.launch import Launch, find_launch, read_script_file
from mindspeed_cp.convert.rules import ARITIES
from mindspeed_cp.convert.translate import convert_launch
from mindspeed_cp.errors import ConfigError

MAX_WORDS = 20_000  # of a command line


def convert_flags(words: Sequence[str], overrides: Iterable[str] = (), output: str = "suite.yaml") -> Conversion:
    """Convert flags as a training script takes them.

    Args:
        words: flags and their values, each a word.
        overrides: settings `key=value` that take precedence over flags.
        output: path of the settings, for the flag that names it.

    Raises:
        ConfigError: a flag lacks its value or has one that the settings do not take, or none is converted.
    """
    if len(words) > MAX_WORDS:
        raise ConfigError(f"{len(words):,} words are more than a command line has; valid: at most {MAX_WORDS:,}")
    if not any(word.partition("=")[0] in ARITIES for word in words):
        raise ConfigError(
            "no flag of context parallelism among the flags, such as --context-parallel-size; give them behind --"
        )
    return convert_launch(Launch((), None, word_tokens(words)), overrides, output)


def convert_script(
    path: str | Path,
    overrides: Iterable[str] = (),
    output: str = "suite.yaml",
    *,
    defined: Mapping[str, str] | None = None,
    line: int | None = None,
) -> tuple[str, Launch, Conversion]:
    """Convert a launch script, which is read and not run; return its text, its launch, and the conversion.

    Args:
        path: the script.
        overrides: settings `key=value` that take precedence over flags.
        output: path of the settings, for the flag that names it.
        defined: values of variables that the script does not give, or that take precedence.
        line: line of the command to convert, if several have flags of context parallelism.

    Raises:
        ConfigError: the script cannot be read or parsed, it starts no training or several, or as for flags.
    """
    source = read_script_file(path)
    launch = find_launch(source, str(path), ARITIES, defined, line)
    return source, launch, convert_launch(launch, overrides, output)
