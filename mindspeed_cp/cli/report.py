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
            help="Cluster of the prediction: a preset (docs/clusters.md lists them) or a YAML file of calibrate. "
            "Default: the run's context_parallel_suite.cluster, else a2.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        list[int] | None, typer.Option("--step", help="Only this step; may be repeated.", show_default=False)
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw predicted beside measured.", show_default=False)] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the last of the steps as one Perfetto trace: all ranks, and one modelled layer.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare predicted (modelled) and measured: attention, exposed messages, waiting, step time."""
    import json

    from mindspeed_cp.report.files import check_output_path
    from mindspeed_cp.report.run.predicted_vs_measured import (
        compare_with_prediction,
        predicted_vs_measured_dict,
        predicted_vs_measured_tables,
    )

    for option, file, suffix in (("--png", png, ".png"), ("--trace", trace, ".json")):
        if file is not None:  # before anything is read and simulated
            check_output_path(option, file, [suffix])
    result = compare_with_prediction(run, cluster, steps or ())
    if png is not None:
        from mindspeed_cp.report.run.charts import draw_predicted_vs_measured

        draw_predicted_vs_measured(result, png)
    if trace is not None:
        from mindspeed_cp.report.run.predicted_vs_measured import write_comparison_trace

        write_comparison_trace(result, trace)
    if as_json:
        print(json.dumps(predicted_vs_measured_dict(result), allow_nan=False))
        return 0
    from mindspeed_cp.report.text import print_tables

    if result.not_comparable is not None:
        print(result.not_comparable)
    print_tables(predicted_vs_measured_tables(result))
    for note in result.notes:
        print(f"note: {note}")
    for kind, path in (("picture", png), ("trace", trace)):
        if path is not None:
            print(f"{kind}: {path}")
    return 0
