"""`mindspeed-cp doctor`. `mindspeed_cp/doctor` does the work."""

from __future__ import annotations

import json
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
            help="Time limit in seconds for the links between NPUs; default: 120, plus 15 per NPU. Under torchrun: for "
            "each link; default: 20 between CPUs, 150.",
            show_default=False,
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
        typer.Option(help="Time limit in seconds for each check of an NPU or GPU. Default: 60.", show_default=False),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="File to write: everything that was seen, as JSON, to attach to a question. Default: none; under "
            "torchrun doctor-report.json.",
            show_default=False,
        ),
    ] = None,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option(
            help="Under torchrun: tokens of the timed batch / ranks. Default: 1024 on a CPU, 8192.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine: versions, devices, links, and the attention operator against the fp64 reference.

    Under torchrun on every rank, with all links, and every algorithm beside the simulator:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp doctor
    """
    if device not in ("auto", "cpu", "cuda", "npu"):
        raise ConfigError(f"--device {device}: cannot be checked; valid: auto, cpu, cuda, npu")
    for option, seconds in (("--link-seconds", link_seconds), ("--row-seconds", row_seconds)):
        if seconds is not None and not 0 < seconds <= 86400:
            raise ConfigError(f"{option} {seconds:g}: must be above 0, at most 86400, or left out")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return _versions_alone(as_json)
    if report is not None:
        from mindspeed_cp.report.files import check_output_path

        check_output_path("--report", report, (".json",))
    from mindspeed_cp.doctor.launch import is_launched, read_launch

    if is_launched():
        for option, value in (("--npu-profile", npu_profile), ("--row-seconds", row_seconds)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value}: not under torchrun; run the doctor in one process on each machine"
                )
        launch = read_launch("doctor")
        from mindspeed_cp.device.select import resolve_device_type
        from mindspeed_cp.doctor.ranks import check_ranks

        path, kind = report or Path("doctor-report.json"), resolve_device_type(device)
        return check_ranks(launch, path, kind, tokens=tokens_per_rank, link_seconds=link_seconds, as_json=as_json)
    if tokens_per_rank is not None:
        raise ConfigError(f"--tokens-per-rank {tokens_per_rank}: only under torchrun; leave it out")
    if npu_profile is not None and device not in ("auto", "npu"):
        raise ConfigError(f"--npu-profile {npu_profile}: --device {device} has none; use --device npu, or leave it out")
    return _check_machine(device, link_seconds, row_seconds, npu_profile, report, as_json)


def _check_machine(
    device: str,
    link_seconds: float | None,
    row_seconds: float | None,
    npu_profile: Path | None,
    report_path: Path | None,
    as_json: bool,
) -> int:
    from mindspeed_cp.doctor import run_checks, write_report
    from mindspeed_cp.doctor.kernel_capability import check_profile_path, write_json

    if npu_profile is not None:
        check_profile_path(npu_profile)
    report: dict[str, Any] = run_checks(device, link_seconds=link_seconds, row_seconds=row_seconds)
    write_report(report, as_json=as_json)
    if report_path is not None:
        write_json("--report", report_path, report)
    if npu_profile is not None:
        if report["npu_profile"] is None:
            raise ConfigError(f"--npu-profile {npu_profile}: no NPU was checked, so it was not written")
        write_json("--npu-profile", npu_profile, report["npu_profile"])
    return 0 if report["ok"] else 1


def _versions_alone(as_json: bool) -> int:
    """Without torch: the versions, and what can be done with these."""
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
