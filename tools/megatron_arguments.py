"""What becomes of each of Megatron's arguments: docs/megatron_arguments.yaml, and the page that is made of it.

    python -m tools.megatron_arguments    # bring the file up to date with the Megatron at hand

The file has each argument of the training scripts, and each field of TransformerConfig, of every listed version:
used (planned attention, batches or losses read it), ignored (they need not) or unsupported (by the rules of
mindspeed_cp.megatron.adaptors.settings; the file has their versions alone). The program writes which arguments the
Megatron at hand has, and lists under `unknown` those that nobody has looked at: move them to a row. A test compares the
file with the Megatron at hand. It needs megatron.training, of a wheel from 0.17 on or of the source tree MEGATRON_LM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "megatron_arguments.yaml"

#: Arguments of this package, which rules of Megatron's arguments are about, too.
OWN_ARGUMENTS = ("cp_plan_documents",)

COMM_TYPE_REASON = "valid: the default, or a name of context_parallel_suite.algorithm, which takes its place"

HEAD = """<!-- make docs-tables -->
# Megatron's arguments

The arguments of Megatron's training scripts, and the fields of its `TransformerConfig`, that planned attention does
not support or reads, in Megatron {versions}. Names are those of the parsed arguments: `--no-rope-fusion` sets
`apply_rope_fusion`. A span such as "0.16-" stands behind an argument that not all of these versions have.

The hooks of [`mindspeed_cp.megatron.pretrain`](megatron.md) call `check_arguments(get_args())`, which refuses the
values of the first table before a model is built. `check_model_config` refuses those that reach `TransformerConfig`.
All other arguments ({others} of them) change nothing here; `docs/megatron_arguments.yaml` lists each with its
reason, and a test fails by name if a new Megatron has an argument that the file lacks.
"""


@dataclass(frozen=True)
class Entry:
    """One argument of Megatron's training scripts, or field of its TransformerConfig.

    Attributes:
        name: as in the parsed arguments.
        versions: those of the file that have it, such as "0.16".
        verdict: "used", "ignored" or "unsupported".
        reason: why.
    """

    name: str
    versions: tuple[str, ...]
    verdict: str
    reason: str


@cache
def table() -> dict[str, Any]:
    """Return the contents of the file; `versions` is a list."""
    data: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))
    return data


@cache
def entries() -> tuple[Entry, ...]:
    """Return every argument, in the order used, ignored, unsupported, with the reasons of the rules."""
    from mindspeed_cp.megatron.adaptors.settings import ALL_RULES

    problems: dict[str, list[str]] = {"cp_comm_type": [COMM_TYPE_REASON]}
    for rule in ALL_RULES:
        if rule.setting not in OWN_ARGUMENTS:
            case = f"with {rule.when}, " if rule.when else ""
            problems.setdefault(rule.setting, []).append(f"{case}valid: {rule.valid} ({rule.instead})")
    rows = list(_rows(table()))
    partly = [
        replace(row, reason="; in some models ".join([row.reason, *problems.pop(row.name, [])]))
        for row in rows
        if row.verdict != "unsupported"
    ]
    spans = {row.name: row.versions for row in rows if row.verdict == "unsupported"}
    every = tuple(table()["versions"])
    return *partly, *(
        Entry(name, spans.get(name, every), "unsupported", "; ".join(dict.fromkeys(texts)))
        for name, texts in problems.items()
    )


def entry_of(name: str) -> Entry | None:
    """Return the entry of an argument or field; None if the table has none."""
    return next((entry for entry in entries() if entry.name == name), None)


def _rows(data: dict[str, Any]) -> Iterator[Entry]:
    """Yield what the file says, with its own reasons."""
    rows = [(verdict, row["reason"], row["arguments"]) for verdict in ("used", "ignored") for row in data[verdict]]
    for verdict, reason, words in (*rows, ("unsupported", "", data["unsupported"])):
        for word in words.split():
            name, _, span = word.partition(":")
            yield Entry(name, read_span(span, data["versions"]), verdict, reason)


def read_span(span: str, versions: list[str]) -> tuple[str, ...]:
    """Return the versions of "0.16-" (from 0.16 on), "-0.16" (up to 0.16), "0.16-0.16", "" (all) or "none"."""
    if span == "none":
        return ()
    first, _, last = span.partition("-")
    start = versions.index(first) if first else 0
    return tuple(versions[start : versions.index(last) + 1 if last else None])


def write_span(own: tuple[str, ...], versions: list[str]) -> str:
    """Return the text that :func:`read_span` reads."""
    if not own:
        return "none"
    first, last = "" if own[0] == versions[0] else own[0], "" if own[-1] == versions[-1] else own[-1]
    return f"{first}-{last}" if first or last else ""


def arguments_at_hand() -> dict[str, tuple[str, list[str]]]:
    """Return the arguments of the Megatron at hand: name -> (title of its group, flags).

    Raises:
        ImportError: megatron.training cannot be imported; says why.
    """
    script = ROOT / "tools" / "megatron_parser.py"
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    if done.returncode == 3:
        raise ImportError(last)
    assert done.returncode == 0, f"{last}\n{done.stderr}"
    groups: dict[str, tuple[str, list[str]]] = json.loads(last)
    return groups


def config_fields() -> set[str]:
    """Return the fields of the TransformerConfig at hand."""
    from mindspeed_cp.megatron import megatron_imports

    with megatron_imports():
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return {field.name for kind in (TransformerConfig, MLATransformerConfig) for field in fields(kind)}


def updated(data: dict[str, Any], version: str, parser: dict[str, tuple[str, list[str]]], config: set[str]) -> None:
    """Write into the contents of the file which arguments a version has, and which of them have no row.

    Args:
        data: contents of the file, changed in place.
        version: one of its versions.
        parser: result of :func:`arguments_at_hand`.
        config: result of :func:`config_fields`.
    """
    versions, present = data["versions"], {*parser, *config}

    def words(text: str) -> str:
        listed = []
        for name, _, span in (word.partition(":") for word in text.split()):
            own = {*read_span(span, versions)} - {version} | ({version} if name in present else set())
            span = write_span(tuple(known for known in versions if known in own), versions)
            listed.append(f"{name}:{span}" if span else name)
        return " ".join(listed)

    for verdict in ("used", "ignored"):
        for row in data[verdict]:
            row["arguments"] = words(row["arguments"])
    data["unsupported"] = words(data["unsupported"])
    concerned = {name for name, (group, _) in parser.items() if group not in data["ignored_groups"]}
    data["unknown"] = " ".join(sorted({*concerned, *config} - {entry.name for entry in entries()}))


def text_of(data: dict[str, Any]) -> str:
    """Return the text of the file."""
    head = "# python -m tools.megatron_arguments\n"
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=116)


def page() -> str:
    """Return docs/megatron_arguments.md."""
    others = sum(entry.verdict == "ignored" for entry in entries())
    versions = ", ".join(table()["versions"])
    text = HEAD.format(versions=versions, others=others)
    for verdict, title, head in (
        ("unsupported", "Unsupported", "| arguments | valid, and why the others are not |\n|---|---|\n"),
        ("used", "Read", "| arguments | what for |\n|---|---|\n"),
    ):
        text += f"\n## {title}\n\n{head}" + _grouped(_entries(verdict))
    return text


def _entries(verdict: str) -> list[Entry]:
    return [entry for entry in entries() if entry.verdict == verdict]


def _grouped(rows: list[Entry]) -> str:
    """Return a row for each reason, with all its arguments."""
    reasons: dict[str, list[str]] = {}
    for entry in rows:
        reasons.setdefault(entry.reason, []).append(_name(entry))
    return "".join(f"| {', '.join(names)} | {_cell(reason)} |\n" for reason, names in reasons.items())


def _name(entry: Entry) -> str:
    span = write_span(entry.versions, table()["versions"])
    return f"`{entry.name}`" + (f" ({'other versions' if span == 'none' else span})" if span else "")


def _cell(text: str) -> str:
    return text.removeprefix("valid: ").replace("|", "\\|")


def main() -> int:
    """Bring the file up to date with the Megatron at hand; exit code 1 if arguments have no row."""
    from mindspeed_cp.megatron.patches.imports import parse_version

    parser, data = arguments_at_hand(), table()
    from megatron.core import __version__

    version = ".".join(map(str, parse_version(__version__)))
    if version not in data["versions"]:
        print(f"megatron-core is {__version__}; valid: {', '.join(data['versions'])}, the `versions` of {FILE}")
        return 2
    updated(data, version, parser, config_fields())
    FILE.write_text(text_of(data), "utf-8")
    print(f"{FILE}: unknown arguments: {data['unknown'] or 'none'}")
    return 1 if data["unknown"] else 0


if __name__ == "__main__":
    sys.exit(main())
