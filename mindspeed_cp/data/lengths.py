"""Document lengths to plan for: binned distributions by name or file, or a list of real lengths.

The distributions stand in `configs/lengths/`, which is installed inside this package.  Inside a bin lengths are drawn
log-uniformly: every bin's mean is then within 11 % of that of the lengths that were binned, but for Wikipedia's last (7
documents of a million), where it is half as large again.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from mindspeed_cp.config_base import Section
from mindspeed_cp.config_errors import bad_value, meant
from mindspeed_cp.config_file import in_file, read_settings_file
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.layout import is_whole

DISTRIBUTIONS = Path(__file__).parent / "length_bins"  # a link to configs/lengths in a checkout


class LengthSettings(Section):
    """The keys of a distribution.

    Attributes:
        name: of the distribution.
        edges: tokens, ascending; bin i is edges[i] <= length < edges[i + 1].
        percent: of documents in each bin, one fewer than edges; 100 in all.
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
        name: for people.
        edges, percent: as in :class:`LengthSettings`; empty for a list.
        listed: real lengths; empty for bins.
    """

    name: str
    edges: tuple[int, ...] = ()
    percent: tuple[float, ...] = ()
    listed: tuple[np.ndarray, ...] = ()

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """That many independent lengths, int64 [count]."""
        if self.listed:
            return random.choice(self.listed[0], count)
        shares = np.asarray(self.percent) / sum(self.percent)
        low, high = np.log(self.edges[:-1]), np.log(self.edges[1:])
        bins = random.choice(len(shares), count, p=shares)
        drawn = np.exp(low[bins] + random.random(count) * (high - low)[bins]).astype(np.int64)
        return np.clip(drawn, np.asarray(self.edges)[bins], np.asarray(self.edges)[bins + 1] - 1)


def length_names() -> list[str]:
    """The distributions that are installed, sorted."""
    return sorted(path.stem for path in DISTRIBUTIONS.glob("*.yaml"))


def load_lengths(name_or_path: str | Path, folder: str | Path | None = None) -> Lengths:
    """A distribution.

    Args:
        name_or_path: an installed one, such as "wikipedia"; a YAML file with its keys; or an .npz or .npy file of
            lengths, the .npz with an array called `lengths`.
        folder: a folder that holds the real lengths of installed names as `<name>.npz`, used in place of the bins.

    Raises:
        ConfigError: no such name (names those there are) or file, or its content is wrong.
    """
    text, path = str(name_or_path), Path(name_or_path)
    if isinstance(name_or_path, str) and text in length_names():
        return _installed(text) if folder is None else _list(Path(folder) / f"{text}.npz")
    if path.suffix in (".npz", ".npy"):
        return _list(path)
    if isinstance(name_or_path, str) and path.suffix not in (".yaml", ".yml") and path.name == text:
        near = meant(text.lower(), length_names())
        raise ConfigError(
            f"lengths {text!r}: no such distribution; {f'did you mean {near}? ' if near else ''}"
            f"valid: {', '.join(length_names())}, a YAML file of bins, or an .npz or .npy file of lengths"
        )
    return _binned(path)


def sample_lengths(name_or_path: str | Path, count: int, seed: int = 0, folder: str | Path | None = None) -> np.ndarray:
    """Independent document lengths; the same for the same seed.

    Args:
        name_or_path, folder: as for :func:`load_lengths`.
        count: of documents.
        seed: of the draw.

    Returns:
        int64 [count], tokens.

    Raises:
        ConfigError: as :func:`load_lengths`, or count or seed is no whole number from 0.
    """
    _natural("count", count)
    _natural("seed", seed)
    return load_lengths(name_or_path, folder).draw(count, np.random.default_rng(seed))


def sample_batch(
    name_or_path: str | Path,
    tokens: int,
    seed: int = 0,
    longest: int | None = None,
    folder: str | Path | None = None,
) -> np.ndarray:
    """Lengths of one packed batch of just so many tokens: documents are drawn until it is full, and the last is cut.

    Args:
        name_or_path, seed, folder: as for :func:`sample_lengths`.
        tokens: of the batch.
        longest: documents are cut to so many tokens (the context); default: `tokens`.

    Returns:
        int64 [documents], at least 1 each, in the order of the draw; their sum is `tokens`.

    Raises:
        ConfigError: as for :func:`sample_lengths`, or longest is below 1.
    """
    _natural("tokens", tokens)
    _natural("seed", seed)
    most = tokens if longest is None else longest
    if longest is not None:
        _natural("longest", longest, least=1)
    lengths, random = load_lengths(name_or_path, folder), np.random.default_rng(seed)
    found, total = [np.zeros(0, np.int64)], 0
    while total < tokens:
        found.append(np.minimum(lengths.draw(64, random), most))
        total += int(found[-1].sum())
    drawn = np.concatenate(found)
    ends = np.cumsum(drawn)
    kept = int(np.searchsorted(ends, tokens)) + 1 if tokens else 0
    drawn = drawn[:kept]
    if kept:
        drawn[-1] -= ends[kept - 1] - tokens
    return drawn


@lru_cache
def _installed(name: str) -> Lengths:
    return _binned(DISTRIBUTIONS / f"{name}.yaml")


def _binned(path: Path) -> Lengths:
    file = read_settings_file(path)
    settings = in_file(file, "", lambda: LengthSettings(**file.data))
    return Lengths(settings.name, tuple(settings.edges), tuple(settings.percent))


def _list(path: Path) -> Lengths:
    try:
        return _list_as_of(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise ConfigError(f"lengths {path}: no such file; leave the folder out to draw from the bins") from None


@lru_cache(maxsize=4)
def _list_as_of(path: Path, changed: int) -> Lengths:
    """The lengths of a file that was last changed then: large files are read once."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            with loaded as archive:
                loaded = archive["lengths"]
    except (KeyError, ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error):
        raise ConfigError(
            f"lengths {path}: must be an .npy file, or an .npz file with an array called lengths"
        ) from None
    if loaded.ndim != 1 or not loaded.size or loaded.dtype.kind not in "iu" or loaded.min() < 1 or loaded.max() > 2**31:
        raise ConfigError(f"lengths {path}: must be a list of whole numbers from 1 to 2**31")
    listed = loaded.astype(np.int64)
    listed.setflags(write=False)
    return Lengths(path.stem, listed=(listed,))


def _natural(name: str, value: object, least: int = 0) -> None:
    if not is_whole(value) or value < least:  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; valid: a whole number from {least}")
