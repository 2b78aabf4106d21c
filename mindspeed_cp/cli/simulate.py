"""`mindspeed-cp simulate`: compare algorithms by modelled time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mindspeed_cp.cli.options import SimulateOptions
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.choose.candidates import Candidate
    from mindspeed_cp.choose.choose import Decision
    from mindspeed_cp.choose.compare import AlgorithmResult, Comparison, SimulationCase


def simulate(options: SimulateOptions) -> int:
    """Compare algorithms on documents and a cluster, before anything runs: modelled time of a layer and its parts.

    Without a settings file: one node of the cluster, 32 heads and 8 key/value heads of 128 channels in bf16.

    mindspeed-cp simulate --lengths wikipedia --cluster a2 --nodes 4 --png out.png
    """
    from mindspeed_cp.choose.compare import EVEN_RING, compare_algorithms
    from mindspeed_cp.cli.case import read_case
    from mindspeed_cp.cli.lengths import check_memory
    from mindspeed_cp.report.simulation import simulation_dict

    _check_files(options)
    case, candidates = read_case(options)
    for algorithm in dict.fromkeys(candidate.algorithm for candidate in (EVEN_RING, *candidates)):
        check_memory(max(case.batches, key=len), case.topology.ranks, algorithm)
    decision = _choose(case, candidates) if options.choose else None
    comparison = compare_algorithms(case, candidates)
    files = _write(comparison, options)
    if options.as_json:
        print(json.dumps({**simulation_dict(comparison), **_choice_as_dict(decision), "files": files}, allow_nan=False))
    else:
        _print(comparison, decision, files)
    return 0


def _check_files(options: SimulateOptions) -> None:
    """Raise ConfigError unless the requested files can be written: before the simulation."""
    from mindspeed_cp.report.files import check_output_path

    for option, file, suffix in (("--png", options.png, ".png"), ("--trace", options.trace, ".json")):
        if file is not None:
            check_output_path(option, file, [suffix])
    if options.show is not None and options.png is None and options.trace is None:
        raise ConfigError(f"--show {options.show}: applies to --png and --trace; give one of them, or leave --show out")


def _print(comparison: Comparison, decision: Decision | None, files: dict[str, str]) -> None:
    from mindspeed_cp.report.simulation import conclusion, simulation_tables
    from mindspeed_cp.report.text import print_tables, wrap_text

    print_tables(simulation_tables(comparison))
    if decision is not None:
        print("\n".join(("auto takes", *(f"  {line}" for line in decision.reasons))))
    for note in comparison.notes:
        print(wrap_text(f"note: {note}"))
    for kind, path in files.items():
        print(f"{kind}: {path}")
    print(wrap_text(conclusion(comparison)))


def _choose(case: SimulationCase, candidates: list[Candidate]) -> Decision:
    """Return what `algorithm: auto` takes for these batches, and add it to the algorithms to compare."""
    from mindspeed_cp.choose.choose import choose_algorithm
    from mindspeed_cp.config.candidates import SAMPLE_ROWS

    if case.sharing != "fair":
        raise ConfigError(f"--choose: auto chooses with --sharing fair, not {case.sharing}; leave one of them out")
    decision = choose_algorithm(
        case.batches[:SAMPLE_ROWS],
        case.topology,
        case.attention,
        case.cluster,
        case.layer,
        options=dict(case.sizes),
    )
    candidates.append(decision.candidate)
    return decision


def _choice_as_dict(decision: Decision | None) -> dict[str, Any]:
    if decision is None:
        return {}
    chosen = decision.candidate
    choice = {"algorithm": chosen.algorithm, "options": dict(chosen.options), "reasons": decision.reasons}
    return {"choice": choice}


def _shown(comparison: Comparison, show: str | None) -> list[AlgorithmResult]:
    """Return the algorithms of --show, written as in --algorithms; a bare name is the first of that name."""
    if show is None:
        return list(dict.fromkeys((comparison.results[0], comparison.ring)))
    shown: list[AlgorithmResult] = []
    for word in (word.strip() for word in show.split(",") if word.strip()):
        same_algorithm = (entry for entry in comparison.results if entry.candidate.algorithm == word)
        entry = comparison.named(word) or next(same_algorithm, None)
        if entry is None:
            valid = ", ".join(entry.name for entry in comparison.results)
            raise ConfigError(f"--show {show}: {word!r} was not simulated; valid: {valid}")
        shown.append(entry)
    if not shown:
        raise ConfigError(f"--show {show!r}: names no algorithm; leave it out for the fastest and the even ring")
    return list(dict.fromkeys(shown))


def _write(comparison: Comparison, options: SimulateOptions) -> dict[str, str]:
    """Write the requested files; return their paths by kind."""
    files, shown = {}, _shown(comparison, options.show)
    if options.png is not None:
        from mindspeed_cp.report.timelines import draw_timelines

        files["picture"] = str(draw_timelines(comparison, options.png, shown))
    if options.trace is not None:
        from mindspeed_cp.report.trace_events import timeline_recording, write_trace

        recordings = [timeline_recording(entry.timeline, f"{entry.name}, modelled") for entry in shown]
        files["trace"] = str(write_trace(options.trace, recordings))
    return files
