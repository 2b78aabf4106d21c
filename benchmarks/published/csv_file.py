"""A file with a line for each batch: milliseconds of every system."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.systems import COMPARATORS, OURS, SYSTEMS, VARIANTS
from benchmarks.published.table import Row

#: Columns before those of the systems, and behind them.
SETTING = ("table", "cluster", "heads", "lengths", "ranks", "seed", "documents", "longest", "bound ms")
RESULT = ("fastest published", "ours over it", "of the bound")


def write_batches(file: Path, rows_of_table: Mapping[str, Sequence[Row]]) -> None:
    """Write a line for each batch of each row.

    Args:
        file: the file, which is replaced.
        rows_of_table: rows by the name of their table.
    """
    with open(file, "w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow([*SETTING, *(f"{name} ms" for name in SYSTEMS), *RESULT])
        for table, rows in rows_of_table.items():
            writer.writerows(line for row in rows for line in batch_lines(table, row))


def batch_lines(table: str, row: Row) -> list[list[Any]]:
    """Return the cells of each batch of a row; those of a system that cannot run it are empty."""
    lines = []
    for batch, (seed, lengths) in enumerate(zip(row.seeds, row.documents, strict=True)):
        times = {name: row.seconds[name][batch] for name in SYSTEMS}
        able = {name: seconds for name, seconds in times.items() if seconds is not None}
        others = [name for name in able if name not in (OURS, *VARIANTS, *COMPARATORS)]
        fastest = min(others, key=able.__getitem__)
        result = [fastest, f"{able[fastest] / able[OURS]:.4f}", f"{row.bound[batch] / able[OURS]:.4f}"]
        setting = [table, row.cluster, row.heads, row.lengths, row.ranks, seed, *lengths, _ms(row.bound[batch])]
        lines.append([*setting, *map(_ms, times.values()), *result])
    return lines


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4f}"
