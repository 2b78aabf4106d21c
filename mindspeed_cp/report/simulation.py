"""A comparison of simulated algorithms as tables, as JSON values and as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_cp.choose.compare import AlgorithmResult, Comparison
from mindspeed_cp.report.text import Table, describe_attention, format_bytes


def simulation_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of `mindspeed-cp simulate`: the case, the algorithms, the fastest first, and those that cannot
    run it."""
    case = comparison.case
    topology, attention, batch = case.topology, case.attention, case.batches[0]
    longest = max(int(result.lengths.max(initial=0)) for result in case.batches)
    width = f"{attention.head_dim}" + f"/{attention.head_dim_v}" * (attention.head_dim_v != attention.head_dim)
    batch_count = len(case.batches)
    first = f" in the first of {batch_count:,} batches" if batch_count > 1 else ""
    case_rows = (
        ("lengths", case.source),
        ("documents", f"{len(batch):,} of {batch.tokens:,} tokens{first}; the longest of all has {longest:,}"),
        ("ranks", f"{topology.ranks}: {topology.nodes} x {topology.ranks_per_node} of cluster {case.cluster.name}"),
        (
            "attention",
            f"{attention.heads} heads, {attention.kv_heads} of keys and values, {width} channels; "
            f"{describe_attention(attention)}",
        ),
        (
            "layer",
            f"hidden size {case.layer.hidden_size:,}, {case.layer.flops_per_token / 1e6:,.1f} MFLOP a token on a rank, "
            f"{'bf16' if case.layer.bytes_per_element == 2 else 'fp32'}",
        ),
        ("lower bound", f"{comparison.ms(comparison.bound)} ms: perfect balance, nothing exposed; no plan reaches it"),
    )
    columns = (
        "algorithm", "layer ms", "x ring", "of bound", "imbalance", "compute ms", "exposed ms", "hidden ms",
        "sent/rank", "memory", "waits most for",
    )  # fmt: skip
    rows = []
    for result in comparison.results:
        metrics = result.metrics
        rows.append(
            (
                result.name,
                comparison.ms(metrics.seconds),
                f"{metrics.speedup:.2f}",
                f"{100 * metrics.fraction:.1f} %",
                f"{metrics.imbalance:.3f}",
                comparison.ms(metrics.compute),
                comparison.ms(metrics.exposed),
                comparison.ms(metrics.hidden),
                format_bytes(metrics.sent),
                format_bytes(metrics.memory) + " !" * (metrics.memory > case.cluster.memory),
                metrics.waiting_causes[0][0] if metrics.waiting_causes else "nothing",
            )
        )
    means = f", means of {batch_count:,} batches" if batch_count > 1 else ""
    title = f"One layer, forward and backward, modelled{means} (ring: every document cut evenly over all ranks)"
    tables = [Table("Simulated", ("", ""), case_rows), Table(title, columns, tuple(rows))]
    if comparison.refused:
        tables.append(Table("Cannot run this", ("", ""), tuple(comparison.refused.items())))
    return tables


def simulation_dict(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON values; times are modelled, in seconds."""
    case = comparison.case
    return {
        "modelled": True,
        "cluster": case.cluster.name,
        "nodes": case.topology.nodes,
        "ranks_per_node": case.topology.ranks_per_node,
        "ranks": case.topology.ranks,
        "heads": case.attention.heads,
        "kv_heads": case.attention.kv_heads,
        "head_dim": case.attention.head_dim,
        "hidden_size": case.layer.hidden_size,
        "bytes_per_element": case.layer.bytes_per_element,
        "lengths": case.source,
        "batches": [{"documents": len(batch), "tokens": batch.tokens} for batch in case.batches],
        "bound": comparison.bound,
        "conclusion": conclusion(comparison),
        "range": range_of_conclusion(comparison),
        "range_seconds": [{"fastest": fastest, "ring": ring} for fastest, ring in comparison.range_ends],
        "algorithms": [
            {
                "name": item.name,
                "algorithm": item.candidate.algorithm,
                "options": dict(item.candidate.options),
                "seconds": item.metrics.seconds,
                "batch_seconds": item.metrics.batch_seconds,
                "speedup": item.metrics.speedup,
                "fraction_of_bound": item.metrics.fraction,
                "imbalance": item.metrics.imbalance,
                "compute": item.metrics.compute,
                "attention": item.metrics.attention,
                "linear": item.metrics.linear,
                "exposed": item.metrics.exposed,
                "waits_for_slowest": item.metrics.late,
                "hidden": item.metrics.hidden,
                "bytes_sent": item.metrics.sent,
                "bytes_sent_most": item.metrics.sent_most,
                "memory": item.metrics.memory,
                "waits_for": dict(item.metrics.waiting_causes),
            }
            for item in comparison.results
        ],
        "refused": [{"name": name, "reason": reason} for name, reason in comparison.refused.items()],
        "notes": list(comparison.notes),
    }


#: Algorithms whose modelled times differ by less than this share are tied.
TIE = 0.01

#: Components of a layer's time, and what an algorithm that spends less on one of them does.
_GAINS = {
    "attention": ("computes attention in", ""),
    "linear": ("computes the linear layers in", ""),
    "exposed": ("waits", " for messages"),
    "late": ("waits", " for the slowest rank"),
}


def conclusion(comparison: Comparison) -> str:
    """Return one sentence that names the fastest algorithm, or those that are tied, and why the next one is slower."""
    results, best = comparison.results, comparison.results[0].metrics
    time = f"{comparison.ms(best.seconds)} ms a layer (modelled)"
    if len(results) == 1:
        return f"{results[0].name} takes {time}; no other algorithm was compared."
    tied = [result for result in results if result.metrics.seconds <= best.seconds * (1 + TIE)]
    slower = results[len(tied) :]
    if len(tied) > 1:
        sentence = (
            f"Tie: {_joined([result.name for result in tied])} take {time}, within {100 * TIE:.0f} % of each other"
        )
    else:
        sentence = f"{tied[0].name} is the fastest: {time}"
    if slower:
        ratio = slower[0].metrics.seconds / best.seconds
        sentence += f", {ratio:.2f} times as fast as {slower[0].name}, because {_gain(comparison, tied, slower[0])}"
    if comparison.ring in slower[1:]:
        sentence += f"; {best.speedup:.2f} times as fast as the even ring"
    return f"{sentence}."


def range_of_conclusion(comparison: Comparison) -> str:
    """Return between what the time of the fastest algorithm lies, as a sentence; empty if the cluster has no ranges."""
    if not comparison.range_ends:
        return ""
    case, name = comparison.case, comparison.results[0].name
    fast, slow = (
        f"{comparison.ms(fastest)} ms"
        + ("" if comparison.results[0] is comparison.ring else f", {ring / fastest:.2f} times as fast as the even ring")
        for fastest, ring in comparison.range_ends
    )
    first = "" if len(case.batches) == 1 else " for the first batch"
    return (
        f"Uncertain on {case.cluster.name}: {', '.join(case.cluster.ranges)}. With all of these at the fast end of "
        f"their ranges {name} takes {fast}{first}; at the slow end {slow}."
    )


def _gain(comparison: Comparison, tied: Sequence[AlgorithmResult], slower: AlgorithmResult) -> str:
    """Return where the fastest algorithm saves most of the time that `slower` needs."""
    best = tied[0].metrics
    saved = {name: getattr(slower.metrics, name) - getattr(best, name) for name in _GAINS}
    name = max(saved, key=lambda name: saved[name])
    verb, cause = _GAINS[name]
    subject = "it" if len(tied) == 1 else tied[0].name
    return f"{subject} {verb} {comparison.ms(saved[name])} ms less{cause}"


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]])
