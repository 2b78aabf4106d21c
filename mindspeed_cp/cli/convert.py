"""`mindspeed-cp convert`: flags of Megatron and MindSpeed to settings of this package."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mindspeed_cp.cli.options import AsJson
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.convert import Conversion

DEFAULT_OUTPUT = "suite.yaml"
_LABELS = {"refused": "instead", "unresolved": "instead", "by hand": "to do"}


def convert(
    source: Annotated[
        list[str] | None,
        typer.Argument(help="A launch script, which is read and not run; or flags behind --.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the settings to this file. Default: to the standard output.", show_default=False),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(help="Also write the launch script with the new flags to this file.", show_default=False),
    ] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Give a variable of the script a value. Repeatable.", show_default=False
        ),
    ] = None,
    line: Annotated[
        int | None,
        typer.Option(min=1, help="Line of the command, if several start a training.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Give a setting in place of what a flag says, such as algorithm=direct. Repeatable.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Turn Megatron's and MindSpeed's context-parallel flags into settings and the flags that remain, and say why.

    mindspeed-cp convert launch.sh --output suite.yaml --script launch_cp.sh

    mindspeed-cp convert -- --context-parallel-size 8 --context-parallel-algo ulysses_cp_algo
    """
    from mindspeed_cp.convert import convert_flags, convert_script

    words = source or []
    is_script = len(words) == 1 and not words[0].startswith("--")
    if not words or not (is_script or words[0].startswith("--")):
        raise ConfigError(
            "give a launch script, or flags behind --, as in mindspeed-cp convert -- --context-parallel-size 8"
        )
    path = str(output or DEFAULT_OUTPUT)
    _refuse_one_file_for_two([("the launch script", words[0])] if is_script else [], output, script)
    if not is_script:
        for option, value in (("--script", script), ("--define", define), ("--line", line)):
            if value:
                raise ConfigError(f"{option}: needs a launch script in place of flags")
        conversion = convert_flags(words, overrides or (), path)
        new_script = None
    else:
        defined = _read_defined(define or [])
        text, launch, conversion = convert_script(words[0], overrides or (), path, defined=defined, line=line)
        new_script = None
        if script is not None and not conversion.problems:
            from mindspeed_cp.convert.rewrite import rewrite_script

            new_script = rewrite_script(text, launch, conversion, defined)
    written = []
    if output is not None and not conversion.problems:
        header = f"# Made from {words[0]} by mindspeed-cp convert.\n" if is_script else ""
        output.write_text(header + conversion.yaml(), "utf-8")
        written.append(str(output))
    if script is not None and new_script is not None:
        script.write_text(new_script, "utf-8")
        script.chmod(Path(words[0]).stat().st_mode & 0o777)
        written.append(str(script))
    if as_json:
        print(json.dumps({**conversion.as_dict(), "written": written}))
    else:
        _print(conversion, written, with_settings=output is None)
    return 1 if conversion.problems else 0


def _refuse_one_file_for_two(read: list[tuple[str, str]], output: Path | None, script: Path | None) -> None:
    """Raise ConfigError if a file that is written is one that is read, or written twice."""
    written = [(option, str(path)) for option, path in (("--output", output), ("--script", script)) if path is not None]
    names: dict[Path, str] = {}
    for name, path in (*read, *written):
        place = Path(path).resolve()
        if place in names:
            raise ConfigError(f"{name} {path}: is {names[place]}, too; give another file")
        names[place] = name


def _read_defined(texts: list[str]) -> dict[str, str]:
    defined = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not (name.isidentifier() or name.isdigit()):
            raise ConfigError(f"--define {text!r}: must be NAME=VALUE with a variable of the script, for example CP=8")
        defined[name] = value
    return defined


def _print(conversion: Conversion, written: list[str], *, with_settings: bool) -> None:
    """Print the rows, the remaining flags and the settings; with the settings, all else is a comment of theirs."""
    from mindspeed_cp.report.text import output_width

    prefix = "# " if with_settings else ""
    width = output_width() - len(prefix)
    lines: list[str] = []
    for change in conversion.changes:
        where = f"  (line {change.line})" if change.line else ""
        lines += _wrapped(f"{change.outcome.value}: {change.flag}{where}", width, "", "    ")
        if change.became:
            label = _LABELS.get(change.outcome.value, "becomes")
            lines += _wrapped(f"{label}: {change.became}", width, "    ", "        ")
        lines += _wrapped(change.reason, width, "    ", "    ")
    lines += [part for note in conversion.notes for part in _wrapped(f"note: {note}", width, "", "    ")]
    if conversion.problems:
        count = len(conversion.problems)
        lines += _wrapped(
            f"{count} flag{'s are' if count > 1 else ' is'} refused or unresolved: no settings are written",
            width,
            "",
            "",
        )
    else:
        lines += ["remaining flags:", *(f"    {text}" for text in _flag_lines(conversion.flags))]
    lines += [f"written: {path}" for path in written]
    print("\n".join((prefix + text).rstrip() for text in lines))
    if with_settings and not conversion.problems:
        print(conversion.yaml(), end="")


def _wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    text = " ".join(text.split())
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def _flag_lines(words: tuple[str, ...]) -> list[str]:
    """Return one line for each flag with its values, as a shell takes them."""
    lines: list[list[str]] = []
    for word in words:
        shown = word if "$" in word or "`" in word else shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append([shown])
        else:
            lines[-1].append(shown)
    return [" ".join(line) + (" \\" if number < len(lines) - 1 else "") for number, line in enumerate(lines)]
