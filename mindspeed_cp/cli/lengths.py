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

#: More tokens in a batch are refused, and more pieces of documents: so many take the even ring alone minutes, and GiB.
MOST_TOKENS, MOST_PIECES = 2**28, 2**24

#: Bytes of a file of lengths.
MOST_BYTES = 2**30


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


def check_size(text: str, lengths: np.ndarray, ranks: int, tokens: int | None = None) -> None:
    """Raise ConfigError where documents are too many to be simulated over so many ranks.

    Args:
        text: of the switch.
        lengths: of the documents, or of some like those that will be drawn.
        ranks: over which the even ring cuts each document, in two pieces for each.
        tokens: of the batch that is drawn from documents like these; None: these are the batch.
    """
    total = int(lengths.sum())
    if tokens is None and total > MOST_TOKENS:
        raise ConfigError(
            f"--lengths {shortened(text)}: {total:,} tokens; valid: at most {MOST_TOKENS:,} in a batch; give fewer "
            "documents, or draw from them with --tokens-per-rank"
        )
    scale = 1.0 if tokens is None else tokens / max(1, total)
    pieces = int(np.clip(lengths, 1, 2 * ranks).sum() * scale)
    if pieces > MOST_PIECES:
        raise ConfigError(
            f"--lengths {shortened(text)}: {int(len(lengths) * scale):,} documents over {ranks:,} ranks are {pieces:,} "
            f"pieces for the even ring; valid: at most {MOST_PIECES:,}; give fewer documents, fewer ranks, or less "
            "with --tokens-per-rank"
        )


def read_lengths(text: str) -> np.ndarray | None:
    """Lengths that --lengths lists, or that are in the file that it names, int64 [documents]; None for a set of which
    batches are drawn: an installed one, or a YAML file of bins.

    Raises:
        ConfigError: there is no such set or file; or something in it is no length, told with its line.
    """
    if text in length_names():
        return None
    path = Path(text)
    if _is_file(path) and path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"--lengths {path}: has {path.stat().st_size:,} bytes; valid: at most {MOST_BYTES:,}")
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
        with path.open(encoding="utf-8") as lines:
            return _numbers(enumerate(lines, 1), f"--lengths {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--lengths {path}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from None


def _numbers(lines: Iterable[tuple[int | None, str]], name: str) -> np.ndarray:
    """Whole numbers from 0 in (line number, text)."""
    found = []
    for number, line in lines:
        for word in re.split(r"[\s,;\[\]]+", line):
            long = word.isdecimal() and int(word[:20]) > MAX_TOKENS
            if re.fullmatch(r"[0-9]+", word) and not long:
                found.append(int(word))
                if len(found) > MOST_PIECES:
                    raise ConfigError(f"{name}: more documents than {MOST_PIECES:,}, which is the most; give fewer")
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
