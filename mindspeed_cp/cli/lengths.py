"""Documents of `--lengths`: a set, a file, or numbers; batches drawn from them; and what they may take."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from mindspeed_cp.data.length_files import is_data_file, read_data_file
from mindspeed_cp.data.lengths import Lengths, length_names, load_lengths, sample_batch
from mindspeed_cp.errors import ConfigError, shortened
from mindspeed_cp.layout import Documents
from mindspeed_cp.layout.documents import MAX_TOKENS
from mindspeed_cp.schema.messages import closest_names, did_you_mean

VALID_LENGTHS = (
    "a set, a file with one length on a line, a data set (Megatron's .idx, .parquet, .arrow, .jsonl, or a folder), or "
    "lengths such as 700,30,4100"
)

# Larger batches take minutes and GiB in the simulation of the even ring alone.
MAX_SIMULATED_RANKS = 4096
MAX_SIMULATED_TOKENS = 2**28  # of a batch
MAX_RING_CHUNKS = 2**24  # chunks of documents over all ranks; also the most documents of a list

SHOWN = 40  # characters of a list of lengths in a message
MAX_FILE_BYTES = 2**28  # of a file
MENTIONED_BYTES, MENTIONED_SECONDS = 2**31, 20.0  # work that takes more is said to

ADVICE = "give whole numbers >= 0, with spaces, commas or new lines between them"


def draw_batches(given: str | np.ndarray, tokens: int, count: int, seed: int) -> tuple[Documents, ...]:
    """Draw batches of documents from the lengths that --lengths gives; the last document of each batch is cut.

    Args:
        given: value of --lengths, or its lengths.
        tokens: exact number of tokens of each batch.
        count: number of batches; batch i is drawn with seed + i.
        seed: seed of the first batch.

    Raises:
        ConfigError: as :func:`read_lengths`, or no document has a token.
    """
    listed = read_lengths(given) if isinstance(given, str) else given
    if listed is not None and not listed.any():
        raise ConfigError(f"--lengths {_shown(str(given))}: has no document with a token to draw")
    source = str(given) if listed is None else Lengths("listed", listed=(listed[listed > 0],))
    return tuple(Documents(sample_batch(source, tokens, seed + i)) for i in range(count))


def simulation_limit(lengths: np.ndarray, ranks: int, tokens: int | None = None) -> str:
    """Return why documents over ranks are too large to simulate; empty if they are not.

    Args:
        lengths: the documents, or a sample of the documents to draw.
        ranks: ranks; the even ring cuts each document into two chunks per rank.
        tokens: tokens of the batch to draw; None if `lengths` is the batch.
    """
    total = int(lengths.sum())
    batch = total if tokens is None else tokens
    chunks = int(np.clip(lengths, 1, 2 * ranks).sum()) * batch // max(1, total)  # of whole numbers of any size
    for number, limit, what in (
        (ranks, MAX_SIMULATED_RANKS, "ranks"),
        (batch, MAX_SIMULATED_TOKENS, "tokens"),
        (chunks, MAX_RING_CHUNKS, "chunks of documents for the even ring"),
    ):
        if number > limit:
            return f"{number:,} {what}, and at most {limit:,} are simulated"
    return ""


def plan_bytes(documents: Documents, ranks: int, algorithm: str) -> float:
    """Estimate the bytes that a plan takes while it is built: records of messages and of spans.

    Fitted to plans over 800 ranks, and to 50,000 documents over 8.
    """
    chunks = float(np.clip(documents.lengths, 1, 2 * ranks).sum())
    if algorithm in ("direct", "all_gather"):
        return 240.0 * chunks * ranks
    per_pair = {"ring": 720.0, "double_ring": 720.0, "hierarchical": 270.0}.get(algorithm, 100.0)
    return per_pair * ranks**2 + (270.0 if algorithm in ("ring", "double_ring") else 120.0) * chunks


def plan_seconds(documents: Documents, ranks: int, algorithm: str) -> float:
    """Estimate the seconds in which a plan is built, counted and simulated on one core, within a factor of about three.

    Fitted to documents of Wikipedia over 64 to 1,024 ranks.
    """
    chunks = float(np.clip(documents.lengths, 1, 2 * ranks).sum())
    if algorithm in ("direct", "all_gather"):
        return 5e-6 * chunks * ranks
    return 5e-6 * chunks + (1e-4 * ranks**2 if algorithm in ("ring", "double_ring") else 0.0)


def check_cost(batches: Sequence[Documents], ranks: int, algorithms: Sequence[str]) -> None:
    """Raise ConfigError if the estimate of a plan exceeds the memory that is free, before any of it is taken; print
    what takes minutes or gigabytes."""
    documents, free = max(batches, key=len), free_bytes()
    needed = {algorithm: plan_bytes(documents, ranks, algorithm) for algorithm in algorithms}
    for algorithm, size in needed.items():
        if size > free:
            raise ConfigError(
                f"algorithm {algorithm}: the plan of {len(documents):,} documents over {ranks:,} ranks takes about "
                f"{size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free; give fewer ranks or documents, or "
                "another algorithm, such as ulysses"
            )
    seconds = sum(plan_seconds(batch, ranks, algorithm) for batch in batches for algorithm in algorithms)
    most = max(needed.values())
    if most > MENTIONED_BYTES or seconds > MENTIONED_SECONDS:
        time = f"{seconds:,.0f} seconds" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
        work = f"{len(documents):,} documents over {ranks:,} ranks"
        print(f"note: {work} take about {time} and {most / 2**30:,.1f} GiB", file=sys.stderr)


def free_bytes() -> float:
    """Return the memory that this process may still take: that of the machine, within its cgroup."""
    free = float("inf")
    with suppress(OSError, StopIteration):  # no Linux
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # no container, or "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii")) for name in ("max", "current"))
        free = min(free, float(limit - used))
    return free


def is_data_set(text: str) -> bool:
    """Return True if the value of --lengths is a data set, whose documents are many batches."""
    is_file = (
        os.path.isdir(text) or (is_data_file(Path(text)) and os.path.isfile(text)) or os.path.isfile(f"{text}.idx")
    )
    return is_file and text not in length_names()


def read_lengths(text: str, column: str | None = None, tokenizer: Path | None = None) -> np.ndarray | None:
    """Return the lengths that --lengths lists or that are in its file, int64 [documents]; None for a distribution (an
    installed set, or a YAML file of bins).

    Args:
        text: value of --lengths.
        column, tokenizer: of a data set (:func:`mindspeed_cp.data.length_files.read_data_file`).

    Raises:
        ConfigError: there is no such set or file, or it has an invalid length, reported with its line.
    """
    path, is_named = Path(text), text in length_names()
    if is_data_set(text):
        return read_data_file(path, column, tokenizer)
    if column is not None or tokenizer is not None:
        raise ConfigError(f"--lengths {_shown(text)}: has no columns; leave out --column and --tokenizer")
    if is_named:
        return None
    if not os.path.isfile(text):  # False also for what no file can be named
        if re.match(r"\s*\[?\s*[-+]?\d", text) and path.suffix == "":
            return _parse_numbers([(None, text)], f"--lengths {_shown(text)!r}")
        hint, sets = did_you_mean(closest_names(text.lower(), length_names())), ", ".join(length_names())
        raise ConfigError(f"--lengths {text!r}: no such set or file; {hint}valid: {VALID_LENGTHS}; sets: {sets}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"--lengths {path}: has {path.stat().st_size:,} bytes; valid: at most {MAX_FILE_BYTES:,}")
    if path.suffix in (".yaml", ".yml", ".npy", ".npz"):
        return next(iter(load_lengths(text).listed), None)
    return _read_text(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_text(path: Path, modified: int) -> np.ndarray:
    """Read a text file; cached by its time of modification."""
    try:
        with path.open(encoding="utf-8") as lines:
            lengths = _parse_numbers(enumerate(lines, 1), f"--lengths {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--lengths {path}: cannot be read: {reason}") from None
    lengths.setflags(write=False)
    return lengths


def _shown(text: str) -> str:
    return shortened(text, SHOWN)


def _parse_numbers(lines: Iterable[tuple[int | None, str]], name: str) -> np.ndarray:
    """Return the whole numbers in (line number, text)."""
    lengths = []
    for number, line in lines:
        where = name if number is None else f"{name}: line {number}"
        if re.search(r"(?:^|[,;\[])\s*[,;]", line.rstrip()):
            raise ConfigError(f"{where}: no length stands before a comma; {ADVICE}")
        for match in re.finditer(r"[^\s,;\[\]]+", line):
            word = match[0]
            if not re.fullmatch(r"[0-9]+", word):
                problem = "is negative" if re.fullmatch(r"-[0-9]+", word) else "is not a length"
                raise ConfigError(f"{where}: {_shown(word)!r} {problem}; {ADVICE}")
            if int(word.lstrip("0")[:20] or 0) > MAX_TOKENS:
                raise ConfigError(f"{where}: {_shown(word)!r} is too long for a document; {ADVICE}")
            lengths.append(int(word))
            if len(lengths) > MAX_RING_CHUNKS:
                raise ConfigError(f"{name}: has more than {MAX_RING_CHUNKS:,} documents; give fewer")
    if not lengths:
        raise ConfigError(f"{name}: there are no lengths in it; {ADVICE}")
    return np.array(lengths, np.int64)
