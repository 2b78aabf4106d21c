"""Distributions of document lengths: bins by name or file, or a list of real lengths.

The distributions are in `configs/lengths/`, which is installed inside this package. Inside a bin, lengths are drawn
log-uniformly: the mean of every bin is then within 11 % of the mean of the lengths that were binned, except for the
last bin of Wikipedia (7 documents of a million), where it is 50 % larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.schema.base import Section
from mindspeed_cp.schema.messages import bad_value, closest_names, did_you_mean
from mindspeed_cp.schema.numbers import check_count, check_type
from mindspeed_cp.schema.yaml_file import read_settings_file, with_file_location

MAX_LISTED = 2**24  # lengths of a list
SUFFIXES = (".yaml", ".yml", ".npz", ".npy")

DISTRIBUTIONS = Path(__file__).parent / "length_bins"  # a link to configs/lengths in a checkout


class LengthSettings(Section):
    """Keys of a file with a distribution.

    Attributes:
        name: name of the distribution.
        edges: borders of the bins in tokens, ascending; bin i is edges[i] <= length < edges[i + 1].
        percent: share of the documents in each bin; the sum is 100.
    """

    name: Annotated[str, Field(min_length=1)]
    edges: list[int]
    percent: list[float]

    @model_validator(mode="after")
    def _agree(self) -> LengthSettings:
        edges, percent = self.edges, self.percent
        if len(edges) < 2 or edges[0] < 1 or edges[-1] > 2**31 or any(a >= b for a, b in pairwise(edges)):
            raise bad_value("edges", edges, "must be two or more ascending lengths, from 1 to 2**31")
        if len(percent) != len(edges) - 1 or min(percent) < 0:
            raise bad_value("percent", percent, f"must be {len(edges) - 1} shares, one for each bin, none below 0")
        if abs(sum(percent) - 100) > 0.01:
            raise bad_value("percent", percent, f"must be 100 in all, not {sum(percent):g}")
        return self


@dataclass(frozen=True)
class Lengths:
    """A distribution of document lengths: bins, or all lengths of a list.

    Attributes:
        name: name for messages.
        edges, percent: as in :class:`LengthSettings`; empty for a list.
        listed: one array of real lengths; empty for bins.
    """

    name: str
    edges: tuple[int, ...] = ()
    percent: tuple[float, ...] = ()
    listed: tuple[np.ndarray, ...] = ()

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Draw independent lengths, int64 [count]."""
        if self.listed:
            return random.choice(self.listed[0], count)
        shares = np.asarray(self.percent) / sum(self.percent)
        low, high = np.log(self.edges[:-1]), np.log(self.edges[1:])
        bins = random.choice(len(shares), count, p=shares)
        drawn = np.exp(low[bins] + random.random(count) * (high - low)[bins]).astype(np.int64)
        return np.clip(drawn, np.asarray(self.edges)[bins], np.asarray(self.edges)[bins + 1] - 1)


def length_names() -> list[str]:
    """Return the names of the installed distributions, sorted."""
    return sorted(path.stem for path in DISTRIBUTIONS.glob("*.yaml"))


def load_lengths(name_or_path: str | Path, folder: str | Path | None = None) -> Lengths:
    """Load a distribution.

    Args:
        name_or_path: an installed name, such as "wikipedia"; a YAML file with the same keys; or an .npz or .npy file of
            lengths, the .npz with an array called `lengths`.
        folder: folder with real lengths of installed names as `<name>.npz`, which replace the bins.

    Raises:
        ConfigError: the name is unknown (the message lists the names), or the file does not exist or is invalid.
    """
    valid = f"{', '.join(length_names())}, or the path of a file"
    check_type("lengths", name_or_path, (str, Path), valid)
    check_type("folder", folder, (str, Path, type(None)), "the path of a folder, or None")
    text, path = str(name_or_path), Path(name_or_path)
    if isinstance(name_or_path, str) and text in length_names():
        path = DISTRIBUTIONS / f"{text}.yaml" if folder is None else Path(folder) / f"{text}.npz"
    elif isinstance(name_or_path, str) and path.suffix not in SUFFIXES and path.name == text:
        near = closest_names(text.lower(), length_names())
        raise ConfigError(
            f"lengths {text!r}: no such distribution; {did_you_mean(near)}"
            f"valid: {', '.join(length_names())}, a YAML file of bins, or an .npz or .npy file of lengths"
        )
    try:
        modified = path.stat().st_mtime_ns
    except FileNotFoundError:
        instead = "" if folder is None else "; leave the folder out to draw from the bins"
        raise ConfigError(f"lengths {path}: no such file{instead}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"lengths {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _read(path, modified)


def sample_lengths(name_or_path: str | Path, count: int, seed: int = 0, folder: str | Path | None = None) -> np.ndarray:
    """Draw independent document lengths; the same for the same seed.

    Args:
        name_or_path, folder: as for :func:`load_lengths`.
        count: number of documents.
        seed: seed of the draw.

    Returns:
        Tokens of each document, int64 [count].

    Raises:
        ConfigError: as for :func:`load_lengths`, or count or seed is negative or not an integer.
    """
    check_count("count", count, least=0, most=MAX_LISTED)
    check_count("seed", seed, least=0, most=None)
    return load_lengths(name_or_path, folder).draw(count, np.random.default_rng(seed))


def sample_batch(
    name_or_path: str | Path,
    tokens: int,
    seed: int = 0,
    longest: int | None = None,
    folder: str | Path | None = None,
) -> np.ndarray:
    """Draw the lengths of one packed batch: documents until the batch is full; the last one is cut.

    Args:
        name_or_path, seed, folder: as for :func:`sample_lengths`.
        tokens: number of tokens in the batch.
        longest: maximum length, to which documents are cut (the context); default: `tokens`.

    Returns:
        int64 [documents], at least 1 each, in the order of the draw; their sum is `tokens`.

    Raises:
        ConfigError: as for :func:`sample_lengths`, or longest is below 1.
    """
    check_count("tokens", tokens, least=0, most=MAX_TOKENS)
    check_count("seed", seed, least=0, most=None)
    most = tokens if longest is None else longest
    if longest is not None:
        check_count("longest", longest, most=None)
    lengths, random = load_lengths(name_or_path, folder), np.random.default_rng(seed)
    draws, total = [np.zeros(0, np.int64)], 0
    while total < tokens:
        draws.append(np.minimum(lengths.draw(64, random), most))
        total += int(draws[-1].sum())
    drawn = np.concatenate(draws)
    ends = np.cumsum(drawn)
    kept = int(np.searchsorted(ends, tokens)) + 1 if tokens else 0
    drawn = drawn[:kept]
    if kept:
        drawn[-1] -= ends[kept - 1] - tokens
    return drawn


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> Lengths:
    """Read a file of bins or of lengths; cached by its time of modification."""
    if path.suffix not in (".npz", ".npy"):
        file = read_settings_file(path)
        settings = with_file_location(file, "", lambda: LengthSettings(**file.data))
        return Lengths(settings.name, tuple(settings.edges), tuple(settings.percent))
    try:
        with open(path, "rb") as content:
            loaded = np.load(content, allow_pickle=False)
            lengths = loaded if isinstance(loaded, np.ndarray) else loaded["lengths"]
    except Exception:  # NumPy evaluates the header, and zipfile's decoders too raise many kinds for a damaged file
        raise ConfigError(
            f"lengths {path}: must be an .npy file, or an .npz file with an array called lengths; this one is none, or "
            "damaged"
        ) from None
    is_list = lengths.ndim == 1 and lengths.dtype.kind in "iu" and 1 <= lengths.size <= MAX_LISTED
    if not is_list or lengths.min() < 1 or lengths.max() > 2**31:
        raise ConfigError(f"lengths {path}: must be a list of 1 to {MAX_LISTED:,} whole numbers from 1 to 2**31")
    listed = lengths.astype(np.int64)
    listed.setflags(write=False)
    return Lengths(path.stem, listed=(listed,))
