"""`mindspeed-cp report`: predicted and measured times of the traced steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindspeed_cp.cli.options import AsJson


def report(
    run: Annotated[Path, typer.Argument(help="Output folder of a run with output.trace_steps.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Cluster of the prediction: a preset (docs/simulate.md lists them) or a YAML file of calibrate. "
            "Default: the run's context_parallel_suite.cluster, else a2."
        ),
    ] = None,
    steps: Annotated[list[int] | None, typer.Option("--step", help="Only this step; may be repeated.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the last of the steps as one Perfetto trace: all ranks, and one modelled layer."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare predicted (modelled) and measured: attention, exposed messages, waiting, step time."""
    import json

    from mindspeed_cp.report.files import check_output_path
    from mindspeed_cp.report.step_trace import (
        compare_with_prediction,
        predicted_vs_measured_dict,
        predicted_vs_measured_tables,
        write_comparison_trace,
    )
    from mindspeed_cp.report.text import print_tables

    if trace is not None:  # before anything is read and simulated
        check_output_path("--trace", trace, [".json"])
    result = compare_with_prediction(run, cluster, steps or ())
    if trace is not None:
        write_comparison_trace(result, trace)
    values = predicted_vs_measured_dict(result)
    if as_json:
        print(json.dumps(values, allow_nan=False))
        return 0
    if result.not_comparable is not None:
        print(result.not_comparable)
    print_tables(predicted_vs_measured_tables(values))
    for note in result.notes:
        print(f"note: {note}")
    if trace is not None:
        print(f"trace: {trace}")
    return 0
