"""A cluster assembled from measurements, a base preset, and assumptions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cluster.cluster import DEFAULT_POSTING, Cluster
from mindspeed_cp.errors import ConfigError

#: If all links of a rank together exceed the bandwidth of one by this factor, the fabric is a mesh.
MESH_ABOVE = 1.3


@dataclass
class ClusterDraft:
    """Values of a cluster and the source of each."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, source: str, **values: Any) -> None:
        """Set values that have the same source."""
        self.values.update(values)
        self.sources.update(dict.fromkeys(values, source))


def assemble_cluster(
    name: str,
    fits: MeasuredFits,
    *,
    ranks_per_node: int | None,
    memory: float,
    base: Cluster | None = None,
    peak_flops: float | None = None,
) -> tuple[Cluster, dict[str, str]]:
    """Assemble a cluster.

    Args:
        name: name of the new preset.
        fits: fits to the measurements; attention and linear are required, links only without a base.
        ranks_per_node: number of ranks among which links were measured; None: that of the base, or 1.
        memory: bytes of a device of this machine, used without a base.
        base: source of values that were not measured.
        peak_flops: dense bf16 peak of the device; default: that of the base, or the highest measured rate.

    Returns:
        The cluster, and the source of each of its values.

    Raises:
        ConfigError: A value is neither measured nor in the base, or a measured rate exceeds the peak.
    """
    draft = ClusterDraft()
    draft.put("given", name=name)
    if base is not None:
        base = base if ranks_per_node is None else base.with_ranks(ranks_per_node)
        draft.put(f"base {base.name}", **{k: v for k, v in dataclasses.asdict(base).items() if k != "name"})
    else:
        draft.put("this machine", memory=float(memory))
        draft.put("measured" if ranks_per_node else "assumed: one rank", ranks_per_node=ranks_per_node or 1)
    _kernels(draft, fits, peak_flops)
    _links(draft, fits, base)
    if fits.posting is not None:
        draft.put("measured", posting=fits.posting)
    elif base is None:
        draft.put("assumed: the presets'", posting=DEFAULT_POSTING)
    return Cluster(**draft.values), draft.sources


def _kernels(draft: ClusterDraft, fits: MeasuredFits, peak_flops: float | None) -> None:
    if fits.attention is None or fits.linear is None:
        what = "attention" if fits.attention is None else "linear"
        raise ConfigError(f"{what}: nothing was measured")
    if peak_flops is not None:
        draft.put("given", peak_flops=float(peak_flops))
    elif "peak_flops" not in draft.values:
        best = max(fits.attention.rate, fits.linear.rate)
        draft.put("measured: the highest rate of attention and linear layers", peak_flops=best)
    peak = draft.values["peak_flops"]
    for what, rate in (("attention", fits.attention.rate), ("linear", fits.linear.rate)):
        if rate > peak:
            raise ConfigError(
                f"peak_flops = {peak:g} ({draft.sources['peak_flops']}): {what} was measured at {rate:.4g} FLOP/s; "
                f"give "
                "the --base of this device, or its --peak-flops"
            )
    draft.put(
        "measured",
        attention_efficiency=fits.attention.rate / peak,
        tile_rows=fits.attention.tile_rows,
        launch=fits.attention.launch,
        linear_efficiency=fits.linear.rate / peak,
    )


def _links(draft: ClusterDraft, fits: MeasuredFits, base: Cluster | None) -> None:
    if fits.in_node is None and fits.network is None and base is not None:
        return  # the base's links and communication_efficiency
    if fits.in_node is None and base is None:
        raise ConfigError(
            "links in a node: not measured; start at least 2 ranks (--nproc 2, or torchrun), or give a --base"
        )
    draft.put("measured bandwidths are what transfers reach", communication_efficiency=1.0)
    if fits.in_node is not None:
        _in_node(draft, fits)
    elif base is not None:
        draft.put(
            f"base {base.name}, times its communication_efficiency",
            pair_bandwidth=base.effective_pair,
            rank_bandwidth=base.effective_rank,
        )
    if fits.network is not None:
        _network(draft, fits)
    elif base is not None:
        draft.put(f"base {base.name}, times its communication_efficiency", nic_bandwidth=base.effective_nic)
    else:
        draft.put(
            "assumed: as in the node, no link between nodes was measured",
            nics_per_node=draft.values["ranks_per_node"],
            nic_bandwidth=draft.values["pair_bandwidth"],
            network_latency=draft.values["in_node_latency"],
        )


def _in_node(draft: ClusterDraft, fits: MeasuredFits) -> None:
    assert fits.in_node is not None
    pair, peers = fits.in_node.rate, max(1, draft.values["ranks_per_node"] - 1)
    all_pairs = fits.in_node_all or pair
    mesh = peers > 1 and all_pairs > MESH_ABOVE * pair
    draft.put(
        "measured",
        fabric="mesh" if mesh else "switch",
        pair_bandwidth=pair,
        rank_bandwidth=min(all_pairs, pair * peers) if mesh else pair,
        in_node_latency=fits.in_node.overhead,
    )


def _network(draft: ClusterDraft, fits: MeasuredFits) -> None:
    assert fits.network is not None
    one_nic = fits.network.rate
    if fits.network_all is None:
        if "nics_per_node" not in draft.values:
            draft.put("assumed: a NIC for each rank", nics_per_node=draft.values["ranks_per_node"])
        draft.put("measured", nic_bandwidth=one_nic, network_latency=fits.network.overhead)
        return
    nics = min(max(1, round(fits.network_all / one_nic)), draft.values["ranks_per_node"])
    draft.put(
        "measured: all ranks of a node at once",
        nics_per_node=nics,
        nic_bandwidth=min(one_nic, fits.network_all / nics),
    )
    draft.put("measured", network_latency=fits.network.overhead)


def write_preset(path: str | Path, cluster: Cluster, sources: dict[str, str], title: str) -> None:
    """Write a preset file that :func:`mindspeed_cp.cluster.load_cluster` reads, with the source of each value.

    Raises:
        ConfigError: The file cannot be written.
    """
    lines = [f"# {title}"]
    for key, value in dataclasses.asdict(cluster).items():
        lines.append(f"{key}: {json.dumps(value)}  # {sources[key]}")
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


# Measured seconds of kernels and links, and the fits to them.


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


# Fits of a cluster's attention, linear layers and links to measured seconds.
#
# Each model is a sum of terms with non-negative factors, which minimize the sum of
# (modelled - measured)^2 / (modelled * measured). This weighs relative errors: half the measured time counts as much as
# twice the measured time, on short kernels as on long ones. The sum is a convex function of the factors.


_MAX_STEPS, _MIN_DECREASE = 100, 1e-20  # of Newton's method, which takes about ten steps


@dataclass(frozen=True)
class Fit:
    """Factors of a model and the errors of the fit.

    Attributes:
        factors: fp64 [terms], non-negative.
        errors: fp64 [points], modelled / measured - 1.
    """

    factors: np.ndarray
    errors: np.ndarray

    def summary(self) -> dict[str, float]:
        """Return {"points", "median_error", "largest_error"}: absolute values of the relative errors."""
        errors = np.abs(self.errors)
        return {
            "points": len(errors),
            "median_error": float(np.median(errors)),
            "largest_error": float(errors.max()),
        }


@dataclass(frozen=True)
class AttentionFit:
    """seconds = calls * launch + flops / rate * (1 + tile_rows / short_side)."""

    rate: float
    tile_rows: float
    launch: float
    fit: Fit


@dataclass(frozen=True)
class RateFit:
    """seconds = overhead + amount / rate: a link's latency and bytes/second, or a product's launch and FLOP/s."""

    rate: float
    overhead: float
    fit: Fit


def fit_attention(flops: np.ndarray, short_side: np.ndarray, calls: np.ndarray, seconds: np.ndarray) -> AttentionFit:
    """Fit the attention model of :class:`mindspeed_cp.cluster.ComputeCost`.

    Args:
        flops: FLOPs of each measurement, fp64 [points].
        short_side: rows of the shorter side of the tiles.
        calls: kernel calls.
        seconds: measured seconds.

    Raises:
        ConfigError: There are fewer than 3 measurements, or they determine no rate.
    """
    flops, short, calls, seconds = (np.asarray(x, np.float64) for x in (flops, short_side, calls, seconds))
    _enough("attention", seconds, 3)
    fit = fit_terms(np.stack([calls, flops, flops / short], axis=1), seconds)
    launch, inverse, tile = fit.factors
    if inverse <= 0:
        raise ConfigError(
            "attention: no rate can be told from these measurements, whose seconds do not grow with their FLOPs where "
            "tiles are long; measure longer tiles (calibrate --longest)"
        )
    return AttentionFit(float(1 / inverse), float(tile / inverse), float(launch), fit)


def fit_rate(what: str, amount: np.ndarray, seconds: np.ndarray) -> RateFit:
    """Fit an overhead and a rate.

    Args:
        what: name of the measured thing for error messages.
        amount: bytes or FLOPs, fp64 [points].
        seconds: measured seconds.

    Raises:
        ConfigError: There are fewer than 2 measurements, or they determine no rate.
    """
    amount, seconds = np.asarray(amount, np.float64), np.asarray(seconds, np.float64)
    _enough(what, seconds, 2)
    fit = fit_terms(np.stack([np.ones_like(amount), amount], axis=1), seconds)
    overhead, inverse = fit.factors
    if inverse <= 0:
        raise ConfigError(
            f"{what}: no rate can be told from these measurements, whose seconds do not grow with their size; measure "
            "larger ones too"
        )
    return RateFit(float(1 / inverse), float(overhead), fit)


def fit_terms(terms: np.ndarray, seconds: np.ndarray) -> Fit:
    """Return the factors >= 0 that minimize the sum of (modelled - measured)^2 / (modelled * measured).

    These are the best among the unconstrained minima of all subsets of terms that have positive factors.

    Args:
        terms: fp64 [points, terms], non-negative; each term and each point has a positive entry.
        seconds: fp64 [points], positive.
    """
    ratios = terms / seconds[:, None]
    scale = ratios.mean(axis=0)
    best, least = np.zeros(terms.shape[1]), np.inf
    for size in range(1, terms.shape[1] + 1):
        for columns in map(list, combinations(range(terms.shape[1]), size)):
            minimum = _newton(ratios[:, columns] / scale[columns])
            if minimum is not None and minimum[1] < least:
                best, least = np.zeros(terms.shape[1]), minimum[1]
                best[columns] = minimum[0] / scale[columns]
    return Fit(best, ratios @ best - 1.0)


def _newton(ratios: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return the factors with the least sum of y + 1 / y - 2 for y = ratios @ factors > 0, and that sum; None if a
    factor is not positive."""
    if not (ratios > 0).any(axis=1).all():
        return None
    factors = np.full(ratios.shape[1], 1.0 / ratios.shape[1])
    y = ratios @ factors
    for _ in range(_MAX_STEPS):
        slope = ratios.T @ (1.0 - 1.0 / y**2)
        curve = (ratios * (2.0 / y**3)[:, None]).T @ ratios
        step = np.linalg.lstsq(curve, -slope, rcond=None)[0]
        down = float(slope @ step)
        if -down < _MIN_DECREASE:
            break
        change, length, cost = ratios @ step, 1.0, float((y + 1.0 / y).sum())
        while length > 1e-12:
            new = y + length * change
            if (new > 0).all() and float((new + 1.0 / new).sum()) <= cost + 0.1 * length * down:
                break
            length /= 2
        else:
            break  # the limit of fp64
        factors, y = factors + length * step, new
    return (factors, float(((y - 1.0) ** 2 / y).sum())) if (factors > 0).all() else None


def _enough(what: str, seconds: np.ndarray, least: int) -> None:
    if len(seconds) < least:
        raise ConfigError(f"{what}: {len(seconds)} measurements; at least {least} of different sizes are needed")
