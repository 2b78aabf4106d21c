"""`mindspeed-cp calibrate`: fit a cluster to this machine. `mindspeed_cp/doctor` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindspeed_cp.cli.options import AsJson


def calibrate(
    out: Annotated[Path, typer.Argument(help="Preset to write, a YAML file; an older one of calibrate is replaced.")],
    device: Annotated[
        str, typer.Option(help="cpu, npu, cuda, or auto: npu where torch_npu is installed, else cpu.")
    ] = "auto",
    base: Annotated[
        str | None, typer.Option(help="Preset, by name or file, for the values that are not measured, such as a2.")
    ] = None,
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
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Approximate seconds for timing kernels.")] = 20.0,
    as_json: AsJson = False,
) -> int:
    """Measure kernels, and under torchrun the links of its ranks, and fit the cluster preset that plans are costed by.

    torchrun --nproc-per-node 8 -m mindspeed_cp calibrate OUT.yaml
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp calibrate OUT.yaml
    """
    options = dict(locals())
    from mindspeed_cp.doctor.calibrate import run_calibration

    run_calibration(**options)
    return 0
