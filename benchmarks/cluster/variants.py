"""The plans that are compared, and the batches that they are made for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.scale import Scale
from mindspeed_cp import Documents, Plan, build_plan
from mindspeed_cp.errors import ConfigError

BASE = "even-split ring"

#: Name -> algorithm and options. "ranks" and "ranks_per_node" stand for those of the cluster.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    BASE: ("ring", {}),
    "all_gather": ("all_gather", {}),
    "Ulysses+ring": ("hybrid", {"ulysses_degree": "ranks_per_node"}),
    "direct, balanced": ("direct", {"layout": "balanced"}),
    "direct, balanced, all at once": ("direct", {"layout": "balanced", "prefetch": "ranks"}),
    "direct, even split, all at once": ("direct", {"prefetch": "ranks"}),
    "hierarchical": ("hierarchical", {"routing": False, "remap": False}),
    "hierarchical + routing": ("hierarchical", {"routing": True, "remap": False}),
    "hierarchical + routing + remap": ("hierarchical", {"routing": True, "remap": True}),
}

#: Those that a layer is measured with unless others are asked for.
USUAL = [name for name in VARIANTS if name != "direct, even split, all at once"]


@dataclass(frozen=True)
class Batch:
    """Documents that one layer computes at a time.

    Attributes:
        name: of the set that they were drawn from.
        number: in the set.
        lengths: in tokens.
    """

    name: str
    number: int
    lengths: tuple[int, ...]


def draw(name: str, lengths: np.ndarray, number: int, tokens: int, seed: int = 0) -> Batch:
    """Batch `number` of a set: documents drawn at random until it is full, cut at its end.

    Args:
        name: of the set.
        lengths: of the set's documents, or what they are drawn from, with repetition.
        number: another number, another batch.
        tokens: of the batch.
        seed: of the draw.
    """
    rng = np.random.default_rng((seed, number))
    found: list[int] = []
    left = tokens
    while left:
        length = min(int(lengths[rng.integers(len(lengths))]), left)
        if length:
            found.append(length)
            left -= length
    return Batch(name, number, tuple(found))


def lengths_of(name: str, folder: Path | None) -> np.ndarray:
    """Lengths of the documents of a set.

    Args:
        name: of the set: <folder>/<name>.npz with an array `lengths`.
        folder: of such files.

    Raises:
        ConfigError: there is no such file, or it holds no lengths.
    """
    path = None if folder is None else folder / f"{name}.npz"
    if path is None or not path.is_file():
        raise ConfigError(f"set {name!r}: there is no {path}; valid: --lengths-folder with {name}.npz, or set one")
    with np.load(path) as file:
        if "lengths" not in file or file["lengths"].ndim != 1 or not len(file["lengths"]):
            raise ConfigError(f"{path}: has no list `lengths`; valid: an .npz with one, in tokens")
        return np.asarray(file["lengths"].astype(np.int64))


def plan_for(name: str, batch: Batch, scale: Scale, nodes: int) -> Plan:
    """The plan of a variant, decided for the real layer.

    Raises:
        ConfigError: this version does not have its algorithm, or an option of it.
    """
    algorithm, options = VARIANTS[name]
    topology = scale.topology(nodes)
    numbers = {"ranks": topology.ranks, "ranks_per_node": topology.ranks_per_node}
    given: dict[str, Any] = {
        key: numbers[value] if isinstance(value, str) and value in numbers else value for key, value in options.items()
    }
    return build_plan(Documents(list(batch.lengths)), topology, scale.attention, algorithm, **given)


def narrowed(plan: Plan, scale: Scale) -> Plan:
    """The same plan for the narrower rows that really travel: the same rows, tiles and messages."""

    def narrow(program: Any) -> Any:
        return replace(program, attention=scale.wire)

    parts = getattr(plan, "parts", ())
    more = {"parts": tuple(narrowed(part, scale) for part in parts)} if parts else {}
    return replace(plan, attention=scale.wire, forward=narrow(plan.forward), backward=narrow(plan.backward), **more)
