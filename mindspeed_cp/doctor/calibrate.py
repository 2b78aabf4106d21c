"""`mindspeed-cp calibrate`: measures links and kernels, fits a cluster preset to them, writes it and prints it.

The fits are in `mindspeed_cp/cluster`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_cp.cluster.calibration import (
    MeasuredFits,
    Measurement,
    assemble_cluster,
    preset_values,
    write_preset,
)
from mindspeed_cp.cluster.cluster import Cluster, load_cluster
from mindspeed_cp.device.select import load_cuda, load_npu, resolve_device_type
from mindspeed_cp.doctor.kernel_timing import KernelSizes, measure_kernel_times, measure_kernels
from mindspeed_cp.doctor.links import (
    TIMEOUT,
    LinkTimer,
    is_launched,
    join_process_group,
    measure_links,
    measure_local_links,
    read_launch,
)
from mindspeed_cp.doctor.machine import device_memory, device_name, rank_device
from mindspeed_cp.doctor.operator import DTYPES
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.report.files import check_output_path
from mindspeed_cp.report.text import Table, print_tables

#: Devices that can be measured: rows of the largest tile, and hidden size of the matrix products.
MAX_TILE_ROWS = {"cpu": 2048, "npu": 16384, "cuda": 16384}
HIDDEN_SIZE = {"cpu": 1024, "npu": 4096, "cuda": 4096}

BAD_FIT_ERROR = 0.15


@dataclass(frozen=True)
class CalibrationRequest:
    """The options of the command, by their names (`mindspeed_cp/cli/calibrate.py`); None: not given."""

    out: Path
    overwrite: bool
    device: str
    nproc: int | None
    base: str | None
    name: str | None
    peak_flops: float | None
    heads: int
    kv_heads: int | None
    head_dim: int
    longest: int | None
    dtype: str
    seconds: float

    def check(self) -> Cluster | None:
        """Check the arguments and return the base, or None.

        Raises:
            ConfigError: an argument is not valid, or the base or the output file cannot be used.
        """
        if self.device not in ("auto", *MAX_TILE_ROWS):
            raise ConfigError(f"--device {self.device}: cannot be calibrated; valid: auto, {', '.join(MAX_TILE_ROWS)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: valid: bf16, fp16, fp32")
        check_output_path("calibrate", self.out, (".yaml", ".yml"))
        if self.out.exists() and not self.overwrite:
            raise ConfigError(f"{self.out}: is there already; give another name, or --overwrite")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"--kv-heads {self.kv_heads}: must divide --heads {self.heads}")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"--seconds {self.seconds:g}: must be above 0, at most 3600")
        if self.peak_flops is not None and not 0 < self.peak_flops <= 1e21:
            raise ConfigError(f"--peak-flops {self.peak_flops:g}: must be FLOP/s above 0, such as 353.9e12")
        return None if self.base is None else load_cluster(self.base)


def run_calibration(request: CalibrationRequest, *, as_json: bool) -> None:
    """Measure, fit, write the preset and print it.

    Raises:
        ConfigError: an argument is not valid, or a value can neither be measured here nor read from a base.
        PeerError: a rank failed while measuring links.
    """
    base = request.check()
    kind = resolve_device_type(request.device)
    links, ranks, rank = _measure_links(request, kind, base)
    if rank:
        return
    device = rank_device(kind, 0)
    attention = AttentionConfig(request.heads, request.kv_heads or request.heads, request.head_dim)
    longest, hidden_size = request.longest or MAX_TILE_ROWS[kind], HIDDEN_SIZE[kind]
    with torch.no_grad():
        sizes = KernelSizes(attention, longest, hidden_size, DTYPES[request.dtype], request.seconds)
        measurements = [*links, *measure_kernels(device, sizes)]
        kernel_times = measure_kernel_times(device, sizes) if kind == "cuda" else ()
    fits = MeasuredFits.from_measurements(measurements, ranks or (1 if base is None else base.ranks_per_node))
    cluster, sources = assemble_cluster(
        request.name or request.out.stem,
        fits,
        ranks_per_node=ranks,
        memory=device_memory(device) / ((ranks or 1) if kind == "cpu" else 1),  # ranks of a CPU share it
        base=base,
        peak_flops=request.peak_flops,
        device="" if kind == "cpu" else device_name(device),
        kernel_times=kernel_times,
    )
    heads = f"{request.dtype}, {request.heads} heads of {request.head_dim}"
    title = f"Fitted by mindspeed-cp calibrate on {device_name(device)}, {heads}"
    write_preset(request.out, cluster, sources, title)
    _print(request.out, cluster, sources, fits, measurements, as_json=as_json)


def _measure_links(
    request: CalibrationRequest, kind: str, base: Cluster | None
) -> tuple[list[Measurement], int | None, int]:
    """Return measurements of links, the number of ranks of a node, None if unknown, and the number of this rank."""
    launched = is_launched()
    if launched and request.nproc is not None:
        raise ConfigError(f"--nproc {request.nproc}: the launcher has set the number of ranks; leave --nproc out")
    if launched:
        launch = read_launch("calibrate OUT.yaml")
        device = rank_device(kind, launch.local_rank)
        join_process_group(device, TIMEOUT)
        try:
            return measure_links(LinkTimer(device), launch.ranks_per_node), launch.ranks_per_node, launch.rank
        except PeerError as error:
            raise PeerError(f"calibrate: {error}") from error
        finally:
            dist.destroy_process_group()
    devices = None
    if kind != "cpu":
        load = load_npu if kind == "npu" else load_cuda
        devices = int(load(f"--device {kind}", "--device cpu").device_count())
    ranks = request.nproc or devices or 2
    if ranks == 1:
        if base is None:
            raise ConfigError(
                "--nproc 1: links cannot be measured with one rank; give --nproc 2 or more, or a --base that has them"
            )
        return [], None, 0
    if base is not None:
        base.with_ranks(ranks)
    if devices is not None and ranks > devices:
        raise ConfigError(f"--nproc {ranks}: this machine has {devices} {kind.upper()}s; every rank needs its own")
    return measure_local_links(kind, ranks), ranks, 0


def _print(
    path: Path,
    cluster: Cluster,
    sources: dict[str, str],
    fits: MeasuredFits,
    measurements: list[Measurement],
    *,
    as_json: bool,
) -> None:
    errors, together = fits.table(), {"in_node_all": fits.in_node_all, "network_all": fits.network_all}
    if as_json:
        rows = [asdict(measurement) for measurement in measurements]
        report = {"file": str(path), "cluster": preset_values(cluster), "sources": sources, "fits": errors}
        print(json.dumps({**report, "together": together, "measurements": rows}))
        return
    values = [
        (key, f"{value:.4g}" if isinstance(value, float) else str(value), sources[key])
        for key, value in preset_values(cluster).items()
        if key != "kernel_times"
    ]
    fit_rows = [
        (name, str(row["points"]), f"{row['median_error']:.1%}", f"{row['largest_error']:.1%}")
        for name, row in errors.items()
    ]
    tables = [
        Table(f"Cluster {cluster.name}", ("", "value", "from"), tuple(values)),
        Table("Fit: |modelled / measured - 1|", ("", "points", "median", "largest"), tuple(fit_rows)),
    ]
    if cluster.kernel_times:
        rows = [
            (f"{size.rows} x {size.keys}", size.kernel, f"{size.forward:.3g}", f"{size.backward:.3g}")
            for size in cluster.kernel_times
        ]
        columns = ("queries x keys", "kernel", "forward", "backward")
        tables.append(Table("Kernels, seconds per visible pair of all heads", columns, tuple(rows)))
    rates = tuple((name, f"{rate:.4g}") for name, rate in together.items() if rate is not None)
    print_tables([*tables, *([Table("All at once, as measured", ("", "bytes/second"), rates)] if rates else [])])
    for name, row in errors.items():
        if row["median_error"] > BAD_FIT_ERROR:
            print(
                f"note: {name} is off by {row['median_error']:.0%} as a rule; if this machine was busy, calibrate again"
            )
    print(f"written: {path}; use it wherever a cluster is named")
