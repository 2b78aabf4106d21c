"""`mindspeed-cp calibrate`: measures links and kernels, fits a cluster preset to them, writes it and prints it.

The fits are in `mindspeed_cp/cluster`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
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
from mindspeed_cp.cluster.cluster import load_cluster
from mindspeed_cp.device.select import resolve_device_type
from mindspeed_cp.doctor.kernel_timing import KernelSizes, measure_kernel_times, measure_kernels
from mindspeed_cp.doctor.links import (
    TIMEOUT,
    Launch,
    LinkTimer,
    is_launched,
    join_process_group,
    measure_links,
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

#: First words of a preset, by which a file that somebody else wrote is not replaced.
TITLE = "# Fitted by mindspeed-cp calibrate"


def run_calibration(
    out: Path,
    device: str,
    base: str | None,
    peak_flops: float | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    longest: int | None,
    dtype: str,
    seconds: float,
    *,
    as_json: bool,
) -> None:
    """Measure, fit, write the preset and print it; the arguments are the options of `mindspeed_cp/cli/calibrate.py`.

    Raises:
        ConfigError: an option is not valid, or a value can neither be measured here nor read from a base.
        PeerError: a rank failed while measuring links.
    """
    if device not in ("auto", *MAX_TILE_ROWS):
        raise ConfigError(f"--device {device}: cannot be calibrated; valid: auto, {', '.join(MAX_TILE_ROWS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: valid: bf16, fp16, fp32")
    check_output_path("calibrate", out, (".yaml", ".yml"))
    if out.exists() and not out.read_bytes().startswith(TITLE.encode()):
        raise ConfigError(f"calibrate {out}: is there, and no preset that calibrate wrote; give the name of a new file")
    if heads % (kv_heads or heads):
        raise ConfigError(f"--kv-heads {kv_heads}: must divide --heads {heads}")
    if peak_flops is not None and not 0 < peak_flops <= 1e21:
        raise ConfigError(f"--peak-flops {peak_flops:g}: must be FLOP/s above 0, such as 353.9e12")
    base_cluster = None if base is None else load_cluster(base)
    kind, launch = resolve_device_type(device), Launch(0, 1, 0, 1)
    links: list[Measurement] = []
    if is_launched():
        links, launch = _measure_links(kind)
    elif base_cluster is None:
        raise ConfigError(
            "calibrate: links are measured among ranks; start torchrun --nproc-per-node 2 -m mindspeed_cp calibrate "
            f"{out}, with as many ranks as a node has, or give a --base that has them"
        )
    if launch.rank:
        return
    ranks = launch.ranks_per_node if links else None
    torch_device = rank_device(kind, 0)
    attention = AttentionConfig(heads, kv_heads or heads, head_dim)
    with torch.no_grad():
        sizes = KernelSizes(attention, longest or MAX_TILE_ROWS[kind], HIDDEN_SIZE[kind], DTYPES[dtype], seconds)
        measurements = [*links, *measure_kernels(torch_device, sizes)]
        kernel_times = measure_kernel_times(torch_device, sizes) if kind == "cuda" else ()
    default_ranks = 1 if base_cluster is None else base_cluster.ranks_per_node
    fits = MeasuredFits.from_measurements(measurements, ranks or default_ranks)
    cluster, sources = assemble_cluster(
        out.stem,
        fits,
        ranks_per_node=ranks,
        memory=device_memory(torch_device) / ((ranks or 1) if kind == "cpu" else 1),  # ranks of a CPU share it
        base=base_cluster,
        peak_flops=peak_flops,
        device="" if kind == "cpu" else device_name(torch_device),
        kernel_times=kernel_times,
    )
    title = f"{TITLE[2:]} on {device_name(torch_device)}, {dtype}, {heads} heads of {head_dim}"
    write_preset(out, cluster, sources, title)
    if as_json:
        report = {"file": str(out), "cluster": preset_values(cluster), "sources": sources, "fits": fits.table()}
        together = {"in_node_all": fits.in_node_all, "network_all": fits.network_all}
        print(json.dumps({**report, "together": together, "measurements": [asdict(row) for row in measurements]}))
    else:
        _print_fits(out, fits.table())


def _measure_links(kind: str) -> tuple[list[Measurement], Launch]:
    """Return measurements of the links among the ranks that torchrun started, and this rank."""
    launch = read_launch("calibrate OUT.yaml")
    device = rank_device(kind, launch.local_rank)
    join_process_group(device, TIMEOUT)
    try:
        return measure_links(LinkTimer(device), launch.ranks_per_node), launch
    except PeerError as error:
        raise PeerError(f"calibrate: {error}") from error
    finally:
        dist.destroy_process_group()


def _print_fits(path: Path, errors: dict[str, dict[str, float]]) -> None:
    fit_rows = [
        (name, str(row["points"]), f"{row['median_error']:.1%}", f"{row['largest_error']:.1%}")
        for name, row in errors.items()
    ]
    print_tables([Table("Fit: |modelled / measured - 1|", ("", "points", "median", "largest"), tuple(fit_rows))])
    for name, row in errors.items():
        if row["median_error"] > BAD_FIT_ERROR:
            print(
                f"note: {name} is off by {row['median_error']:.0%} as a rule; if this machine was busy, calibrate again"
            )
    print(f"written: {path}, each value with its source; use it wherever a cluster is named")
