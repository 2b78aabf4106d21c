"""Trees of documents of `--tree`: a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents

VALID_LINE = (
    '{"lengths": [100, 20, 30], "parents": [-1, 0, 0]}, or {"trajectories": [[1, 2, 3], [1, 2, 4]]} with token numbers'
)

MAX_TREE_BYTES = 2**28  # of a file


def read_trees(path: Path) -> Documents:
    """Read the trees of a file, those of its lines one after the other.

    Args:
        path: a file of JSON lines, each with "lengths" and "parents" of documents, or with "trajectories", of which
            shared prefixes are found.

    Raises:
        ConfigError: the file cannot be read, or a line is not of these; names the line.
    """
    try:
        if path.stat().st_size > MAX_TREE_BYTES:
            raise ConfigError(f"--tree {path}: {path.stat().st_size:,} bytes; valid: at most {MAX_TREE_BYTES:,}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tree {path}: {error}; valid: a file of lines such as {VALID_LINE}") from None
    lengths: list[int] = []
    parents: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            documents = _documents(json.loads(line))
        except (ValueError, RecursionError, ConfigError) as error:
            raise ConfigError(f"--tree {path}, line {number}: {error}") from None
        parents += [parent + len(lengths) if parent >= 0 else -1 for parent in documents.parents.tolist()]
        lengths += documents.lengths.tolist()
    if not lengths:
        raise ConfigError(f"--tree {path}: no document; valid: lines such as {VALID_LINE}")
    return Documents(lengths, parents)


def _documents(entry: Any) -> Documents:
    """Return the documents of one line."""
    keys = set(entry) if isinstance(entry, dict) else set()
    if keys == {"trajectories"} and isinstance(entry["trajectories"], list):
        return Documents.from_trajectories(entry["trajectories"], must_share=False).documents
    if keys == {"lengths", "parents"} and all(isinstance(entry[key], list) for key in keys):
        return Documents(entry["lengths"], entry["parents"])
    raise ConfigError(f"{json.dumps(entry)[:60]} is not a tree; valid: {VALID_LINE}")
