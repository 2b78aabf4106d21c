"""`mindspeed-cp report`: what a run's traced steps took, beside what the simulator says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run's output, whose settings had output.trace_steps.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="a2, a3, a800, h800, h200 or a YAML file, as calibrate writes it: what the prediction stands on. "
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
            help="Write the last of the steps as one Perfetto trace: all ranks, and one modelled layer beside them.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Show predicted (modelled) beside measured: attention, exposed messages, waiting, step time."""
    import json

    from mindspeed_cp.report.beside import as_dict, beside, tables
    from mindspeed_cp.report.files import check_suffix

    for switch, file, suffix in (("--png", png, ".png"), ("--trace", trace, ".json")):
        if file is not None:  # before all that is read and simulated
            check_suffix(switch, file, [suffix])
    result = beside(run, cluster, steps or ())
    if png is not None:
        from mindspeed_cp.report.beside_png import draw_beside

        draw_beside(result, png)
    if trace is not None:
        from mindspeed_cp.report.beside_trace import write_beside

        write_beside(result, trace)
    if as_json:
        print(json.dumps(as_dict(result), allow_nan=False))
        return 0
    from mindspeed_cp.report.console import print_tables

    print_tables(tables(result))
    for note in result.notes:
        print(f"note: {note}")
    for what, path in (("picture", png), ("trace", trace)):
        if path is not None:
            print(f"{what}: {path}")
    return 0
