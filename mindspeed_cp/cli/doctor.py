"""mindspeed-cp doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mindspeed_cp.cli.options import AsJson
from mindspeed_cp.errors import ConfigError


def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or auto: all that are present.")] = "auto",
    link_seconds: Annotated[
        float | None,
        typer.Option(
            help="Time limit in seconds for the links between NPUs; default: 120, plus 15 per NPU. With --cluster: for "
            "each link; default: 20 between CPUs, 150."
        ),
    ] = None,
    npu_profile: Annotated[
        Path | None,
        typer.Option(
            help="File to write: which variants of the npu backend this NPU computes right, for the settings' "
            "npu_profile.",
            show_default=False,
        ),
    ] = None,
    row_seconds: Annotated[
        float | None,
        typer.Option(help="Time limit in seconds for each check of an NPU. Default: 60.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Measure all ranks that torchrun started, and write one report.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(help="With --cluster: folder of the report. Default: cluster-report.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --cluster: replace the folder's report.")
    ] = False,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option(
            help="With --cluster: tokens of a batch / ranks. Default: 1024 on a CPU, 8192.", show_default=False
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="With --cluster: query heads. Default: 8.", show_default=False)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="With --cluster: key/value heads. Default: as many.", show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="With --cluster: channels of a head. Default: 64.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --cluster: bf16, fp16 or fp32. Default: fp32 on a CPU, bf16.", show_default=False),
    ] = None,
    kernel_seconds: Annotated[
        float | None, typer.Option(help="With --cluster: seconds for timing kernels. Default: 10.", show_default=False)
    ] = None,
) -> int:
    """Check this machine: versions, devices, links, and the attention operator against the fp64 reference.

    With --cluster, under torchrun, on every rank: links, kernels, overlap, and every algorithm beside the simulator:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp doctor --cluster
    """
    options = {
        "folder": folder, "tokens_per_rank": tokens_per_rank, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "dtype": dtype, "kernel_seconds": kernel_seconds, "overwrite": overwrite or None,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if cluster:
        for option, value in (("--npu-profile", npu_profile), ("--row-seconds", row_seconds)):
            if value is not None:
                raise ConfigError(f"{option} {value}: not with --cluster; run doctor --device npu without --cluster")
        from mindspeed_cp.cluster_check.command import run_cluster_check
        from mindspeed_cp.cluster_check.request import ClusterRequest

        given["folder"] = folder or Path("cluster-report")
        request = ClusterRequest(**given, device=device, link_seconds=link_seconds)
        return run_cluster_check(request, as_json=as_json)
    if given:
        option = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"{option}: only for --cluster; give --cluster, or leave {option} out")
    if device not in ("auto", "cpu", "cuda", "npu"):
        raise ConfigError(f"--device {device}: cannot be checked; valid: auto, cpu, cuda, npu")
    if link_seconds is not None and not link_seconds > 0:
        raise ConfigError(f"--link-seconds {link_seconds:g}: must be more than 0, or left out")
    if row_seconds is not None and not row_seconds > 0:
        raise ConfigError(f"--row-seconds {row_seconds:g}: must be more than 0, or left out")
    if npu_profile is not None and device not in ("auto", "npu"):
        raise ConfigError(f"--npu-profile {npu_profile}: --device {device} has none; use --device npu, or leave it out")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return _versions_alone(as_json)
    from mindspeed_cp.doctor import run_checks, write_report
    from mindspeed_cp.doctor.npu_rows import check_profile_path, write_profile

    if npu_profile is not None:
        check_profile_path(npu_profile)
    report = run_checks(device, link_seconds=link_seconds, row_seconds=row_seconds)
    write_report(report, as_json=as_json)
    if npu_profile is not None:
        if report["npu_profile"] is None:
            raise ConfigError(f"--npu-profile {npu_profile}: no NPU was checked, so it was not written")
        write_profile(report["npu_profile"], npu_profile)
    return 0 if report["ok"] else 1


def _versions_alone(as_json: bool) -> int:
    """Without torch: the versions, and what can be done with these."""
    import json
    from dataclasses import asdict

    from mindspeed_cp.device.versions import version_report
    from mindspeed_cp.report.text import Table, print_tables

    report = version_report()
    if as_json:
        print(json.dumps({"ok": False, "version_status": [asdict(status) for status in report]}))
        return 1
    rows = tuple((status.package, status.version or "-", status.status, status.reason) for status in report)
    print_tables([Table("Versions", ("package", "version", "", "why"), rows)])
    print("FAILED: torch is not installed, so no operator was checked; plan, simulate and convert work without it")
    return 1
