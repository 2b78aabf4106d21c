"""The plans that are compared, and the batches that they are made for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.scale import Scale
from mindspeed_cp import Documents, Plan, build_plan
from mindspeed_cp.data.lengths import sample_batch

BASE = "even-split ring"

#: Name -> algorithm and options. "ranks" and "ranks_per_node" stand for those of the cluster.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    BASE: ("ring", {}),
    "all_gather": ("all_gather", {}),
    "Ulysses+ring": ("hybrid", {"ulysses_degree": "ranks_per_node"}),
    "direct, balanced": ("direct", {"layout": "balanced"}),
    "direct, balanced, all at once": ("direct", {"layout": "balanced", "prefetch": "ranks"}),
    "direct, even split, all at once": ("direct", {"prefetch": "ranks"}),
    "hierarchical, no routing": ("hierarchical", {"routing": False, "remap": "off"}),
    "hierarchical + routing": ("hierarchical", {"routing": True, "remap": "off"}),
    "hierarchical + routing + remap": ("hierarchical", {"routing": True, "remap": "qkv"}),
    "hierarchical + routing, no head split": ("hierarchical", {"routing": True, "remap": "off", "head_split": False}),
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


def batches_of(name: str, count: int, tokens: int, folder: Path | None = None, seed: int = 0) -> list[Batch]:
    """Return the batches of a set.

    Args:
        name: "one": a single document; else as for :func:`mindspeed_cp.data.lengths.sample_batch`.
        count: of batches; one document is one batch.
        tokens: of a batch.
        folder: of real lengths; None: they are drawn from the project's own bins.
        seed: of the first batch; the next number is that of the next.
    """
    if name == "one":
        return [Batch("one", 0, (tokens,))]
    drawn = [sample_batch(name, tokens, seed + number, folder=folder) for number in range(count)]
    return [Batch(name, number, tuple(lengths.tolist())) for number, lengths in enumerate(drawn)]


def plan_for(name: str, batch: Batch, scale: Scale, nodes: int) -> Plan:
    """Return the plan of a variant, decided for the real layer.

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
    """Return the same plan for the narrower rows that really travel: the same rows, tiles and messages."""

    wire = scale.wire
    return replace(
        plan,
        attention=wire,
        forward=replace(plan.forward, attention=wire),
        backward=replace(plan.backward, attention=wire),
        parts=tuple(narrowed(part, scale) for part in plan.parts),
    )
