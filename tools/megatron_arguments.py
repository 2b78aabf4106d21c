"""The page of Megatron's arguments, from the table that check_arguments goes by."""

from __future__ import annotations

from mindspeed_cp.megatron.arguments import ENTRIES, VERSIONS, Entry
from mindspeed_cp.megatron.arguments.entry import write_span

HEAD = """<!-- make docs-tables -->
# Megatron's arguments

The arguments of Megatron's training scripts, and the fields of its `TransformerConfig`, that planned attention refuses
or reads, in Megatron {versions}. Names are those of the parsed arguments: `--no-rope-fusion` sets
`apply_rope_fusion`. A span such as "0.16-" stands behind an argument that not all of these versions have.

The hooks of [`mindspeed_cp.megatron.pretrain`](megatron.md) call `check_arguments(get_args())`, which refuses the
values of the first table before a model is built. `check_model_config` refuses those that reach `TransformerConfig`.
All other arguments ({others} of them) change nothing here; the table of `mindspeed_cp.megatron.arguments` lists each
with its reason, and a test fails by name if a new Megatron has an argument that the table lacks.
"""


def page() -> str:
    """Return docs/megatron_arguments.md."""
    others = sum(entry.verdict not in ("refused", "used") for entry in ENTRIES)
    versions = ", ".join(".".join(map(str, version)) for version in VERSIONS)
    text = HEAD.format(versions=versions, others=others)
    for verdict, title, head in (
        ("refused", "Refused", "| arguments | valid, and why the others are not |\n|---|---|\n"),
        ("used", "Read", "| arguments | what for |\n|---|---|\n"),
    ):
        text += f"\n## {title}\n\n{head}" + _grouped(_entries(verdict))
    return text


def _entries(verdict: str) -> list[Entry]:
    return [entry for entry in ENTRIES if entry.verdict == verdict]


def _grouped(entries: list[Entry]) -> str:
    """Return a row for each reason, with all its arguments."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        reasons.setdefault(entry.reason, []).append(_name(entry))
    return "".join(f"| {', '.join(names)} | {_cell(reason)} |\n" for reason, names in reasons.items())


def _name(entry: Entry) -> str:
    span = write_span(entry.versions) if entry.versions else "other versions"
    return f"`{entry.name}`" + (f" ({span})" if span else "")


def _cell(text: str) -> str:
    return text.removeprefix("valid: ").replace("|", "\\|")
