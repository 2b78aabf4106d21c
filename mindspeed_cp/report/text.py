"""Tables of a plan's numbers, as plain text cells: the command line prints them, a notebook or a test reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.report.summary import PlanSummary

MOST_RANKS, MOST_STEPS = 64, 16  # beyond these a table tells the extremes and not every rank or step


@dataclass(frozen=True)
class Table:
    """A titled table: `rows` of as many cells as `columns`; the first column is a name, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plan_tables(summary: PlanSummary) -> list[Table]:
    """The tables that `mindspeed-cp plan` prints: the plan, what ranks hold and send, tiles and work step by step."""
    return [_overview(summary), _holdings(summary), *_steps(summary)]


def count(number: float) -> str:
    """A whole number in groups of three digits, or in millions and more where that is easier to read."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e7, "M")):
        if abs(number) >= size:
            return f"{number / (1e6 if unit == 'M' else size):,.1f} {unit}"
    return f"{int(number):,}"


def _overview(summary: PlanSummary) -> Table:
    lengths = summary.lengths
    some = ", ".join(count(n) for n in lengths[:8]) + (", ..." if len(lengths) > 8 else "")
    rows = [
        ("algorithm", summary.algorithm),
        ("ranks", str(summary.ranks)),
        ("steps", str(summary.steps)),
        ("documents", f"{len(lengths):,}" + (f" ({some})" if len(lengths) else "")),
        ("tokens", count(lengths.sum())),
        ("attention work", f"{count(summary.work.sum())} (query, key) pairs"),
        ("key/value rows sent", count(summary.sent.sum())),
        ("imbalance of attention", f"{summary.imbalance:.3f} (slowest rank / mean)"),
        ("... if ranks wait at every step", f"{summary.step_imbalance:.3f}"),
        ("imbalance of tokens", f"{summary.token_imbalance:.3f}"),
    ]
    return Table("Plan", ("", ""), tuple(rows))


def _holdings(summary: PlanSummary) -> Table:
    columns = (
        "rank",
        "tokens",
        "documents",
        "spans",
        "K/V sent",
        "K/V received",
        "gradients sent",
        "buffer rows",
        "work",
        "of mean",
    )
    work = summary.work.sum(1)
    mean = work.sum() / summary.ranks
    rows = [
        (
            str(rank),
            *(f"{int(part[rank]):,}" for part in (summary.tokens, summary.documents, summary.spans)),
            *(f"{int(part[rank]):,}" for part in (summary.sent, summary.received, summary.reduced, summary.slots)),
            count(work[rank]),
            f"{work[rank] / mean:.3f}" if mean else "-",
        )
        for rank in _shown(work)
    ]
    return Table(f"Ranks{_note(summary.ranks)}", columns, tuple(rows))


def _steps(summary: PlanSummary) -> list[Table]:
    shown = range(min(summary.steps, MOST_STEPS))
    more = () if summary.steps <= MOST_STEPS else ("...",)
    columns = ("rank", *(f"step {step}" for step in shown), *more, "all")
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
        Table(f"Work per step, of the largest cell ({count(largest)} pairs){note}", columns, tuple(rows)),
    ]


def _shown(work: np.ndarray) -> Sequence[int]:
    """All ranks, or of very many the ones with the least and the most work."""
    if len(work) <= MOST_RANKS:
        return range(len(work))
    order = np.argsort(work, kind="stable")
    return sorted(int(rank) for rank in np.concatenate([order[:4], order[-4:]]))


def _note(ranks: int) -> str:
    return "" if ranks <= MOST_RANKS else f" (the 4 with the least and the 4 with the most work of {ranks})"
