"""Tables of a plan's numbers, as plain text cells: the command line prints them, a notebook or a test reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.report.summary import PlanSummary

MOST_RANKS, MOST_STEPS = 64, 16  # beyond these a table tells the extremes and not every rank or step


@dataclass(frozen=True)
class Table:
    """A titled table: `rows` of as many cells as `columns`; the first column is a name, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plan_tables(summary: PlanSummary) -> list[Table]:
    """The tables that `mindspeed-cp plan` prints: the plan, its parts, what ranks hold and send, tiles and work step by
    step."""
    return [_overview(summary), *([_parts(summary)] if summary.parts else []), _holdings(summary), *_steps(summary)]


def count(number: float) -> str:
    """A whole number in groups of three digits, or in millions and more where that is easier to read."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e7, "M")):
        if abs(number) >= size:
            return f"{number / (1e6 if unit == 'M' else size):,.1f} {unit}"
    return f"{int(number):,}"


def size(number: float) -> str:
    """Bytes in the unit that fits."""
    for unit, limit in (("B", 1 << 10), ("KiB", 1 << 20), ("MiB", 1 << 30)):
        if number < limit:
            return f"{number:,.0f} B" if unit == "B" else f"{number * 1024 / limit:,.1f} {unit}"
    return f"{number / (1 << 30):,.1f} GiB"


def heads_text(summary: PlanSummary, rank: int, kv: bool = True) -> str:
    """The heads of a rank: "0-1 (kv 0)", without kv "0-1"; "none"."""
    first, last, kv_first, kv_last = summary.heads[rank].tolist()
    if last == first:
        return "none"
    return _range(first, last) + (f" (kv {_range(kv_first, kv_last)})" if kv else "")


def attention_text(attention: AttentionConfig) -> str:
    """What is computed, in few words."""
    parts = [f"{attention.mask} mask"]
    if attention.window is not None:
        left, right = ("all" if side == -1 else f"{side:,}" for side in attention.window)
        parts.append(f"window of {left} back" + ("" if attention.mask == "causal" else f", {right} ahead"))
    parts += ["ALiBi"] * (attention.slopes is not None)
    parts += [f"dropout {attention.dropout:g}"] * (attention.dropout > 0)
    return ", ".join(parts)


def _range(first: int, last: int) -> str:
    return str(first) if last == first + 1 else f"{first}-{last - 1}"


def _some(lengths: np.ndarray) -> str:
    shown = ", ".join(count(n) for n in lengths[:8]) + (", ..." if len(lengths) > 8 else "")
    return f"{len(lengths):,}" + (f" ({shown})" if len(lengths) else "")


def _overview(summary: PlanSummary) -> Table:
    attention, topology, sent = summary.attention, summary.topology, summary.traffic
    width = f"{attention.head_dim}" + (f"/{attention.head_dim_v}" * (attention.head_dim != attention.head_dim_v))
    backward = sent["fetch_backward"].sum() + sent["reduce"].sum()
    rows = [
        ("algorithm", summary.algorithm),
        ("ranks", f"{summary.ranks}" + (f" ({topology.nodes} nodes)" if topology.nodes > 1 else "")),
        ("steps", str(summary.steps)),
        ("documents", _some(summary.lengths)),
        ("tokens", count(summary.lengths.sum())),
        ("attention", attention_text(attention)),
        ("heads", f"{attention.heads}, key/value heads {attention.kv_heads}, of width {width}"),
        ("attention work", f"{count(summary.work.sum())} (query, key) pairs, all heads counted"),
        ("sent in the forward", _sent(sent["fetch_forward"].sum(), "K/V", sent["move_forward"].sum())),
        ("sent in the backward", _sent(backward, "K/V, dK and dV", sent["move_backward"].sum())),
        ("imbalance of attention", f"{summary.imbalance:.3f} (slowest rank / mean)"),
        ("... if ranks wait at every step", f"{summary.step_imbalance:.3f}"),
        ("imbalance of tokens", f"{summary.token_imbalance:.3f}"),
    ]
    if summary.kv_lengths is not summary.lengths:
        rows.insert(5, ("keys of the documents", _some(summary.kv_lengths)))
    return Table("Plan", ("", ""), tuple(rows))


def _sent(between_steps: int, what: str, by_move: int) -> str:
    """Bytes of all ranks, and by what they are sent."""
    parts = [(between_steps, f"of {what}"), (by_move, "by all-to-all")]
    said = [f"{size(number)} {how}" for number, how in parts if number]
    return f"{size(between_steps + by_move)}: {', '.join(said)}" if len(said) == 2 else (said or ["nothing"])[0]


def _parts(summary: PlanSummary) -> Table:
    """What each part has of the documents and of the work."""
    columns = ("part", "by", "documents", "tokens", "steps", "heads", "sent forward", "sent backward", "work", "of all")
    everything = summary.work.sum()
    rows = [
        (
            str(number),
            part.algorithm,
            f"{int((part.lengths > 0).sum()):,}",
            count(part.lengths.sum()),
            str(part.steps),
            "split" if part.splits_heads else "all",
            size(part.sent_forward.sum()),
            size(part.sent_backward.sum()),
            count(part.work.sum()),
            f"{100 * part.work.sum() / everything:.0f} %" if everything else "-",
        )
        for number, part in enumerate(summary.parts)
    ]
    return Table("Parts (steps are named part.step below)", columns, tuple(rows))


def _holdings(summary: PlanSummary) -> Table:
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
            *[heads_text(summary, rank)] * split,
            *(f"{int(part[rank]):,}" for part in (summary.tokens, summary.documents, summary.spans)),
            *(size(part[rank]) for part in (summary.sent_forward, summary.sent_backward, *summary.buffers.T)),
            count(work[rank]),
            f"{work[rank] / mean:.3f}" if mean else "-",
        )
        for rank in _shown(work)
    ]
    note = f", bytes of {summary.bytes_per_element}-byte elements"
    return Table(f"Ranks{note}{_note(summary.ranks)}", columns, tuple(rows))


def _steps(summary: PlanSummary) -> list[Table]:
    shown = range(min(summary.steps, MOST_STEPS))
    more = () if summary.steps <= MOST_STEPS else ("...",)
    columns = ("rank", *(f"step {summary.labels[step]}" for step in shown), *more, "all")
    ranks = _shown(summary.work.sum(1))
    note = _note(summary.ranks)
    largest = summary.work.max(1, keepdims=True).max() or 1

    def table(title: str, values: np.ndarray, cell: str) -> Table:
        rows = [
            (str(rank), *(cell.format(values[rank, step]) for step in shown), *more, cell.format(values[rank].sum()))
            for rank in ranks
        ]
        return Table(title, columns, tuple(rows))

    share = 100 * summary.work / largest
    rows = [
        (str(rank), *(f"{share[rank, step]:.0f} %" for step in shown), *more, count(summary.work[rank].sum()))
        for rank in ranks
    ]
    return [
        table(f"Tiles per step{note}", summary.tiles, "{:,}"),
        Table(f"Work per step, of the largest, {count(largest)} pairs{note}", columns, tuple(rows)),
    ]


def _shown(work: np.ndarray) -> Sequence[int]:
    """All ranks, or of very many the ones with the least and the most work."""
    if len(work) <= MOST_RANKS:
        return range(len(work))
    order = np.argsort(work, kind="stable")
    return sorted(int(rank) for rank in np.concatenate([order[:4], order[-4:]]))


def _note(ranks: int) -> str:
    return "" if ranks <= MOST_RANKS else f" (the 4 with the least and the 4 with the most work of {ranks})"
