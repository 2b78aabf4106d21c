"""What `mindspeed-cp plan` reads and prints."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cost.candidates import read_option
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import ALGORITHMS, Plan, Topology, algorithm_name, algorithm_options

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


def read_keys(text: str | None) -> Documents | None:
    """--kv-lengths, for cross-attention."""
    return None if text is None else Documents(_numbers(text, f"--kv-lengths {text!r}"))


def read_window(text: str | None) -> tuple[int, int] | None:
    """--window LEFT,RIGHT, of which AttentionConfig says whether it can be."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(-?\d{1,18})\s*,\s*(-?\d{1,18})\s*", text)
    if found is None:
        raise ConfigError(f"--window {text!r}: must be LEFT,RIGHT in tokens, such as 500,0; -1: no limit on that side")
    return int(found[1]), int(found[2])


def topology(ranks: int | None, nodes: int | None, ranks_per_node: int | None, cluster: str | None = None) -> Topology:
    """--ranks N is one node of N ranks; --nodes and --ranks-per-node say more."""
    if ranks is None:
        return Topology(nodes or 1, ranks_per_node or DEFAULT_RANKS, cluster)
    if ranks_per_node is None and nodes is not None and ranks % nodes:
        raise ConfigError(f"--ranks {ranks}: does not divide over --nodes {nodes}; give --ranks-per-node instead")
    made = Topology(
        nodes or (ranks // ranks_per_node if ranks_per_node else 1), ranks_per_node or ranks // (nodes or 1), cluster
    )
    if made.ranks != ranks:
        raise ConfigError(
            f"--ranks {ranks}: differs from --nodes {made.nodes} x --ranks-per-node {made.ranks_per_node} = "
            f"{made.ranks}"
        )
    return made


def plan_options(algorithm: str, named: Mapping[str, Any], pairs: Iterable[str]) -> dict[str, Any]:
    """The options of an algorithm: those with a switch of their own, and --option key=value (a whole number where it
    is one).

    Raises:
        ConfigError: an option is malformed, is given twice, or is not one of the algorithm; names those that have it.
    """
    options = {key: value for key, value in named.items() if value is not None}
    switches = {key: f"--{key.replace('_', '-')}" for key in options}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {pair!r}: must be KEY=VALUE, for example layout=contiguous")
        if key in options:
            raise ConfigError(f"--option {pair!r}: {key} is given twice")
        switches[key] = f"--option {pair}"
        options[key] = read_option(value)
    name = algorithm_name(algorithm)
    for key in options:
        others = [other for other in ALGORITHMS if key in algorithm_options(other)]
        if others and name not in others:
            raise ConfigError(
                f"{key} = {options[key]}: is no option of algorithm {name}; algorithms that have it: "
                f"{', '.join(others)}; give --algorithm {others[0]}, or leave {switches[key]} out"
            )
    return options


def hints(plan: Plan, options: Mapping[str, Any]) -> list[str]:
    """What looks odd in a plan, why, and which option changes it."""
    found = []
    window = options.get("cp_window_size", plan.topology.ranks_per_node)
    if plan.algorithm == "double_ring" and window == plan.ranks > 1:
        found.append(
            "double_ring with one window of all ranks is the ring; give --cp-window-size, or --nodes above 1 for a "
            "window on each node"
        )
    heads = [plan.q_layout.head_range(rank, plan.attention.heads) for rank in range(plan.ranks)]
    idle = [rank for rank, (first, last) in enumerate(heads) if first == last]
    if idle:
        found.append(
            f"{plan.attention.heads} heads are fewer than {plan.ranks} ranks: {len(idle)} of these "
            f"compute{'s' * (len(idle) == 1)} nothing; "
            "hybrid with --ulysses-degree at most the number of heads keeps all of them busy"
        )
    return found


def write_plan(
    plan: Plan, bytes_per_element: int, options: Mapping[str, Any], *, verify: bool, png: Path | None, as_json: bool
) -> None:
    """Print a plan's tables or its JSON; prove and draw it if asked to."""
    from mindspeed_cp.report import plan_tables, summarize

    if verify:
        from mindspeed_cp.plan import verify_plan

        verify_plan(plan)
    summary = summarize(plan, bytes_per_element)
    if png is not None:
        from mindspeed_cp.report.tilemap import draw_tile_map

        draw_tile_map(plan, png, summary)
    if as_json:
        print(json.dumps({**summary.as_dict(), "verified": verify, "png": str(png) if png else None}))
        return
    from mindspeed_cp.report.console import print_tables

    print_tables(plan_tables(summary))
    for hint in hints(plan, options):
        print(f"note: {hint}")
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
