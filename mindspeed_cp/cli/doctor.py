"""`mindspeed-cp doctor`. `mindspeed_cp/doctor` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindspeed_cp.cli.options import AsJson
from mindspeed_cp.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "npu")


def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or auto: all that are present.")] = "auto",
    npu_profile: Annotated[
        Path | None,
        typer.Option(
            help="File to write: which variants of the npu backend this NPU computes right, for the settings' "
            "npu_profile."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="File to write: everything that was seen, as JSON, to attach to a question. Default: none; under "
            "torchrun doctor-report.json."
        ),
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
    if npu_profile is not None and device not in ("auto", "npu"):
        raise ConfigError(f"--npu-profile {npu_profile}: --device {device} has none; use --device npu, or leave it out")
    for option, path in (("--report", report), ("--npu-profile", npu_profile)):
        if path is not None:
            check_output_path(option, path, (".json",))
    from mindspeed_cp.doctor import run_checks, write_report
    from mindspeed_cp.doctor.kernel_capability import write_json
    from mindspeed_cp.doctor.links import is_launched, read_launch

    if is_launched():
        from mindspeed_cp.device.select import resolve_device_type
        from mindspeed_cp.doctor.ranks import check_ranks

        if npu_profile is not None:
            raise ConfigError(
                f"--npu-profile {npu_profile}: not under torchrun; run the doctor in one process on each machine"
            )
        launch, kind = read_launch("doctor"), resolve_device_type(device)
        return check_ranks(launch, report or Path("doctor-report.json"), kind, as_json=as_json)
    result = run_checks(device)
    write_report(result, as_json=as_json)
    if report is not None:
        write_json("--report", report, result)
    if npu_profile is not None:
        if result["npu_profile"] is None:
            raise ConfigError(f"--npu-profile {npu_profile}: no NPU was checked, so it was not written")
        write_json("--npu-profile", npu_profile, result["npu_profile"])
    return 0 if result["ok"] else 1
