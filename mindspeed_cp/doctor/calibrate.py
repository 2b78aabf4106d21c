"""Implementation of `mindspeed-cp calibrate`: measures links and kernels, fits, writes the preset and prints it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_cp.calibrate.request import CalibrationRequest
from mindspeed_cp.cluster.assemble import assemble_cluster, write_preset
from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.cluster.measurements import MeasuredFits, Measurement, read_measurements
from mindspeed_cp.device.select import resolve_device_type
from mindspeed_cp.errors import ConfigError

DEFAULT_MAX_TILE_ROWS, DEFAULT_HIDDEN_SIZE = {"cpu": 2048, "npu": 16384}, {"cpu": 1024, "npu": 4096}
BAD_FIT_ERROR = 0.15
LINK_KINDS = ("in_node", "in_node_all", "network", "network_all")


def measure(request: CalibrationRequest, *, as_json: bool) -> None:
    """Measure, fit, write the preset and print it.

    Raises:
        ConfigError: an argument is not valid, or a value can neither be measured here nor read from a base.
        PeerError: a rank failed while measuring links.
    """
    base = request.check()
    kind = resolve_device_type(request.device)
    given = [] if request.csv is None else read_measurements(request.csv)
    given_kinds = {measurement.kind for measurement in given}
    links, ranks = _measure_links(request, kind, given_kinds, base)
    links = [measurement for measurement in links if measurement.kind not in given_kinds]
    if os.environ.get("RANK", "0") != "0":
        return
    measurements = [*given, *links, *_measure_kernels(request, kind, given_kinds)]
    fits = MeasuredFits.from_measurements(measurements, ranks or (1 if base is None else base.ranks_per_node))
    cluster, sources = assemble_cluster(
        request.name or request.out.stem,
        fits,
        ranks_per_node=ranks,
        memory=_memory(kind, ranks or 1),
        base=base,
        peak_flops=request.peak_flops,
    )
    if request.csv is not None:
        sources = {key: _source_with_file(source, request.csv, given_kinds, key) for key, source in sources.items()}
    sizes = f"{request.dtype}, {request.heads} heads of {request.head_dim}"
    title = f"Fitted by mindspeed-cp calibrate on {_device_name(kind)}, {sizes}"
    write_preset(request.out, cluster, sources, title)
    _print(request.out, cluster, sources, fits, measurements, as_json=as_json)


def _measure_links(
    request: CalibrationRequest, kind: str, given: set[str], base: Cluster | None
) -> tuple[list[Measurement], int | None]:
    """Return measurements of links, and the number of ranks of a node; None if unknown."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and request.nproc is not None:
        raise ConfigError(f"--nproc {request.nproc}: the launcher has set the number of ranks; leave --nproc out")
    if given & set(LINK_KINDS):
        if launched:
            raise ConfigError(f"{request.csv}: has rows of links; start one process, not several ranks")
        if base is None and request.nproc is None:
            raise ConfigError(
                f"{request.csv}: has rows of links, but not of how many ranks of a node; give --nproc, or a "
                "--base with its ranks_per_node"
            )
        return [], request.nproc
    if launched:
        return _measure_launched(kind)
    ranks = request.nproc if request.nproc is not None else _default_ranks(kind)
    if ranks == 1:
        if base is None:
            raise ConfigError(
                "--nproc 1: links cannot be measured with one rank; give --nproc 2 or more, --csv with rows of "
                "in_node, or a --base that has them"
            )
        return [], None
    if base is not None:
        base.with_ranks(ranks)
    if kind == "npu" and ranks > _default_ranks(kind):
        raise ConfigError(f"--nproc {ranks}: this machine has {_default_ranks(kind)} NPUs; every rank needs its own")
    from mindspeed_cp.calibrate.links import measure_local_links

    return measure_local_links(kind, ranks), ranks


def _measure_launched(kind: str) -> tuple[list[Measurement], int]:
    import torch
    import torch.distributed as dist

    from mindspeed_cp.calibrate.links import join_process_group, measure_links, npu_device

    try:
        local_size, local_rank = (int(os.environ.get(name, "")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    except ValueError:
        raise ConfigError("LOCAL_WORLD_SIZE and LOCAL_RANK are not set; start the ranks with torchrun") from None
    if int(os.environ["WORLD_SIZE"]) == 1:
        raise ConfigError("WORLD_SIZE = 1: links cannot be measured with one rank; start 2 or more")
    device = torch.device("cpu") if kind == "cpu" else npu_device(local_rank)
    join_process_group(device)
    try:
        return measure_links(device, local_size), local_size
    finally:
        dist.destroy_process_group()


def _default_ranks(kind: str) -> int:
    if kind == "cpu":
        return 2
    from mindspeed_cp.device.select import load_npu

    return int(load_npu("--device npu", "--device cpu").device_count())


def _measure_kernels(request: CalibrationRequest, kind: str, given: set[str]) -> list[Measurement]:
    kinds = tuple(name for name in ("attention", "linear") if name not in given)
    if not kinds:
        return []
    import torch

    from mindspeed_cp.calibrate.kernels import KernelSizes, measure_kernels
    from mindspeed_cp.calibrate.links import npu_device

    sizes = KernelSizes(
        request.heads,
        request.kv_heads or request.heads,
        request.head_dim,
        request.longest or DEFAULT_MAX_TILE_ROWS[kind],
        DEFAULT_HIDDEN_SIZE[kind],
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[request.dtype],
        request.seconds,
    )
    with torch.no_grad():
        return measure_kernels(torch.device("cpu") if kind == "cpu" else npu_device(0), sizes, kinds)


def _memory(kind: str, ranks: int) -> float:
    """Return the bytes of memory of one rank; CPU ranks share the memory of the machine."""
    if kind == "cpu":
        import psutil

        return float(psutil.virtual_memory().total) / ranks
    import torch

    return float(torch.npu.get_device_properties(0).total_memory)  # type: ignore[attr-defined]


def _device_name(kind: str) -> str:
    if kind == "cpu":
        return f"the CPU ({platform.machine()})"
    import torch

    return str(torch.npu.get_device_name(0))  # type: ignore[attr-defined]


def _source_with_file(source: str, path: Path, given: set[str], key: str) -> str:
    """Return the source of a value, with the file instead of "measured" if its kind of measurement was read there."""
    if key == "ranks_per_node" and given & set(LINK_KINDS):
        return source.replace("measured", "given")
    kinds = {
        "attention_efficiency": "attention", "tile_rows": "attention", "launch": "attention",
        "linear_efficiency": "linear",
        "fabric": "in_node", "pair_bandwidth": "in_node", "rank_bandwidth": "in_node", "in_node_latency": "in_node",
        "nics_per_node": "network", "nic_bandwidth": "network", "network_latency": "network", "posting": "posting",
    }  # fmt: skip
    return (
        source.replace("measured", path.name) if source.startswith("measured") and kinds.get(key) in given else source
    )


def _print(
    path: Path,
    cluster: Cluster,
    sources: dict[str, str],
    fits: MeasuredFits,
    measurements: list[Measurement],
    *,
    as_json: bool,
) -> None:
    report: dict[str, Any] = {
        "file": str(path),
        "cluster": asdict(cluster),
        "sources": sources,
        "fits": fits.table(),
        "together": {"in_node_all": fits.in_node_all, "network_all": fits.network_all},
    }
    if as_json:
        print(json.dumps({**report, "measurements": [asdict(measurement) for measurement in measurements]}))
        return
    from mindspeed_cp.report.text import Table, print_tables

    values = [
        (key, f"{value:.4g}" if isinstance(value, float) else str(value), sources[key])
        for key, value in report["cluster"].items()
    ]
    errors = [
        (name, str(row["points"]), f"{row['median_error']:.1%}", f"{row['largest_error']:.1%}")
        for name, row in report["fits"].items()
    ]
    tables = [
        Table(f"Cluster {cluster.name}", ("", "value", "from"), tuple(values)),
        Table("Fit: |modelled / measured - 1|", ("", "points", "median", "largest"), tuple(errors)),
    ]
    rates = [(name, f"{rate:.4g}") for name, rate in report["together"].items() if rate is not None]
    if rates:
        tables.append(Table("All at once, as measured", ("", "bytes/second"), tuple(rates)))
    print_tables(tables)
    for name, row in report["fits"].items():
        if row["median_error"] > BAD_FIT_ERROR:
            print(
                f"note: {name} is off by {row['median_error']:.0%} as a rule; if this machine was busy, calibrate again"
            )
    print(f"written: {path}; use it wherever a cluster is named")
