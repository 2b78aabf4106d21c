"""`mindspeed-cp calibrate`: fit a cluster to this machine. `mindspeed_cp/doctor` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindspeed_cp.cli.options import AsJson


def calibrate(
    out: Annotated[Path, typer.Argument(help="Preset to write, a YAML file.")],
    device: Annotated[
        str, typer.Option(help="cpu, npu, cuda, or auto: npu where torch_npu is installed, else cpu.")
    ] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Local ranks that measure links; 1: measure none. Default: all NPUs, or 2 on a CPU."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Preset, by name or file, for the values that are not measured, such as a2.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the preset. Default: of the file.")] = None,
    peak_flops: Annotated[
        float | None,
        typer.Option(help="Peak of one device, bf16, dense. Default: of the base, or the highest measured rate."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of the timed attention.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads. Default: as many as query heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    longest: Annotated[
        int | None, typer.Option(min=256, help="Rows of the largest tile. Default: 2048 on a CPU, 16384.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    seconds: Annotated[float, typer.Option(help="Approximate seconds for timing kernels.")] = 20.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> int:
    """Measure kernels and links of this machine and fit the cluster preset that plans are costed by.

    Under torchrun every rank takes part, and links between nodes are measured too:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp calibrate OUT.yaml
    """
    options = {name: value for name, value in locals().items() if name != "as_json"}
    from mindspeed_cp.doctor.calibrate import CalibrationRequest, run_calibration

    run_calibration(CalibrationRequest(**options), as_json=as_json)
    return 0
