"""Remarks on words of a launch that are not known before its script runs."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_cp.convert.launch import Launch
from mindspeed_cp.convert.rules import CONDITION_FLAGS, RULES, Outcome
from mindspeed_cp.convert.shell import Piece, Unknown
from mindspeed_cp.errors import ConfigError, shortened

_SHOWN = 60  # letters of a text in a remark
#: Flags that a conversion changes, or that decide what becomes of others.
_DECIDING = CONDITION_FLAGS | {rule.flag for rule in RULES if rule.outcome is not Outcome.STAYS}


def unknown_notes(launch: Launch) -> tuple[str, ...]:
    """Return remarks on words that may hold flags and are not known.

    Raises:
        ConfigError: a branch of the script gives a flag that is converted.
    """
    _refuse_branches(launch)
    notes: dict[str, None] = {}
    names: dict[str, None] = {}
    for piece, unknown in _unknowns(launch):
        if unknown.texts:
            texts = " or ".join(shortened(" ".join(text.split()), _SHOWN) for text in unknown.texts)
            notes[f"{piece.text} stands for what a branch adds (line {unknown.line}): {texts}"] = None
        if not unknown.texts or any(set("$`") & set(text) for text in unknown.texts):
            names[_name(unknown)] = None
    if names:
        notes[f"not known before the script runs, and kept as they are: {', '.join(names)}"] = None
        notes["flags that they hold are not converted; --define NAME=VALUE gives a value"] = None
    return tuple(notes)


def _refuse_branches(launch: Launch) -> None:
    hidden: dict[str, str] = {}
    for unknown in (unknown for token in launch.tokens for unknown in token.unknowns):
        for text in unknown.texts:
            words = (word.partition("=")[0] for word in text.split())
            hidden |= {word: _name(unknown) for word in words if word in _DECIDING}
    if hidden:
        variables = ", ".join(dict.fromkeys(hidden.values()))
        raise ConfigError(
            f"{launch.name}: {', '.join(hidden)} is given in a branch of the script, and depends on how it runs; give "
            f"--define with the value of the variable: {variables}"
        )


def _unknowns(launch: Launch) -> Iterator[tuple[Piece, Unknown]]:
    """Yield the pieces that may become several words, with the cause why they are not known."""
    for token in launch.tokens:
        for piece in token.pieces:
            if piece.unknown is not None and not piece.quoted:
                yield piece, piece.unknown


def _name(unknown: Unknown) -> str:
    return f"{unknown.name} (line {unknown.line})"
