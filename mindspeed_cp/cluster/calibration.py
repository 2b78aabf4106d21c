"""A cluster assembled from measurements, a base preset, and assumptions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.cluster.cluster import DEFAULT_POSTING, Cluster, KernelTime
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
    device: str = "",
    kernel_times: Sequence[KernelTime] = (),
) -> tuple[Cluster, dict[str, str]]:
    """Assemble a cluster.

    Args:
        name: name of the new preset.
        fits: fits to the measurements; attention and linear are required, links only without a base.
        ranks_per_node: number of ranks among which links were measured; None: that of the base, or 1.
        memory: bytes of a device of this machine, used without a base.
        base: source of values that were not measured.
        peak_flops: dense bf16 peak of the device; default: that of the base, or the highest measured rate.
        device: name of the device.
        kernel_times: measured times of its kernels.

    Returns:
        The cluster, and the source of each of its values.

    Raises:
        ConfigError: A value is neither measured nor in the base, or a measured rate exceeds the peak.
    """
    draft = ClusterDraft()
    draft.put("given", name=name)
    if base is not None:
        base = base if ranks_per_node is None else base.with_ranks(ranks_per_node)
        draft.put(f"base {base.name}", **base.model_dump(exclude={"name"}))
    else:
        draft.put("this machine", memory=float(memory))
        draft.put("measured" if ranks_per_node else "assumed: one rank", ranks_per_node=ranks_per_node or 1)
    draft.put("this machine", device=device)
    draft.put("measured", kernel_times=tuple(kernel_times))
    _kernels(draft, fits, peak_flops)
    _links(draft, fits, base)
    if fits.posting is not None:
        draft.put("measured", posting=fits.posting)
    elif base is None:
        draft.put("assumed: the presets'", posting=DEFAULT_POSTING)
    source = "the largest error of each fit"
    ranges = {}
    if base is not None:  # of values that are still its own
        ranges = {key: ends for key, ends in base.ranges.items() if draft.sources[key] == f"base {base.name}"}
        source += f", else base {base.name}"
    draft.put(source, ranges=ranges | _ranges(draft.values, fits))
    return Cluster(**draft.values), draft.sources


def _ranges(values: dict[str, Any], fits: MeasuredFits) -> dict[str, tuple[float, float]]:
    """Return the ranges of what was measured, by the largest relative error of each fit; a host that is ahead of its
    device hides all posting."""
    fit_of = {
        "attention_efficiency": fits.attention, "launch": fits.attention, "linear_efficiency": fits.linear,
        "in_node_latency": fits.in_node, "network_latency": fits.network,
    }  # fmt: skip
    out: dict[str, tuple[float, float]] = {}
    for name, fit in fit_of.items():
        if fit is not None:
            error = float(np.abs(fit.errors).max())
            out[name] = values[name] / (1 + error), min(values[name] * (1 + error), 1.0)
    if fits.posting is not None:
        out["posting"] = 0.0, fits.posting
    return out


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
                "give the --base of this device, or its --peak-flops"
            )
    draft.put(
        "measured",
        attention_efficiency=fits.attention.rate / peak,
        tile_rows=fits.attention.tile_rows,
        launch=fits.attention.overhead,
        linear_efficiency=fits.linear.rate / peak,
    )


def _links(draft: ClusterDraft, fits: MeasuredFits, base: Cluster | None) -> None:
    if fits.in_node is None and fits.network is None and base is not None:
        return  # the base's links and communication_efficiency
    if fits.in_node is None and base is None:
        raise ConfigError(
            "links in a node: not measured; start at least 2 ranks of a node with torchrun, or give a --base"
        )
    draft.put("measured bandwidths are what transfers reach", communication_efficiency=1.0)
    if fits.in_node is not None:
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
    elif base is not None:
        draft.put(
            f"base {base.name}, times its communication_efficiency",
            pair_bandwidth=base.effective_pair,
            rank_bandwidth=base.effective_rank,
        )
    if fits.network is not None:
        _network(draft, fits.network, fits.network_all)
    elif base is not None:
        draft.put(f"base {base.name}, times its communication_efficiency", nic_bandwidth=base.effective_nic)
    else:
        draft.put(
            "assumed: as in the node, no link between nodes was measured",
            nics_per_node=draft.values["ranks_per_node"],
            nic_bandwidth=draft.values["pair_bandwidth"],
            network_latency=draft.values["in_node_latency"],
        )


def _network(draft: ClusterDraft, fit: Fit, whole_node: float | None) -> None:
    rate, ranks = fit.rate, draft.values["ranks_per_node"]
    draft.put("measured", nic_bandwidth=rate, network_latency=fit.overhead)
    if whole_node is not None:
        nics = min(max(1, round(whole_node / rate)), ranks)
        draft.put(
            "measured: all ranks of a node at once", nics_per_node=nics, nic_bandwidth=min(rate, whole_node / nics)
        )
    elif "nics_per_node" not in draft.values:
        draft.put("assumed: a NIC for each rank", nics_per_node=ranks)


def preset_values(cluster: Cluster) -> dict[str, Any]:
    """Return the keys of a preset file and their JSON values, without a device and its kernels if none was measured."""
    values = cluster.model_dump(mode="json")
    return {key: value for key, value in values.items() if value or key not in ("device", "kernel_times", "ranges")}


def write_preset(path: str | Path, cluster: Cluster, sources: dict[str, str], title: str) -> None:
    """Write a preset file that :func:`mindspeed_cp.cluster.load_cluster` reads, with the source of each value.

    Raises:
        ConfigError: The file cannot be written.
    """
    lines = [f"# {title}"]
    for key, value in preset_values(cluster).items():
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

    attention: Fit | None = None
    linear: Fit | None = None
    in_node: Fit | None = None
    network: Fit | None = None
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
        rows = list(measurements)

        def column(kind: str, name: str) -> np.ndarray:
            return np.array([getattr(row, name) for row in rows if row.kind == kind], np.float64)

        def fit(kind: str, amount: str, *more: str) -> Fit | None:
            columns = (column(kind, name) for name in ("seconds", amount, *more))
            return fit_seconds(kind, *columns) if any(row.kind == kind for row in rows) else None

        def ratios(kind: str, name: str, over: str) -> np.ndarray | None:
            return column(kind, name) / column(kind, over) if any(row.kind == kind for row in rows) else None

        in_node_all, network_all = (ratios(kind, "bytes", "seconds") for kind in ("in_node_all", "network_all"))
        posting = ratios("posting", "seconds", "calls")
        return MeasuredFits(
            fit("attention", "flops", "short_side", "calls"),
            fit("linear", "flops"),
            fit("in_node", "bytes"),
            fit("network", "bytes"),
            None if in_node_all is None else float(in_node_all.max()),
            None if network_all is None else float(network_all.max()) * ranks_per_node,
            None if posting is None else float(np.median(posting)),
        )

    def table(self) -> dict[str, dict[str, float]]:
        """Return the quality of each fit: {"attention": {"points", "median_error", "largest_error"}, ...}."""
        models = {name: getattr(self, name) for name in ("attention", "linear", "in_node", "network")}
        return {name: model.summary() for name, model in models.items() if model is not None}


# Fits of a cluster's attention, linear layers and links to measured seconds.
#
# Each model is a sum of terms with non-negative factors, which minimize the sum of
# (modelled - measured)^2 / (modelled * measured). This weighs relative errors: half the measured time counts as much as
# twice the measured time, on short kernels as on long ones. The sum is a convex function of the factors.


_MAX_STEPS, _MIN_DECREASE = 100, 1e-20  # of Newton's method, which takes about ten steps


@dataclass(frozen=True)
class Fit:
    """seconds = calls * overhead + amount / rate * (1 + tile_rows / short_side).

    Attributes:
        rate: FLOP/s of a kernel, or bytes/second of a link.
        overhead: launch of a kernel, or latency of a link.
        tile_rows: of attention; 0 for others.
        errors: modelled / measured - 1, fp64 [points].
    """

    rate: float
    overhead: float
    tile_rows: float
    errors: np.ndarray

    def summary(self) -> dict[str, float]:
        """Return {"points", "median_error", "largest_error"}: absolute values of the relative errors."""
        errors = np.abs(self.errors)
        return {
            "points": len(errors),
            "median_error": float(np.median(errors)),
            "largest_error": float(errors.max()),
        }


def fit_seconds(
    what: str,
    seconds: np.ndarray,
    amount: np.ndarray,
    short_side: np.ndarray | None = None,
    calls: np.ndarray | None = None,
) -> Fit:
    """Fit an overhead, a rate and, with short sides, the tile rows of :class:`mindspeed_cp.cluster.ComputeCost`.

    Args:
        what: name of the measured thing for error messages.
        seconds: measured seconds, fp64 [points].
        amount: bytes or FLOPs, fp64 [points].
        short_side: rows of the shorter side of attention tiles, fp64 [points].
        calls: kernel calls, fp64 [points]; default: one each.

    Raises:
        ConfigError: There are fewer measurements than factors, or they determine no rate.
    """
    columns = [np.ones_like(amount) if calls is None else calls, amount]
    if short_side is not None:
        columns.append(amount / short_side)
    if len(seconds) < len(columns):
        raise ConfigError(f"{what}: {len(seconds)} measurements; at least {len(columns)} of different sizes are needed")
    factors, errors = fit_terms(np.stack(columns, axis=1), seconds)
    overhead, inverse, *tile = factors.tolist()
    if inverse <= 0:
        how = (
            "size; measure larger ones too"
            if short_side is None
            else "FLOPs where tiles are long; measure longer tiles (calibrate --longest)"
        )
        raise ConfigError(
            f"{what}: no rate can be told from these measurements, whose seconds do not grow with their {how}"
        )
    return Fit(1 / inverse, overhead, tile[0] / inverse if tile else 0.0, errors)


def fit_terms(terms: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors >= 0 that minimize the sum of (modelled - measured)^2 / (modelled * measured), and the errors
    modelled / measured - 1.

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
    return best, ratios @ best - 1.0


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
