"""Entry: one argument of Megatron, the versions that have it, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

#: Versions of Megatron-core, (major, minor), whose arguments were all looked at.
VERSIONS = ((0, 12), (0, 14), (0, 16), (0, 19))

Verdict = Literal["used", "harmless", "refused"]


@dataclass(frozen=True)
class Entry:
    """One argument of Megatron's training scripts, or field of its TransformerConfig.

    Attributes:
        name: as in the parsed arguments.
        versions: those of :data:`VERSIONS` that have it.
        verdict: "used": planned attention, batches or losses read it; "harmless": they need not; "refused": values
            that they would contradict are errors.
        reason: why.
    """

    name: str
    versions: tuple[tuple[int, int], ...]
    verdict: Verdict
    reason: str


def read_entries(verdict: Verdict, texts: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the entries of a table {reason: names}; a name is ``name`` or ``name:span``, see :func:`read_span`."""
    for reason, names in texts.items():
        for word in names.split():
            name, _, span = word.partition(":")
            yield Entry(name, read_span(span), verdict, reason)


def read_span(span: str) -> tuple[tuple[int, int], ...]:
    """Return the versions of "0.14-" (from 0.14 on), "-0.16" (up to 0.16), "0.14-0.16", or "" (all)."""
    if span == "none":
        return ()
    first, _, last = span.partition("-")
    low = _version(first) if first else VERSIONS[0]
    high = _version(last) if last else VERSIONS[-1]
    return tuple(version for version in VERSIONS if low <= version <= high)


def write_span(versions: tuple[tuple[int, int], ...]) -> str:
    """Return the text that :func:`read_span` reads."""
    if not versions or versions == VERSIONS:
        return ""
    first = "" if versions[0] == VERSIONS[0] else ".".join(map(str, versions[0]))
    last = "" if versions[-1] == VERSIONS[-1] else ".".join(map(str, versions[-1]))
    return f"{first}-{last}"


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
