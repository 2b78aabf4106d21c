"""Measured seconds of kernels and links, from this machine or a CSV file, and the fits to them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cluster.fit import AttentionFit, RateFit, fit_attention, fit_rate
from mindspeed_cp.errors import ConfigError

#: Measured kinds, and the CSV columns with the amount of work of each.
MEASURED_KINDS = {
    "attention": ("flops", "short_side", "calls"),
    "linear": ("flops",),
    "in_node": ("bytes",),
    "in_node_all": ("bytes",),
    "network": ("bytes",),
    "network_all": ("bytes",),
    "posting": ("calls",),
}
CSV_COLUMNS = ("kind", "seconds", "flops", "short_side", "calls", "bytes")


@dataclass(frozen=True)
class Measurement:
    """Measured seconds of a kernel or a message.

    Attributes:
        kind: "attention", a kernel; "linear", a matrix product; "in_node" or "network", a single one-way message inside
            a node or between nodes; "in_node_all", every rank of a node sends to every other at once; "network_all",
            every rank of a node sends to its counterpart on another node at once; "posting", messages that a rank
            posts.
        seconds: measured seconds.
        flops: for attention (forward 2 * pairs * heads * (head_dim + head_dim_v), backward 2.5 times that) and linear.
        short_side: for attention: rows of the shorter side of the tile.
        calls: for attention: number of kernel calls; for posting: number of messages.
        bytes: of the message; for "_all" kinds the sum of all messages that a rank sends.
    """

    kind: str
    seconds: float
    flops: float = 0.0
    short_side: float = 0.0
    calls: float = 1.0
    bytes: float = 0.0


@dataclass(frozen=True)
class MeasuredFits:
    """Fits to measurements; None for a kind that was not measured.

    Attributes:
        attention, linear, in_node, network: fitted models.
        in_node_all, network_all: total bytes/second that a rank sends in its node, or that a node sends.
        posting: seconds to post a message.
    """

    attention: AttentionFit | None = None
    linear: RateFit | None = None
    in_node: RateFit | None = None
    network: RateFit | None = None
    in_node_all: float | None = None
    network_all: float | None = None
    posting: float | None = None

    @staticmethod
    def from_measurements(measurements: Iterable[Measurement], ranks_per_node: int = 1) -> MeasuredFits:
        """Fit every measured kind.

        Args:
            measurements: measurements of any kinds.
            ranks_per_node: number of ranks that send in "network_all".

        Raises:
            ConfigError: A kind has too few measurements, or they determine no rate.
        """
        kinds: dict[str, list[Measurement]] = {}
        for measurement in measurements:
            kinds.setdefault(measurement.kind, []).append(measurement)

        def column(kind: str, name: str) -> np.ndarray:
            return np.array([getattr(measurement, name) for measurement in kinds[kind]], np.float64)

        def rate(kind: str, name: str) -> RateFit | None:
            return fit_rate(kind, column(kind, name), column(kind, "seconds")) if kind in kinds else None

        def highest_rate(kind: str) -> float | None:
            return float((column(kind, "bytes") / column(kind, "seconds")).max()) if kind in kinds else None

        attention = None
        if "attention" in kinds:
            columns = [column("attention", name) for name in ("flops", "short_side", "calls", "seconds")]
            attention = fit_attention(*columns)
        posting = None
        if "posting" in kinds:
            posting = float(np.median(column("posting", "seconds") / column("posting", "calls")))
        network_all = highest_rate("network_all")
        return MeasuredFits(
            attention,
            rate("linear", "flops"),
            rate("in_node", "bytes"),
            rate("network", "bytes"),
            highest_rate("in_node_all"),
            None if network_all is None else network_all * ranks_per_node,
            posting,
        )

    def table(self) -> dict[str, dict[str, float]]:
        """Return the quality of each fit: {"attention": {"points", "median_error", "largest_error"}, ...}."""
        models = {name: getattr(self, name) for name in ("attention", "linear", "in_node", "network")}
        return {name: model.fit.summary() for name, model in models.items() if model is not None}


def read_measurements(path: str | Path) -> list[Measurement]:
    """Read a CSV file with columns from :data:`CSV_COLUMNS`.

    Cells that a kind does not need may be empty, unused columns may be missing, and `calls` defaults to 1.

    Raises:
        ConfigError: The file cannot be read, a column or kind is unknown, or a number is missing or not positive; the
            message gives the line.
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
    unknown = [column for column in header if column not in CSV_COLUMNS]
    missing = [column for column in ("kind", "seconds") if column not in header]
    if unknown or missing or len(set(header)) < len(header):
        wrong = (
            f"column {unknown[0]!r} is unknown" if unknown else f"column {missing[0]!r} is missing" if missing else ""
        )
        raise ConfigError(f"{name}:1: {wrong or 'a column is given twice'}; valid: {', '.join(CSV_COLUMNS)}")
    measurements = [_row(row, f"{name}:{reader.line_num}") for row in reader]
    if not measurements:
        raise ConfigError(f"{name}: there are no measurements in it; give rows of {', '.join(CSV_COLUMNS)}")
    return measurements


def _row(row: dict[Any, Any], location: str) -> Measurement:
    kind = (row["kind"] or "").strip()
    if kind not in MEASURED_KINDS:
        raise ConfigError(f"{location}: kind {kind!r}: valid: {', '.join(MEASURED_KINDS)}")
    if "" in row:
        raise ConfigError(f"{location}: has more cells than there are columns")
    values: dict[str, float] = {}
    for column in ("seconds", *MEASURED_KINDS[kind]):
        cell = (row.get(column) or "").strip()
        if not cell and column == "calls":
            continue
        try:
            values[column] = float(cell)
        except ValueError:
            values[column] = math.nan
        if not 0 < values[column] < math.inf:
            raise ConfigError(f"{location}: {column} of {kind} is {cell!r}; valid: a number above 0")
    return Measurement(kind, **values)
