"""The page of Megatron's arguments, from the table that check_arguments goes by."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_cp.megatron.arguments import ENTRIES, UNCONCERNED_GROUPS, VERSIONS, Entry
from mindspeed_cp.megatron.arguments.entry import write_span

HEAD = """<!-- make docs-tables -->
# Megatron's arguments

Every argument of Megatron's training scripts, and every field of its `TransformerConfig`, that touches attention,
positions, loss or batches, in Megatron {versions}. Names are those of the parsed arguments: `--no-rope-fusion` sets
`apply_rope_fusion`. A span such as "0.16-" stands behind an argument that not all of these versions have.
`check_arguments(get_args())`, which the hooks of [`mindspeed_cp.megatron.pretrain`](megatron.md) call, refuses the
values of the first table before a model is built; `check_model_config` refuses those that reach `TransformerConfig`.
A test reads the parser of the Megatron at hand and fails by name if the table lacks an argument.

Groups of arguments that touch none of these, and are not listed: {groups}.
"""


def page() -> str:
    """Return docs/megatron_arguments.md."""
    versions = ", ".join(".".join(map(str, version)) for version in VERSIONS)
    groups = ", ".join(f"{title} ({about})" for title, about in UNCONCERNED_GROUPS.items())
    refused = "".join(f"| {_name(entry)} | {_cell(entry.reason)} |\n" for entry in _entries("refused"))
    text = HEAD.format(versions=versions, groups=groups)
    text += "\n## Refused\n\n| argument | valid, and why the others are not |\n|---|---|\n" + refused
    for verdict, title in ("used", "Used"), ("harmless", "Harmless"):
        text += f"\n## {title}\n\n| why | arguments |\n|---|---|\n" + _grouped(_entries(verdict))
    return text


def _entries(verdict: str) -> list[Entry]:
    return [entry for entry in ENTRIES if entry.verdict == verdict]


def _grouped(entries: Iterable[Entry]) -> str:
    """Return a row for each reason, with all its arguments."""
    reasons: dict[str, list[Entry]] = {}
    for entry in entries:
        reasons.setdefault(entry.reason, []).append(entry)
    return "".join(f"| {_cell(reason)} | {', '.join(map(_name, group))} |\n" for reason, group in reasons.items())


def _name(entry: Entry) -> str:
    span = write_span(entry.versions) if entry.versions else "other versions"
    return f"`{entry.name}`" + (f" ({span})" if span else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
