"""A cluster assembled from measurements, a base preset, and assumptions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_cp.cluster.cluster import DEFAULT_POSTING, Cluster
from mindspeed_cp.cluster.measurements import MeasuredFits
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
            "links in a node: not measured; start at least 2 ranks (--nproc 2, or torchrun), give --csv with rows of "
            "in_node, or a --base"
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
