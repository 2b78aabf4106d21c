"""`mindspeed-cp convert`: flags of Megatron and MindSpeed to settings of this package."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mindspeed_cp.cli.options import AsJson
from mindspeed_cp.errors import ConfigError, files_at_hand

if TYPE_CHECKING:
    from mindspeed_cp.convert import Conversion

_LABELS = {"refused": "instead", "by hand": "to do", "unknown": "to do", "next": "to do"}


def convert(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            help="A launch script with its arguments, which is run with recorders in place of programs; or flags "
            "behind --."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the settings to this file. Default: to the standard output.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable of the script's environment; NAME alone: with its value here. Repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Turn Megatron's and MindSpeed's context-parallel flags into settings and the flags that remain, and say why.

    mindspeed-cp convert launch.sh --output suite.yaml

    mindspeed-cp convert -- --context-parallel-size 8 --context-parallel-algo ulysses_cp_algo

    Exit code 0: the printed flags and settings are complete. 1: a flag is refused, and nothing is written. 2: bad
    input, or no training with PyTorch. 3: settings are written, and rows "by hand" or "unknown" come first.
    """
    from mindspeed_cp.convert import convert_flags, convert_script
    from mindspeed_cp.report.files import check_output_path

    words = source or []
    is_script = bool(words) and not words[0].startswith("--")
    if not words:
        raise ConfigError(
            "give a launch script, or flags behind --, as in mindspeed-cp convert -- --context-parallel-size 8"
        )
    if is_script and output is not None and output.resolve() == Path(words[0]).resolve():
        raise ConfigError(f"--output {output}: is the launch script, too; give another file")
    if output is not None:
        check_output_path("--output", output, (".yaml", ".yml"))
    path, started, header = str(output or "suite.yaml"), "", ""
    if is_script:
        environment = dict(map(_read_variable, env or []))
        launch, conversion = convert_script(words[0], words[1:], path, environment)
        started = " ".join((*launch.launcher, launch.entry or ""))
        header = f"# Made from {words[0]} by mindspeed-cp convert.\n"
    elif env:
        raise ConfigError("--env: needs a launch script in place of flags")
    else:
        conversion = convert_flags(words, path)
    written = []
    if output is not None and conversion.settings is not None:
        output.write_text(header + conversion.yaml(), "utf-8")
        written.append(str(output))
    if as_json:
        print(json.dumps({**conversion.as_dict(), "recorded": started, "written": written}))
    else:
        _print(conversion, started, written, with_settings=output is None)
    return conversion.exit_code


def _read_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not (equals or name in os.environ):
        raise ConfigError(f"--env {text!r}: must be NAME=VALUE, for example CP=8, or the NAME of a variable here")
    return name, value if equals else os.environ[name]


def _print(conversion: Conversion, started: str, written: list[str], *, with_settings: bool) -> None:
    """Print the rows, the remaining flags and the settings; with the settings, all else is a comment of theirs."""
    from mindspeed_cp.report.text import output_width

    prefix = "# " if with_settings else ""

    def show(text: str, indent: int = 0) -> None:
        words, spaces = files_at_hand(text).split(), prefix + " " * indent
        print(
            textwrap.fill(
                " ".join(words), output_width(), initial_indent=spaces, subsequent_indent=spaces + "    ",
                break_long_words=False, break_on_hyphens=False,
            )
        )  # fmt: skip

    if started:
        show(f"recorded: {started}")
    for change in conversion.changes:
        show(f"{change.outcome.value}: {change.flag}")
        if change.became:
            show(f"{_LABELS.get(change.outcome.value, 'becomes')}: {change.became}", 4)
        show(change.reason, 4)
    for note in conversion.notes:
        show(f"note: {note}")
    if conversion.refused:
        count = len(conversion.refused)
        show(f"{count} row{'s are' if count > 1 else ' is'} refused: no settings are written")
    else:
        new_line = f" \\\n{prefix}    "
        words = [(new_line if word.startswith("--") else " ") + shlex.quote(word) for word in conversion.flags]
        print(f"{prefix}remaining flags:" + "".join(words).removeprefix(" \\"))
    for file in written:
        print(f"{prefix}written: {file}")
    if with_settings and conversion.settings is not None:
        print(conversion.yaml(), end="")
