"""`mindspeed-cp simulate`: algorithms compared by modelled time; its switches, its tables, its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.cost.choose import Decision
    from mindspeed_cp.report import Table
    from mindspeed_cp.report.simulated import Comparison, Problem, Simulated, Wanted

#: Batches by which --choose chooses: the first ones.
CHOOSE_BY = 4


def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(help="Settings of a training, a YAML file: its model, ranks, rows.", show_default=False),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME|700,30,4100",
            help="Document lengths: a file with one on a line, a set such as wikipedia or prolong, or the numbers.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="a2, a3, a800, h800, h200 or a YAML file. Default: the settings', or a2.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes. Default: the settings', or 1.", show_default=False)
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: the settings', or all of the cluster's.", show_default=False)
    ] = None,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Of batches that are drawn from --lengths. Default: 4096.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draw. Default: 0.", show_default=False)] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="How many; the table has their means. Default: 1.", show_default=False),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads. Default: 32.", show_default=False)] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads. Default: 8 where they divide the heads.", show_default=False)
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels of a head. Default: 128.", show_default=False)] = None,
    algorithms: Annotated[
        str,
        typer.Option(help="all, or names, with options if need be: ring,direct:prefetch=4:layout=balanced."),
    ] = "all",
    sharing: Annotated[
        str,
        typer.Option(
            metavar="fair|fifo",
            help="Of links: fair shares, or first in, first out: a message holds its place at a busy receiver.",
        ),
    ] = "fair",
    show: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Drawn in --png and --trace. Default: the fastest and the even ring.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw timelines, balance, tiles.", show_default=False)] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write timelines for ui.perfetto.dev (JSON).", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to look around in; needs no network.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Replace one of the settings; may be repeated.",
            show_default=False,
        ),
    ] = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Try options of all algorithms too, and say in three lines what to take.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Compare algorithms on documents and a cluster before anything runs: modelled time of a layer, and where it goes.

    mindspeed-cp simulate --lengths wikipedia --cluster a2 --nodes 4 --html out.html
    """
    from mindspeed_cp.cli_problem import Asked, read
    from mindspeed_cp.report.files import check_suffix
    from mindspeed_cp.report.simulated import compare

    for switch, file, suffixes in (
        ("--png", png, [".png"]),
        ("--trace", trace, [".json"]),
        ("--html", html, [".html", ".htm"]),
    ):
        if file is not None:
            check_suffix(switch, file, suffixes)
    if show is not None and png is None and trace is None:
        raise ConfigError(f"--show {show}: says what --png and --trace draw; give one of them, or leave --show out")
    asked = Asked(
        config, tuple(overrides or ()), lengths, cluster, nodes, ranks_per_node, tokens_per_rank, seed, batches, heads,
        kv_heads, head_dim, algorithms, sharing,
    )  # fmt: skip
    problem, wanted = read(asked)
    decision = _choice(problem, wanted) if choose else None
    comparison = compare(problem, wanted)
    drawn = _drawn(comparison, show)
    files = _write(comparison, drawn, png, trace, html)
    if as_json:
        print(json.dumps({**as_dict(comparison), **_choice_as_dict(decision), "files": files}, allow_nan=False))
        return 0
    from mindspeed_cp.report.console import print_tables

    print_tables(tables(comparison))
    if decision is not None:
        print("\n".join(("auto takes", *(f"  {line}" for line in decision.reasons))))
    for note in comparison.notes:
        print(f"note: {note}")
    for what, path in files.items():
        print(f"{what}: {path}")
    return 0


def _choice(problem: Problem, wanted: list[Wanted]) -> Decision:
    """What `algorithm: auto` takes for these batches; it joins what is compared."""
    from mindspeed_cp.cost.choose import choose_algorithm
    from mindspeed_cp.plan import algorithm_options
    from mindspeed_cp.report.simulated import Wanted

    if problem.sharing != "fair":
        raise ConfigError(f"--choose: auto chooses with --sharing fair, not {problem.sharing}; leave one of them out")
    where = problem.topology, problem.attention, problem.cluster, problem.layer
    decision = choose_algorithm(problem.batches[:CHOOSE_BY], *where, options=dict(problem.sizes))
    chosen = decision.candidate
    own = algorithm_options(chosen.algorithm)
    found = Wanted(chosen.algorithm, dict(chosen.options), {k: v for k, v in problem.sizes.items() if k in own})
    if (found.algorithm, dict(found.options)) not in [(one.algorithm, dict(one.options)) for one in wanted]:
        wanted.append(found)
    return decision


def _choice_as_dict(decision: Decision | None) -> dict[str, Any]:
    if decision is None:
        return {}
    chosen = decision.candidate
    choice = {"algorithm": chosen.algorithm, "options": dict(chosen.options), "reasons": decision.reasons}
    return {"choice": choice}


def _drawn(comparison: Comparison, show: str | None) -> list[Simulated]:
    """The algorithms of --show, written as in --algorithms; without options the first of that name."""
    if show is None:
        return list(dict.fromkeys((comparison.simulated[0], comparison.ring)))
    found: list[Simulated] = []
    for word in (word.strip() for word in show.split(",") if word.strip()):
        name = word.replace(":", ", ")
        one = comparison.named(name) or next((s for s in comparison.simulated if s.wanted.algorithm == name), None)
        if one is None:
            known = ", ".join(s.name.replace(", ", ":") for s in comparison.simulated)
            raise ConfigError(f"--show {show}: {word!r} was not simulated; valid: {known}")
        found.append(one)
    if not found:
        raise ConfigError(f"--show {show!r}: names none; leave it out for the fastest and the even ring")
    return list(dict.fromkeys(found))


def _write(
    comparison: Comparison, drawn: Sequence[Simulated], png: Path | None, trace: Path | None, html: Path | None
) -> dict[str, str]:
    """The files that are asked for, by what they are."""
    files = {}
    if png is not None:
        from mindspeed_cp.report.timeline_png import draw_timelines

        files["picture"] = str(draw_timelines(comparison, png, drawn))
    if trace is not None:
        from mindspeed_cp.report.recorded import recording
        from mindspeed_cp.report.trace import write_trace

        files["trace"] = str(write_trace(trace, [recording(one.timeline, f"{one.name}, modelled") for one in drawn]))
    if html is not None:
        from mindspeed_cp.report.simulated_page import write_page

        files["page"] = str(write_page(comparison, html))
    return files


def tables(comparison: Comparison) -> list[Table]:
    """What is printed: the problem, the algorithms, the fastest first, and those that cannot run it."""
    from mindspeed_cp.report import Table
    from mindspeed_cp.report.text import attention_text, size

    problem = comparison.problem
    topology, attention, batch = problem.topology, problem.attention, problem.batches[0]
    longest = max(int(one.lengths.max(initial=0)) for one in problem.batches)
    width = f"{attention.head_dim}" + f"/{attention.head_dim_v}" * (attention.head_dim_v != attention.head_dim)
    many = len(problem.batches)
    first = f" in the first of {many:,} batches" if many > 1 else ""
    about = (
        ("lengths", problem.source),
        ("documents", f"{len(batch):,} of {batch.tokens:,} tokens{first}; the longest has {longest:,}"),
        ("ranks", f"{topology.ranks}: {topology.nodes} x {topology.ranks_per_node} of cluster {problem.cluster.name}"),
        (
            "attention",
            f"{attention.heads} heads, {attention.kv_heads} of keys and values, {width} channels; "
            f"{attention_text(attention)}",
        ),
        ("lower bound", f"{comparison.ms(comparison.bound)} ms: perfect balance, nothing exposed; no plan reaches it"),
    )
    columns = (
        "algorithm", "layer ms", "x ring", "of bound", "imbalance", "compute ms", "exposed ms", "hidden ms",
        "sent/rank", "memory", "waits most for",
    )  # fmt: skip
    rows = []
    for one in comparison.simulated:
        figures = one.figures
        rows.append(
            (
                one.name,
                comparison.ms(figures.seconds),
                f"{figures.speedup:.2f}",
                f"{100 * figures.fraction:.1f} %",
                f"{100 * figures.imbalance:.1f} %",
                comparison.ms(figures.compute),
                comparison.ms(figures.exposed),
                comparison.ms(figures.hidden),
                size(figures.sent),
                size(figures.memory) + " !" * (figures.memory > problem.cluster.memory),
                figures.causes[0][0] if figures.causes else "nothing",
            )
        )
    of = f", means of {many:,} batches" if many > 1 else ""
    title = f"One layer, forward and backward, modelled{of} (ring: every document cut evenly over all ranks)"
    found = [Table("Simulated", ("", ""), about), Table(title, columns, tuple(rows))]
    if comparison.refused:
        refused = tuple((one.name, one.reason) for one in comparison.refused)
        found.append(Table("Cannot run this", ("", ""), refused))
    return found


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values; times in seconds, all modelled."""
    problem = comparison.problem
    return {
        "modelled": True,
        "cluster": problem.cluster.name,
        "nodes": problem.topology.nodes,
        "ranks_per_node": problem.topology.ranks_per_node,
        "ranks": problem.topology.ranks,
        "heads": problem.attention.heads,
        "kv_heads": problem.attention.kv_heads,
        "head_dim": problem.attention.head_dim,
        "sharing": problem.sharing,
        "lengths": problem.source,
        "batches": [{"documents": len(batch), "tokens": batch.tokens} for batch in problem.batches],
        "bound": comparison.bound,
        "algorithms": [
            {
                "name": one.name,
                "algorithm": one.wanted.algorithm,
                "options": dict(one.wanted.options),
                "seconds": one.figures.seconds,
                "speedup": one.figures.speedup,
                "fraction_of_bound": one.figures.fraction,
                "imbalance": one.figures.imbalance,
                "compute": one.figures.compute,
                "attention": one.figures.attention,
                "linear": one.figures.linear,
                "exposed": one.figures.exposed,
                "waits_for_slowest": one.figures.late,
                "hidden": one.figures.hidden,
                "bytes_sent": one.figures.sent,
                "bytes_sent_most": one.figures.sent_most,
                "memory": one.figures.memory,
                "waits_for": dict(one.figures.causes),
            }
            for one in comparison.simulated
        ],
        "refused": [{"name": one.name, "reason": one.reason} for one in comparison.refused],
        "notes": list(comparison.notes),
    }
