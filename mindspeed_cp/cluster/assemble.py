"""A cluster out of what was measured, what a preset says of the rest, and what nobody said."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.cost.measurements import Fits
from mindspeed_cp.errors import ConfigError

#: Links of one rank that reach together more than one of them alone, by this factor, are links of their own.
MESH = 1.3


@dataclass
class Assembly:
    """The values of a cluster and where each is from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, source: str, **values: Any) -> None:
        """Set values, all from one source."""
        self.values.update(values)
        self.sources.update(dict.fromkeys(values, source))


def assemble(
    name: str,
    fits: Fits,
    *,
    ranks_per_node: int | None,
    memory: float,
    base: Cluster | None = None,
    peak_flops: float | None = None,
) -> tuple[Cluster, dict[str, str]]:
    """Make a cluster.

    Args:
        name: of the new preset.
        fits: what was measured; attention and linear must be there, links unless there is a base.
        ranks_per_node: ranks among which links were measured; None: those of the base, or 1.
        memory: bytes of a device of this machine, used without a base.
        base: gives what was not measured.
        peak_flops: of the device, bf16 and dense; default: of the base, else the highest rate measured.

    Returns:
        The cluster and for each of its keys where the value is from.

    Raises:
        ConfigError: something is neither measured nor in a base, or a measured rate is above the peak.
    """
    made = Assembly()
    made.put("given", name=name)
    if base is not None:
        base = base if ranks_per_node is None else base.with_ranks(ranks_per_node)
        made.put(f"base {base.name}", **{k: v for k, v in dataclasses.asdict(base).items() if k != "name"})
    else:
        made.put("this machine", memory=float(memory))
        made.put("measured" if ranks_per_node else "assumed: one rank", ranks_per_node=ranks_per_node or 1)
    _kernels(made, fits, peak_flops)
    _links(made, fits, base)
    return Cluster(**made.values), made.sources


def _kernels(made: Assembly, fits: Fits, peak_flops: float | None) -> None:
    if fits.attention is None or fits.linear is None:
        what = "attention" if fits.attention is None else "linear"
        raise ConfigError(f"{what}: nothing was measured")
    if peak_flops is not None:
        made.put("given", peak_flops=float(peak_flops))
    elif "peak_flops" not in made.values:
        best = max(fits.attention.rate, fits.linear.rate)
        made.put("measured: the highest rate of attention and linear layers", peak_flops=best)
    peak = made.values["peak_flops"]
    for what, rate in (("attention", fits.attention.rate), ("linear", fits.linear.rate)):
        if rate > peak:
            raise ConfigError(
                f"peak_flops = {peak:g} ({made.sources['peak_flops']}): {what} was measured at {rate:.4g} FLOP/s; give "
                "the --base of this device, or its --peak-flops"
            )
    made.put(
        "measured",
        attention_efficiency=fits.attention.rate / peak,
        tile_rows=fits.attention.tile_rows,
        launch=fits.attention.launch,
        linear_efficiency=fits.linear.rate / peak,
    )


def _links(made: Assembly, fits: Fits, base: Cluster | None) -> None:
    if fits.in_node is None and fits.network is None and base is not None:
        return  # all links are the base's, with its communication_efficiency
    if fits.in_node is None and base is None:
        raise ConfigError(
            "links in a node: not measured; start at least 2 ranks (--nproc 2, or torchrun), give --csv with rows of "
            "in_node, or a --base"
        )
    made.put("measured bandwidths are what transfers reach", communication_efficiency=1.0)
    if fits.in_node is not None:
        _in_node(made, fits)
    elif base is not None:
        made.put(
            f"base {base.name}, times its communication_efficiency",
            pair_bandwidth=base.effective_pair,
            rank_bandwidth=base.effective_rank,
        )
    if fits.network is not None:
        _network(made, fits)
    elif base is not None:
        made.put(f"base {base.name}, times its communication_efficiency", nic_bandwidth=base.effective_nic)
    else:
        made.put(
            "assumed: as in the node, no link between nodes was measured",
            nics_per_node=made.values["ranks_per_node"],
            nic_bandwidth=made.values["pair_bandwidth"],
            network_latency=made.values["in_node_latency"],
        )


def _in_node(made: Assembly, fits: Fits) -> None:
    assert fits.in_node is not None
    pair, others = fits.in_node.rate, max(1, made.values["ranks_per_node"] - 1)
    together = fits.in_node_all or pair
    mesh = others > 1 and together > MESH * pair
    made.put(
        "measured",
        fabric="mesh" if mesh else "switch",
        pair_bandwidth=pair,
        rank_bandwidth=min(together, pair * others) if mesh else pair,
        in_node_latency=fits.in_node.start,
    )


def _network(made: Assembly, fits: Fits) -> None:
    assert fits.network is not None
    alone = fits.network.rate
    if fits.network_all is None:
        if "nics_per_node" not in made.values:
            made.put("assumed: a NIC for each rank", nics_per_node=made.values["ranks_per_node"])
        made.put("measured", nic_bandwidth=alone, network_latency=fits.network.start)
        return
    nics = min(max(1, round(fits.network_all / alone)), made.values["ranks_per_node"])
    made.put(
        "measured: all ranks of a node at once",
        nics_per_node=nics,
        nic_bandwidth=min(alone, fits.network_all / nics),
    )
    made.put("measured", network_latency=fits.network.start)


def write_preset(path: str | Path, cluster: Cluster, sources: dict[str, str], title: str) -> None:
    """Write a YAML file from which :func:`mindspeed_cp.cost.load_cluster` makes the same cluster, with the source of
    each number.

    Raises:
        ConfigError: it cannot be written.
    """
    lines = [f"# {title}"]
    for key, value in dataclasses.asdict(cluster).items():
        lines.append(f"{key}: {json.dumps(value)}  # {sources[key]}")
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
