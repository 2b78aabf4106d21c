"""What `mindspeed-cp plan` reads and prints."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import Plan, Topology

DEFAULT_RANKS = 4


def read_lengths(text: str | None, path: Path | None) -> Documents:
    """The documents that --lengths or --lengths-file names.  ConfigError unless just one is given, and right."""
    if (text is None) == (path is None):
        raise ConfigError("give either --lengths 5000,37,1200 or --lengths-file FILE" + (", not both" if text else ""))
    if path is None:
        assert text is not None
        return Documents(_numbers(text, f"--lengths {text!r}"))
    name = f"--lengths-file {path}"
    try:
        if path.suffix in (".npy", ".npz"):
            return Documents(_array(path, name))
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    return Documents(_numbers(content.strip().removeprefix("[").removesuffix("]"), name))


def topology(cp: int | None, nodes: int | None, ranks_per_node: int | None) -> Topology:
    """--cp N is one node of N ranks; --nodes and --ranks-per-node say more."""
    if cp is None:
        return Topology(nodes or 1, ranks_per_node or DEFAULT_RANKS)
    if ranks_per_node is None and nodes is not None and cp % nodes:
        raise ConfigError(f"--cp {cp}: does not divide over --nodes {nodes}; give --ranks-per-node instead")
    made = Topology(nodes or (cp // ranks_per_node if ranks_per_node else 1), ranks_per_node or cp // (nodes or 1))
    if made.ranks != cp:
        raise ConfigError(
            f"--cp {cp}: differs from --nodes {made.nodes} x --ranks-per-node {made.ranks_per_node} = {made.ranks}"
        )
    return made


def plan_options(pairs: Iterable[str]) -> dict[str, Any]:
    """--option key=value, a whole number where it is one."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {pair!r}: must be KEY=VALUE, for example layout=contiguous")
        options[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return options


def write_plan(plan: Plan, *, verify: bool, png: Path | None, as_json: bool) -> None:
    """Print a plan's tables or its JSON; prove and draw it if asked to."""
    from mindspeed_cp.report import plan_tables, summarize

    if verify:
        from mindspeed_cp.plan import verify_plan

        verify_plan(plan)
    summary = summarize(plan)
    if png is not None:
        from mindspeed_cp.report.tilemap import draw_tile_map

        draw_tile_map(plan, png, summary)
    if as_json:
        print(json.dumps({**summary.as_dict(), "verified": verify, "png": str(png) if png else None}))
        return
    from mindspeed_cp.report.console import print_tables

    print_tables(plan_tables(summary))
    if verify:
        print("proved: every visible pair once, every message matched, no dead-lock")
    if png is not None:
        print(f"map of tiles: {png}")


def _numbers(text: str, name: str) -> np.ndarray:
    words = [word for word in re.split(r"[\s,;]+", text) if word]
    for word in words:
        if not re.fullmatch(r"\d+(_\d+)*", word):
            raise ConfigError(f"{name}: {word!r} is not a length; give whole numbers >= 0, such as 5000,37,1200")
    if not words:
        raise ConfigError(f"{name}: there are no lengths in it; give whole numbers >= 0, such as 5000,37,1200")
    if max(map(len, words)) > 18:
        raise ConfigError(f"{name}: {max(words, key=len)} is too long for a document")
    return np.array([int(word) for word in words], np.int64)


def _array(path: Path, name: str) -> np.ndarray:
    try:
        return _load(path, name)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: is not an array that NumPy can read") from None


def _load(path: Path, name: str) -> np.ndarray:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        names = loaded.files
        if len(names) != 1 and "lengths" not in names:
            raise ConfigError(
                f"{name}: must hold one array, or one called lengths; it has {', '.join(names) or 'none'}"
            )
        return loaded["lengths" if "lengths" in names else names[0]]
