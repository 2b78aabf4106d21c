"""The lengths that `mindspeed-cp simulate --lengths` names: a set, a file, or numbers; and batches drawn from them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mindspeed_cp.config_errors import meant
from mindspeed_cp.cost import length_names, load_lengths, sample_batch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.layout.documents import MAX_TOKENS

VALID = "a set, a file with one length on a line, or lengths such as 700,30,4100"


def draw(text: str, tokens: int, count: int, seed: int) -> tuple[Documents, ...]:
    """Batches of just so many tokens, of documents drawn from what --lengths names; the last one of each is cut.

    Args:
        text: of the switch.
        tokens: of a batch.
        count: of batches; number i is drawn with seed + i.
        seed: of the first.

    Raises:
        ConfigError: as :func:`read_lengths`, or there is nothing to draw.
    """
    listed = read_lengths(text)
    if listed is None:
        return tuple(Documents(sample_batch(text, tokens, seed + i)) for i in range(count))
    if not listed.any():
        raise ConfigError(f"--lengths {shortened(text)}: has no document with a token to draw")
    found = [_drawn(listed[listed > 0], tokens, np.random.default_rng(seed + i)) for i in range(count)]
    return tuple(map(Documents, found))


def read_lengths(text: str) -> np.ndarray | None:
    """Lengths that --lengths lists, or that are in the file that it names, int64 [documents]; None for a set of which
    batches are drawn: an installed one, or a YAML file of bins.

    Raises:
        ConfigError: there is no such set or file; or something in it is no length, told with its line.
    """
    if text in length_names():
        return None
    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".npy", ".npz") and _is_file(path):
        return next(iter(load_lengths(text).listed), None)
    if _is_file(path):
        return _of_file(path)
    if re.match(r"\s*[-+]?\d", text) and path.suffix == "":
        return _numbers([(None, text)], f"--lengths {shortened(text)!r}")
    if path.name != text or path.suffix:
        raise ConfigError(f"--lengths {text}: no such file; valid: {VALID}; sets: {known_sets()}")
    near = meant(text.lower(), length_names())
    raise ConfigError(
        f"--lengths {text!r}: no such set; {f'did you mean {near}? ' if near else ''}valid: {VALID}; sets: "
        f"{known_sets()}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than a name can be
        return False


def shortened(text: str) -> str:
    """A long list of lengths as its beginning."""
    return text if len(text) <= 40 else text[:37] + "..."


def _of_file(path: Path) -> np.ndarray:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--lengths {path}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from None
    return _numbers(list(enumerate(content.splitlines(), 1)), f"--lengths {path}")


def _numbers(lines: Iterable[tuple[int | None, str]], name: str) -> np.ndarray:
    """Whole numbers from 0 in (line number, text)."""
    found = []
    for number, line in lines:
        for word in re.split(r"[\s,;\[\]]+", line):
            long = word.isdecimal() and int(word[:20]) > MAX_TOKENS
            if re.fullmatch(r"[0-9]+", word) and not long:
                found.append(int(word))
            elif word:
                where = "" if number is None else f" line {number}:"
                negative = re.fullmatch(r"-[0-9]+", word) is not None
                what = "is too long for a document" if long else "is negative" if negative else "is not a length"
                raise ConfigError(f"{name}:{where} {shortened(word)!r} {what}; give whole numbers >= 0, one on a line")
    if not found:
        raise ConfigError(f"{name}: there are no lengths in it; give whole numbers >= 0, one on a line")
    return np.array(found, np.int64)


def _drawn(lengths: np.ndarray, tokens: int, random: np.random.Generator) -> np.ndarray:
    """Documents of a list, drawn with replacement until the batch is full; the last one is cut."""
    drawn = np.zeros(0, np.int64)
    while drawn.sum() < tokens:
        drawn = np.concatenate([drawn, np.minimum(random.choice(lengths, max(64, len(drawn))), tokens)])
    ends = np.cumsum(drawn)
    drawn = drawn[: int(np.searchsorted(ends, tokens)) + 1]
    drawn[-1] -= ends[len(drawn) - 1] - tokens
    return drawn


def known_sets() -> str:
    """The installed sets, for errors."""
    return ", ".join(length_names())
