"""A launch script with the converted flags in place of the old ones; nothing else in it changes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import pairwise

from mindspeed_cp.convert.command_line import Token
from mindspeed_cp.convert.conversion import Change, Conversion
from mindspeed_cp.convert.launch import Launch, find_launches
from mindspeed_cp.convert.rules import ARITIES, Outcome
from mindspeed_cp.convert.rules.parallel import PLAN_WORDS
from mindspeed_cp.convert.shell.words import Piece, Span
from mindspeed_cp.errors import ConfigError

_GAP = re.compile(r"(?:[ \t\n=]|\\\n)*")
_QUOTES = ("'", '"')
_FLAGS = frozenset({*ARITIES, PLAN_WORDS[0]})
_CHANGED = (Outcome.SETTING, Outcome.REMOVED, Outcome.REPLACED)


def rewrite_script(
    source: str, launch: Launch, conversion: Conversion, defined: Mapping[str, str] | None = None
) -> str:
    """Return the script with the flags of a conversion.

    Launches with the same words are changed alike. The new script is read again: these must hand over exactly the flags
    of the conversion, and all other launches what they did.

    Args:
        source: text of the script.
        launch: its launch, as :func:`find_launch` gives it.
        conversion: what became of its flags; none is refused or not resolved.
        defined: values of variables that the script does not give.

    Raises:
        ConfigError: a flag does not stand in the script so that it can be replaced alone; names it.
    """
    edits = {
        _edit(source, launch, change) for change in conversion.changes if change.outcome in _CHANGED and change.source
    }
    launches = find_launches(source, str(launch.name), _FLAGS, defined)
    own = launch.words
    words_of = {other.number: other.words for other in launches}
    alike = [other for other in launches if words_of[other.number] == own]
    entries = [other.entry for other in alike if other.entry is not None and other.entry.pieces]
    if not alike or len(entries) < len(alike):
        raise _not_exact(launch, "the command names no training script (.py or -m) to put the new flags behind")
    wanted = {number: None if words == own else words for number, words in words_of.items()}
    depths = min(len(entry.pieces[-1].sites) for entry in entries)
    for depth in range(1, depths + 1):  # where the command names it, then where its text stands
        places = {_word_end(source, entry.pieces[-1].sites[-depth]) for entry in entries}
        text = _edited(source, edits, places, conversion.added)
        if _hands_over(text, str(launch.name), wanted, conversion, defined):
            return text
    others = len(alike) < len(launches)
    raise _not_exact(
        launch, f"its flags cannot be replaced without changing {'those of another command' if others else 'others'}"
    )


def _edited(source: str, edits: set[tuple[int, int, str]], places: set[int], added: tuple[str, ...]) -> str:
    """Return the script with the edits, and with the added words at some places."""
    text = source
    additions = {(place, place, _added_text(source, place, added)) for place in places}
    for start, stop, new in sorted({*edits, *additions}, reverse=True):
        text = text[:start] + new + text[stop:] if new else _without(text, start, stop)
    return text


def _added_text(source: str, place: int, words: tuple[str, ...]) -> str:
    """Return the added words as they stand in the script: a line for each flag where the command goes over lines."""
    continued = re.compile(r"[ \t]*\\\n([ \t]*)").match(source, place)
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(shlex.quote(word))
    border = f" \\\n{continued[1] or '    '}" if continued else " "
    return "".join(border + " ".join(flag) for flag in flags)


def _hands_over(
    text: str,
    name: str,
    wanted: Mapping[int, tuple[str, ...] | None],
    conversion: Conversion,
    defined: Mapping[str, str] | None,
) -> bool:
    """Return True if the launches of a script hand over what is wanted of each: its words, or (None) the conversion."""
    try:
        launches = find_launches(text, name, _FLAGS, defined)
    except ConfigError:
        return False
    if [launch.number for launch in launches] != list(wanted):
        return False
    return all(
        _is_converted(launch.words, conversion) if words is None else launch.words == words
        for launch, words in zip(launches, wanted.values(), strict=True)
    )


def _is_converted(words: tuple[str, ...], conversion: Conversion) -> bool:
    """Return True if words are those of a conversion, the added ones in one place."""
    added, count = conversion.added, len(conversion.added)
    return any(
        words[place : place + count] == added and (*words[:place], *words[place + count :]) == conversion.kept
        for place in range(len(words) - count + 1)
    )


def _not_exact(launch: Launch, problem: str) -> ConfigError:
    return ConfigError(
        f"{launch.name}:{launch.line}: the script cannot be rewritten: {problem}; change it by hand, by the list that "
        "this command prints without --script"
    )


def _edit(source: str, launch: Launch, change: Change) -> tuple[int, int, str]:
    """Return start and end of a flag with its values in the script, and the text in their place."""
    assert change.source is not None
    tokens = change.source.tokens
    sites = _sites(source, tokens)
    gaps = sites is not None and all(_GAP.fullmatch(source, before[1], after[0]) for before, after in pairwise(sites))
    if not sites or not gaps:
        raise _not_exact(launch, f"{change.flag} does not stand in it in one place")
    new = " ".join(map(shlex.quote, change.became.split())) if change.outcome is Outcome.REPLACED else ""
    return sites[0][0], sites[-1][1], new


def _sites(source: str, tokens: tuple[Token, ...]) -> list[Span] | None:
    """Return the places of the words in the text where the flag's name stands; None if one stands elsewhere."""
    pieces: list[Piece] = [piece for token in tokens for piece in token.pieces]
    depth = len(pieces[0].sites) if pieces else 0
    sites: list[Span] = []
    for piece in pieces:
        if len(piece.sites) < depth or piece.sites[-depth] == (0, 0):
            return None
        site = _quoted(source, piece.sites[-depth])
        if not sites or sites[-1] != site:
            sites.append(site)
    return sites if sites == sorted(sites) else None


def _quoted(source: str, span: Span) -> Span:
    """Return a place with the quotes around it."""
    start, stop = span
    if start and source[start - 1 : start] in _QUOTES and source[start - 1] == source[stop : stop + 1]:
        return start - 1, stop + 1
    return span


def _word_end(source: str, span: Span) -> int:
    """Return the end of the word that has a place in it."""
    stop = _quoted(source, span)[1]
    match = re.compile(r"[^\s;|&\"'`()]*").match(source, stop)
    assert match is not None
    return match.end()


def _without(text: str, start: int, stop: int) -> str:
    """Return a text without a place, and without the blanks, the line and the continuation that it leaves behind."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", stop)
    line_end = len(text) if line_end < 0 else line_end
    before, after = text[line_start:start], text[stop:line_end]
    if before.strip(" \t") or after.strip(" \t\\"):
        kept = before.rstrip(" \t") + after if after[:1] in ("", " ", "\t", '"', "'", ")") else before + after
        if not before.strip(" \t"):
            kept = before + after.lstrip(" \t")
        return text[:line_start] + kept + text[line_end:]
    continued = text[:line_start].endswith("\\\n")
    if after.strip(" \t") or not continued:  # the line had a continuation of its own, or was a line for itself
        return text[:line_start] + text[line_end + 1 :]
    return text[:line_start] + text[line_end:]  # an empty line ends what the line before continues
