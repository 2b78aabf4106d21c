"""Tables of a plan: the plan, its parts, its ranks and its steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.report.plan.modelled_time import ModelledTime
from mindspeed_cp.report.plan.summary import PlanSummary
from mindspeed_cp.report.text import (
    Table,
    describe_attention,
    describe_blocks,
    describe_trees,
    format_bytes,
    format_count,
    format_lengths,
)

TABLE_RANK_LIMIT, TABLE_STEP_LIMIT = 64, 16  # a larger table has the extremes, or the first steps


def plan_tables(summary: PlanSummary, time: ModelledTime | None = None) -> list[Table]:
    """Return the tables of `mindspeed-cp plan`: the plan, with its modelled time if it is given, its parts, what ranks
    hold and send, tiles and work step by step."""
    return [
        _plan_table(summary, time),
        *([_part_table(summary)] if summary.parts else []),
        _rank_table(summary),
        *_step_tables(summary),
    ]


def describe_heads(summary: PlanSummary, rank: int, kv: bool = True) -> str:
    """Return the heads of a rank: "0-1 (kv 0)", without kv "0-1"; "none"."""
    first, last, kv_first, kv_last = summary.heads[rank].tolist()
    if last == first:
        return "none"
    return _range(first, last) + (f" (kv {_range(kv_first, kv_last)})" if kv else "")


def _range(first: int, last: int) -> str:
    return str(first) if last == first + 1 else f"{first}-{last - 1}"


def _plan_table(summary: PlanSummary, time: ModelledTime | None) -> Table:
    attention, topology, sent = summary.plan.attention, summary.plan.topology, summary.traffic
    width = f"{attention.head_dim}" + (f"/{attention.head_dim_v}" * (attention.head_dim != attention.head_dim_v))
    element = "bf16" if summary.bytes_per_element == 2 else "fp32"
    backward = sent["fetch_backward"].sum() + sent["reduce"].sum()
    rows = [
        ("algorithm", summary.plan.algorithm),
        ("ranks", f"{summary.ranks}" + (f" ({topology.nodes} nodes)" if topology.nodes > 1 else "")),
        ("steps", str(summary.steps)),
        ("documents", format_lengths(summary.lengths)),
        ("tokens", format_count(summary.lengths.sum())),
        ("attention", describe_attention(attention)),
        ("heads", f"{attention.heads}, key/value heads {attention.kv_heads}, of width {width}, {element}"),
        ("attention work", f"{format_count(summary.work.sum())} (query, key) pairs, all heads counted"),
        (
            "sent in the forward",
            _traffic_text(sent["fetch_forward"].sum(), "K/V", sent["redistribution_forward"].sum()),
        ),
        ("sent in the backward", _traffic_text(backward, "K/V, dK and dV", sent["redistribution_backward"].sum())),
        ("imbalance of attention", f"{summary.imbalance:.3f} (slowest rank / mean)"),
        ("... if ranks wait at every step", f"{summary.step_imbalance:.3f}"),
        ("imbalance of tokens", f"{summary.token_imbalance:.3f}"),
        *([] if time is None else time.rows()),
    ]
    if summary.kv_lengths is not summary.lengths:
        rows.insert(5, ("keys of the documents", format_lengths(summary.kv_lengths)))
    if summary.plan.documents.trees is not None:
        rows.insert(5, ("trees", describe_trees(summary.plan.documents)))
    if summary.plan.documents.blocks is not None:
        rows.insert(5, ("blocks", describe_blocks(summary.plan.documents)))
    return Table("Plan", ("", ""), tuple(rows))


def _traffic_text(between_steps: int, content: str, by_redistribution: int) -> str:
    """Return the bytes that all ranks send, between steps and by redistributions."""
    parts = [(between_steps, f"of {content}"), (by_redistribution, "by all-to-all")]
    texts = [f"{format_bytes(number)} {how}" for number, how in parts if number]
    return (
        f"{format_bytes(between_steps + by_redistribution)}: {', '.join(texts)}"
        if len(texts) == 2
        else (texts or ["nothing"])[0]
    )


def _part_table(summary: PlanSummary) -> Table:
    """Return each part's share of the documents and of the work."""
    columns = ("part", "by", "documents", "tokens", "steps", "heads", "sent forward", "sent backward", "work", "of all")
    everything = summary.work.sum()
    rows = [
        (
            str(number),
            part.plan.algorithm,
            f"{int((part.lengths > 0).sum()):,}",
            format_count(part.lengths.sum()),
            str(part.steps),
            "split" if part.splits_heads else "all",
            format_bytes(part.sent_forward.sum()),
            format_bytes(part.sent_backward.sum()),
            format_count(part.work.sum()),
            f"{100 * part.work.sum() / everything:.0f} %" if everything else "-",
        )
        for number, part in enumerate(summary.parts)
    ]
    return Table("Parts (steps are named part.step below)", columns, tuple(rows))


def _rank_table(summary: PlanSummary) -> Table:
    split = summary.splits_heads and not summary.parts
    columns = (
        *("rank", *["heads"] * split, "tokens", "documents", "spans"),
        *("sent forward", "sent backward", "buffers forward", "buffers backward", "work", "of mean"),
    )
    work = summary.work.sum(1)
    mean = work.sum() / summary.ranks
    rows = [
        (
            str(rank),
            *[describe_heads(summary, rank)] * split,
            *(f"{int(part[rank]):,}" for part in (summary.tokens, summary.documents, summary.spans)),
            *(format_bytes(part[rank]) for part in (summary.sent_forward, summary.sent_backward, *summary.buffers.T)),
            format_count(work[rank]),
            f"{work[rank] / mean:.3f}" if mean else "-",
        )
        for rank in _ranks_in_table(work)
    ]
    note = f", bytes of {summary.bytes_per_element}-byte elements"
    return Table(f"Ranks{note}{_omitted_note(summary.ranks)}", columns, tuple(rows))


def _step_tables(summary: PlanSummary) -> list[Table]:
    shown = range(min(summary.steps, TABLE_STEP_LIMIT))
    more = () if summary.steps <= TABLE_STEP_LIMIT else ("...",)
    columns = ("rank", *(f"step {summary.labels[step]}" for step in shown), *more, "all")
    ranks = _ranks_in_table(summary.work.sum(1))
    note = _omitted_note(summary.ranks)
    largest = summary.work.max(1, keepdims=True).max() or 1

    def table(title: str, values: np.ndarray, cell: str) -> Table:
        rows = [
            (str(rank), *(cell.format(values[rank, step]) for step in shown), *more, cell.format(values[rank].sum()))
            for rank in ranks
        ]
        return Table(title, columns, tuple(rows))

    share = 100 * summary.work / largest
    rows = [
        (str(rank), *(f"{share[rank, step]:.0f} %" for step in shown), *more, format_count(summary.work[rank].sum()))
        for rank in ranks
    ]
    return [
        table(f"Tiles per step{note}", summary.tiles, "{:,}"),
        Table(f"Work per step, of the largest, {format_count(largest)} pairs{note}", columns, tuple(rows)),
    ]


def _ranks_in_table(work: np.ndarray) -> Sequence[int]:
    """Return all ranks; of too many those with the least and the most work."""
    if len(work) <= TABLE_RANK_LIMIT:
        return range(len(work))
    order = np.argsort(work, kind="stable")
    return sorted(int(rank) for rank in np.concatenate([order[:4], order[-4:]]))


def _omitted_note(ranks: int) -> str:
    return "" if ranks <= TABLE_RANK_LIMIT else f" (the 4 with the least and the 4 with the most work of {ranks})"
