"""`mindspeed-cp doctor`. `mindspeed_cp/doctor` does the work."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mindspeed_cp.cli.options import AsJson
from mindspeed_cp.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "npu")
MAX_SECONDS = 86400.0


def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or auto: all that are present.")] = "auto",
    npu_profile: Annotated[
        Path | None,
        typer.Option(
            help="File to write: which variants of the npu backend this NPU computes right, for the settings' "
            "npu_profile."
        ),
    ] = None,
    row_seconds: Annotated[
        float | None, typer.Option(help="Time limit in seconds for each check of an NPU or GPU. Default: 60.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="File to write: everything that was seen, as JSON, to attach to a question. Default: none; under "
            "torchrun doctor-report.json."
        ),
    ] = None,
    link_seconds: Annotated[
        float | None,
        typer.Option(help="Under torchrun: seconds until a silent link counts as hung. Default: 20 between CPUs, 150."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine: versions, devices, and the attention operator against the fp64 reference.

    Under torchrun on every rank, with all links, and every algorithm against fp64:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m mindspeed_cp doctor
    """
    from mindspeed_cp.report.files import check_output_path

    if device not in DEVICES:
        raise ConfigError(f"--device {device}: cannot be checked; valid: {', '.join(DEVICES)}")
    for option, seconds in (("--link-seconds", link_seconds), ("--row-seconds", row_seconds)):
        if seconds is not None and not 0 < seconds <= MAX_SECONDS:
            raise ConfigError(f"{option} {seconds:g}: must be above 0, at most {MAX_SECONDS:.0f}, or left out")
    if report is not None:
        check_output_path("--report", report, (".json",))
    if find_spec("torch") is None:
        return _print_versions_alone(as_json)
    from mindspeed_cp.doctor.links import is_launched, read_launch

    if is_launched():
        from mindspeed_cp.device.select import resolve_device_type
        from mindspeed_cp.doctor.ranks import check_ranks

        for option, value in (("--npu-profile", npu_profile), ("--row-seconds", row_seconds)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value}: not under torchrun; run the doctor in one process on each machine"
                )
        launch, kind, path = read_launch("doctor"), resolve_device_type(device), report or Path("doctor-report.json")
        return check_ranks(launch, path, kind, link_seconds=link_seconds, as_json=as_json)
    if link_seconds is not None:
        raise ConfigError(f"--link-seconds {link_seconds}: only under torchrun; leave it out")
    from mindspeed_cp.doctor import run_checks, write_report
    from mindspeed_cp.doctor.kernel_capability import write_json

    if npu_profile is not None and device not in ("auto", "npu"):
        raise ConfigError(f"--npu-profile {npu_profile}: --device {device} has none; use --device npu, or leave it out")
    if npu_profile is not None:
        check_output_path("--npu-profile", npu_profile, (".json",))
    result = run_checks(device, row_seconds=row_seconds)
    write_report(result, as_json=as_json)
    if report is not None:
        write_json("--report", report, result)
    if npu_profile is not None:
        if result["npu_profile"] is None:
            raise ConfigError(f"--npu-profile {npu_profile}: no NPU was checked, so it was not written")
        write_json("--npu-profile", npu_profile, result["npu_profile"])
    return 0 if result["ok"] else 1


def _print_versions_alone(as_json: bool) -> int:
    """Print the versions, and what can be done without torch."""
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
