"""Measured seconds of kernels and links, from this machine or from a CSV file, and what is fitted to them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cost.fit import AttentionFit, RateFit, fit_attention, fit_rate
from mindspeed_cp.errors import ConfigError

#: What is measured, and the columns that say how much of it.
KINDS = {
    "attention": ("flops", "short_side", "calls"),
    "linear": ("flops",),
    "in_node": ("bytes",),
    "in_node_all": ("bytes",),
    "network": ("bytes",),
    "network_all": ("bytes",),
}
COLUMNS = ("kind", "seconds", "flops", "short_side", "calls", "bytes")


@dataclass(frozen=True)
class Measurement:
    """Seconds of one thing.

    Attributes:
        kind: "attention", a kernel; "linear", a product of matrices; "in_node" or "network", a message one way between
            two ranks of a node, or of two, when nothing else runs; "in_node_all", every rank sends to every other of
            its node at once and receives as much; "network_all", every rank of a node sends to its like of another.
        seconds: measured.
        flops: of attention (forward 2 * pairs * heads * (head_dim + head_dim_v), backward 2.5 times that) and linear.
        short_side: of attention: rows of the shorter side of the tile.
        calls: of attention: kernel calls in those seconds.
        bytes: of a message; with "_all", that a rank sends in all.
    """

    kind: str
    seconds: float
    flops: float = 0.0
    short_side: float = 0.0
    calls: float = 1.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Fits:
    """What measurements say; None where nothing of the kind was measured.

    Attributes:
        attention, linear, in_node, network: fitted models.
        in_node_all, network_all: bytes/second that a rank, or all ranks of a node, send in all at once.
    """

    attention: AttentionFit | None = None
    linear: RateFit | None = None
    in_node: RateFit | None = None
    network: RateFit | None = None
    in_node_all: float | None = None
    network_all: float | None = None

    @staticmethod
    def of(found: Iterable[Measurement], ranks_per_node: int = 1) -> Fits:
        """Fit every kind that is there.

        Args:
            found: measurements of any kinds.
            ranks_per_node: ranks that send in a "network_all".

        Raises:
            ConfigError: of a kind there are too few, or they do not tell a rate.
        """
        kinds: dict[str, list[Measurement]] = {}
        for one in found:
            kinds.setdefault(one.kind, []).append(one)

        def column(kind: str, name: str) -> np.ndarray:
            return np.array([getattr(one, name) for one in kinds[kind]], np.float64)

        def rate(kind: str, name: str) -> RateFit | None:
            return fit_rate(kind, column(kind, name), column(kind, "seconds")) if kind in kinds else None

        def together(kind: str) -> float | None:
            return float((column(kind, "bytes") / column(kind, "seconds")).max()) if kind in kinds else None

        attention = None
        if "attention" in kinds:
            parts = [column("attention", name) for name in ("flops", "short_side", "calls", "seconds")]
            attention = fit_attention(*parts)
        rails = together("network_all")
        return Fits(
            attention,
            rate("linear", "flops"),
            rate("in_node", "bytes"),
            rate("network", "bytes"),
            together("in_node_all"),
            None if rails is None else rails * ranks_per_node,
        )

    def table(self) -> dict[str, dict[str, float]]:
        """How well each model fits: {"attention": {"points", "median_error", "largest_error"}, ...}."""
        models = {name: getattr(self, name) for name in ("attention", "linear", "in_node", "network")}
        return {name: model.fit.summary() for name, model in models.items() if model is not None}


def read_measurements(path: str | Path) -> list[Measurement]:
    """Read a CSV file with the columns of :data:`COLUMNS`; cells that a kind does not need may be empty, and columns
    that none needs may be missing.  `calls` is 1 where it is empty.

    Raises:
        ConfigError: the file cannot be read, a column or kind is unknown, or a number is missing or not above 0; with
            the line.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file; give a CSV file of measurements") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    reader = csv.DictReader(text.splitlines(), restkey="")
    header = [str(column) for column in reader.fieldnames or ()]
    unknown = [column for column in header if column not in COLUMNS]
    missing = [column for column in ("kind", "seconds") if column not in header]
    if unknown or missing or len(set(header)) < len(header):
        wrong = (
            f"column {unknown[0]!r} is unknown" if unknown else f"column {missing[0]!r} is missing" if missing else ""
        )
        raise ConfigError(f"{name}:1: {wrong or 'a column is given twice'}; valid: {', '.join(COLUMNS)}")
    found = [_row(row, f"{name}:{reader.line_num}") for row in reader]
    if not found:
        raise ConfigError(f"{name}: there are no measurements in it; give rows of {', '.join(COLUMNS)}")
    return found


def _row(row: dict[Any, Any], place: str) -> Measurement:
    kind = (row["kind"] or "").strip()
    if kind not in KINDS:
        raise ConfigError(f"{place}: kind {kind!r}: valid: {', '.join(KINDS)}")
    if "" in row:
        raise ConfigError(f"{place}: has more cells than there are columns")
    values: dict[str, float] = {}
    for column in ("seconds", *KINDS[kind]):
        cell = (row.get(column) or "").strip()
        if not cell and column == "calls":
            continue
        try:
            values[column] = float(cell)
        except ValueError:
            values[column] = math.nan
        if not 0 < values[column] < math.inf:
            raise ConfigError(f"{place}: {column} of {kind} is {cell!r}; valid: a number above 0")
    return Measurement(kind, **values)
