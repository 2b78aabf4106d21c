"""`mindspeed-cp simulate`: compare algorithms by modelled time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindspeed_cp.cli.options import (
    AsJson,
    Dtype,
    HeadDim,
    Heads,
    KvHeads,
    Lengths,
    Nodes,
    Overrides,
    Ranks,
    RanksPerNode,
)
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.choose.candidates import Candidate
    from mindspeed_cp.choose.choose import Decision
    from mindspeed_cp.choose.compare import AlgorithmResult, Comparison, SimulationCase


def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Settings of a training, a YAML file. Default: one node, 32 heads, 8 key/value heads of 128 channels.",
            show_default=False,
        ),
    ] = None,
    lengths: Lengths = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A preset (docs/clusters.md lists them) or a YAML file. Default: of the settings, or a2.",
            show_default=False,
        ),
    ] = None,
    ranks: Ranks = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of drawn batches. Default: 4096.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of drawn batches. Default: 0.", show_default=False)
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Number of batches; the table shows their means. Default: 1.", show_default=False),
    ] = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    algorithms: Annotated[
        str,
        typer.Option(help="all, or names with options after colons, such as ring,direct:prefetch=4"),
    ] = "all",
    sharing: Annotated[
        str,
        typer.Option(
            help="Sharing of links: fair, or fifo: first in, first out, a message waits at a busy receiver.",
        ),
    ] = "fair",
    show: Annotated[
        str | None,
        typer.Option(
            help="Names of the algorithms in --png and --trace. Default: the fastest and the even ring.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw timelines on one scale.", show_default=False)] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write timelines for ui.perfetto.dev (JSON).", show_default=False)
    ] = None,
    overrides: Overrides = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Try options of all algorithms too, and recommend one in three lines.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Compare algorithms on documents and a cluster, before anything runs: modelled time of a layer and its parts.

    mindspeed-cp simulate --lengths wikipedia --cluster a2 --nodes 4 --png out.png
    """
    from mindspeed_cp.choose.compare import EVEN_RING, compare_algorithms
    from mindspeed_cp.cli.case import SimulateRequest, read_case
    from mindspeed_cp.cli.lengths import check_memory
    from mindspeed_cp.report.files import check_output_path
    from mindspeed_cp.report.simulation import conclusion, simulation_dict, simulation_tables

    for option, file, suffix in (("--png", png, ".png"), ("--trace", trace, ".json")):
        if file is not None:
            check_output_path(option, file, [suffix])
    if show is not None and png is None and trace is None:
        raise ConfigError(f"--show {show}: applies to --png and --trace; give one of them, or leave --show out")
    request = SimulateRequest(
        config, overrides or (), None, heads, kv_heads, head_dim, cluster, ranks, nodes, ranks_per_node, dtype,
        lengths, tokens_per_rank, seed, batches, algorithms, sharing,
    )  # fmt: skip
    case, candidates = read_case(request)
    for algorithm in dict.fromkeys(candidate.algorithm for candidate in (EVEN_RING, *candidates)):
        check_memory(max(case.batches, key=len), case.topology.ranks, algorithm)
    decision = _choose(case, candidates) if choose else None
    comparison = compare_algorithms(case, candidates)
    shown = _shown(comparison, show)
    files = _write(comparison, shown, png, trace)
    if as_json:
        print(json.dumps({**simulation_dict(comparison), **_choice_as_dict(decision), "files": files}, allow_nan=False))
        return 0
    from mindspeed_cp.report.text import print_tables, wrap_text

    print_tables(simulation_tables(comparison))
    if decision is not None:
        print("\n".join(("auto takes", *(f"  {line}" for line in decision.reasons))))
    for note in comparison.notes:
        print(wrap_text(f"note: {note}"))
    for kind, path in files.items():
        print(f"{kind}: {path}")
    print(wrap_text(conclusion(comparison)))
    return 0


def _choose(case: SimulationCase, candidates: list[Candidate]) -> Decision:
    """Return what `algorithm: auto` takes for these batches, and add it to the algorithms to compare."""
    from mindspeed_cp.choose.choose import choose_algorithm
    from mindspeed_cp.train.algorithm_choice import SAMPLE_ROWS

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


def _write(
    comparison: Comparison, shown: Sequence[AlgorithmResult], png: Path | None, trace: Path | None
) -> dict[str, str]:
    """Write the requested files; return their paths by kind."""
    files = {}
    if png is not None:
        from mindspeed_cp.report.timelines import draw_timelines

        files["picture"] = str(draw_timelines(comparison, png, shown))
    if trace is not None:
        from mindspeed_cp.report.trace_events import timeline_recording, write_trace

        files["trace"] = str(
            write_trace(trace, [timeline_recording(entry.timeline, f"{entry.name}, modelled") for entry in shown])
        )
    return files
