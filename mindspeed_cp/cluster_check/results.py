"""The figures of a check as plain data, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from mindspeed_cp.cluster_check.supervisor import Failure, StageResult

FORMAT = 1


@dataclass
class CheckResults:
    """Everything that was measured; what is missing was not measured, and `failures` says why.

    Attributes:
        request: arguments, as plain data.
        nodes, ranks_per_node: the grid of ranks.
        ranks: facts of each rank, in their order; None for a rank that gave none.
        links: rows of pairs of ranks.
        together: rows of all ranks that send at once, with "rank".
        forwarding: rows of a message between nodes.
        kernels: measurements of each rank, by rank.
        overlap: rows of ranks with a partner, with "rank".
        cluster: {"values", "sources", "fits", "text"} of the fitted cluster; None if it could not be fitted.
        batches: lengths by name.
        algorithms: {"batch", "algorithm", "measured", "predicted", "refused", "wrong", "error", ...}.
        failures: what failed.
        skipped: stages that were left out, since the group of all ranks could not be formed.
        seconds: duration of each stage, by name.
        finished: False until the last stage is done.
    """

    request: dict[str, Any]
    nodes: int
    ranks_per_node: int
    ranks: list[dict[str, Any] | None] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    together: list[dict[str, Any]] = field(default_factory=list)
    forwarding: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    overlap: list[dict[str, Any]] = field(default_factory=list)
    cluster: dict[str, Any] | None = None
    batches: dict[str, list[int]] = field(default_factory=dict)
    algorithms: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    finished: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def add(self, name: str, result: StageResult) -> StageResult:
        """Keep duration and failures of a stage, and return it."""
        self.seconds[name] = self.seconds.get(name, 0.0) + result.seconds
        self.failures += result.failures
        return result

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {"format": FORMAT, **asdict(self)}


def rate_unit(rate: float) -> tuple[str, float]:
    """Return the unit that shows a rate in bytes/second with digits before the point, and its size."""
    return ("GB/s", 1e9) if rate >= 1e9 else ("MB/s", 1e6)


def rate_text(rate: float) -> str:
    """Return a rate in bytes/second with three digits and its unit."""
    unit, size = rate_unit(rate)
    return f"{rate / size:.3g} {unit}"


def rows_by_rank(result: StageResult) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield (rank, row) of all items, without empty rows."""
    for rows in result.rows:
        for rank, row in sorted(rows.items()):
            if row:
                yield rank, row


def median_measurements(kernels: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each kernel's measurement with the median of its seconds over ranks: one slow device does not bend the
    fit."""
    by_size = zip(*kernels.values(), strict=True)
    return [{**rows[0], "seconds": median(row["seconds"] for row in rows)} for rows in by_size]


def layer_seconds(rows: dict[int, dict[str, Any]]) -> float:
    """Return the measured seconds of an algorithm: the median over repeats of the slowest rank."""
    repeats = zip(*(row["seconds"] for row in rows.values()), strict=True)
    return float(median(max(seconds) for seconds in repeats))
