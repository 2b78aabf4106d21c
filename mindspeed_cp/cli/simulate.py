"""`mindspeed-cp simulate`: compare algorithms by modelled time."""

from __future__ import annotations

import json

from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.choose import Decision, choose_algorithm
from mindspeed_cp.choose.compare import EVEN_RING, SimulationCase, compare_algorithms
from mindspeed_cp.cli.case import read_case
from mindspeed_cp.cli.lengths import check_cost
from mindspeed_cp.cli.options import SimulateOptions
from mindspeed_cp.report.files import check_output_path, write_png
from mindspeed_cp.report.progress import show_progress
from mindspeed_cp.report.simulation import conclusion, range_of_conclusion, simulation_dict, simulation_tables
from mindspeed_cp.report.text import print_tables, wrap_text
from mindspeed_cp.report.timelines import comparison_figure
from mindspeed_cp.report.trace_events import timeline_recording, write_trace


def run(options: SimulateOptions) -> int:
    """Compare the algorithms, write the requested files, and print tables or JSON values."""
    for option, file, suffix in (("--png", options.png, ".png"), ("--trace", options.trace, ".json")):
        if file is not None:  # before the simulation
            check_output_path(option, file, [suffix])
    with show_progress("reading the lengths"):
        case, candidates = read_case(options)
    algorithms = list(dict.fromkeys(candidate.algorithm for candidate in (EVEN_RING, *candidates)))
    check_cost(case.batches, case.topology.ranks, algorithms)
    with show_progress("choosing among the options of all algorithms") as say:
        decision = choose(case, candidates) if options.choose else None
        comparison = compare_algorithms(case, candidates, on_start=lambda name: say(f"simulating {name}"))
    files, shown = {}, list(dict.fromkeys((comparison.results[0], comparison.ring)))
    if options.png is not None:
        files["picture"] = str(write_png(comparison_figure(comparison, shown), options.png))
    if options.trace is not None:
        recordings = [timeline_recording(entry.timeline, f"{entry.name}, modelled") for entry in shown]
        files["trace"] = str(write_trace(options.trace, recordings))
    if options.as_json:
        values = simulation_dict(comparison)
        if decision is not None:
            chosen = decision.candidate
            choice = {"algorithm": chosen.algorithm, "options": dict(chosen.options), "reasons": decision.reasons}
            values["choice"] = choice
        print(json.dumps({**values, "files": files}, allow_nan=False))
        return 0
    print_tables(simulation_tables(comparison))
    if decision is not None:
        print("\n".join(("auto takes", *(f"  {line}" for line in decision.reasons))))
    for note in comparison.notes:
        print(wrap_text(f"note: {note}"))
    for kind, path in files.items():
        print(f"{kind}: {path}")
    print(wrap_text(" ".join((conclusion(comparison), range_of_conclusion(comparison))).strip()))
    return 0


def choose(case: SimulationCase, candidates: list[Candidate]) -> Decision:
    """Return what `algorithm: auto` takes for these batches, and add it to the algorithms to compare."""
    from mindspeed_cp.config.candidates import SAMPLE_ROWS

    decision = choose_algorithm(
        case.batches[:SAMPLE_ROWS], case.topology, case.attention, case.cluster, case.layer, options=dict(case.sizes)
    )
    candidates.append(decision.candidate)
    return decision
