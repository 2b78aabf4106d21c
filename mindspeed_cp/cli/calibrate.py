"""The switches of `mindspeed-cp calibrate`; what it does is in `mindspeed_cp/calibrate`, imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[Path, typer.Argument(help="The preset to write, a YAML file.")],
    device: Annotated[str, typer.Option(help="cpu, npu, or auto: npu where torch_npu is installed.")] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Local ranks started to measure links; 1: none. Default: all NPUs, or 2 on a CPU.", show_default=False
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Preset, by name or file, for what is not measured, such as a2.", show_default=False),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Measurements: kind,seconds,flops,short_side,calls,bytes. Their kinds are not measured.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the preset. Default: that of the file.", show_default=False)
    ] = None,
    peak_flops: Annotated[
        float | None,
        typer.Option(
            help="Of one device, bf16, dense. Default: of the base, or the highest rate measured.", show_default=False
        ),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads of the attention that is timed.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads. Default: as many.", show_default=False)
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    longest: Annotated[
        int | None, typer.Option(help="Rows of the largest tile. Default: 2048 on a CPU, 16384.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    seconds: Annotated[float, typer.Option(help="About as long the kernels are timed.")] = 20.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file where it is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Fit the numbers of a cluster, by which plans are costed, to kernels and links that are measured here.

    Under torchrun every rank takes part, and links between nodes are measured too:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp.cli calibrate OUT.yaml
    """
    from mindspeed_cp.calibrate.command import measure
    from mindspeed_cp.calibrate.request import Request

    request = Request(
        out, overwrite, device, nproc, base, csv, name, peak_flops, heads, kv_heads, head_dim, longest, dtype, seconds
    )
    measure(request, as_json=as_json)
    return 0
