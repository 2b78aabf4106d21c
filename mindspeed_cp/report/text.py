"""Tables of text cells, on a terminal and as HTML for notebooks, and numbers and settings as text."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.table import Table as RichTable

_COLUMN_GAP = 3  # spaces between columns
_UNLIMITED_WIDTH, _HTML_WIDTH = 400, 160


@dataclass(frozen=True)
class Table:
    """A titled table.

    Attributes:
        title: line above the table.
        columns: headings. The first column names the rows, and so do the columns after it that have no heading. A table
            whose headings are all empty is a list of names and texts.
        rows: as many cells as columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def name_columns(self) -> int:
        """Number of columns, from the left, that name the rows."""
        if not any(self.columns):
            return 1
        return next((number for number, heading in enumerate(self.columns) if number and heading), len(self.columns))


def format_count(number: float) -> str:
    """Return a whole number in groups of three digits, from ten millions on in millions, billions (G) or trillions
    (T)."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e7, "M")):
        if abs(number) >= size:
            return f"{number / (1e6 if unit == 'M' else size):,.1f} {unit}"
    return f"{int(number):,}"


def format_bytes(number: float) -> str:
    """Return bytes in the largest unit of B, KiB, MiB and GiB that gives 1 or more."""
    for unit, limit in (("B", 1 << 10), ("KiB", 1 << 20), ("MiB", 1 << 30)):
        if number < limit:
            return f"{number:,.0f} B" if unit == "B" else f"{number * 1024 / limit:,.1f} {unit}"
    return f"{number / (1 << 30):,.1f} GiB"


def format_lengths(lengths: np.ndarray) -> str:
    """Return the number of documents and the lengths of the first: "3 (700, 30, 4,100)"."""
    shown = ", ".join(format_count(n) for n in lengths[:8]) + (", ..." if len(lengths) > 8 else "")
    return f"{len(lengths):,}" + (f" ({shown})" if len(lengths) else "")


def describe_trees(documents: Documents) -> str:
    """Return the number of trees and their depth, and what the paths to all leaves have: "2, up to 3 documents deep; as
    trajectories 5 documents, 12,300 tokens"."""
    trees = documents.trees
    assert trees is not None
    ends = (documents.first_positions + documents.lengths)[trees.leaves]
    return (
        f"{format_count(int(documents.tree_numbers[-1]) + 1)}, up to {trees.depths.max() + 1} documents deep; as "
        f"trajectories {format_count(len(ends))} documents, {format_count(ends.sum())} tokens"
    )


def describe_blocks(documents: Documents) -> str:
    """Return the number of blocks and of their tokens: "3, of 120 tokens that see both ways"."""
    blocks = documents.blocks
    assert blocks is not None
    tokens = (blocks.stop - blocks.start).sum()
    return f"{format_count(len(blocks.start))}, of {format_count(tokens)} tokens that see both ways"


def describe_attention(attention: AttentionConfig) -> str:
    """Return mask, window, ALiBi and dropout in a few words."""
    parts = [f"{attention.mask} mask"]
    if attention.window is not None:
        left, right = ("all" if side == -1 else f"{side:,}" for side in attention.window)
        parts.append(f"window of {left} back" + ("" if attention.mask == "causal" else f", {right} ahead"))
    parts += ["ALiBi"] * (attention.slopes is not None)
    parts += [f"dropout {attention.dropout:g}"] * (attention.dropout > 0)
    return ", ".join(parts)


def output_width() -> int:
    """Return the columns of the terminal; a large number if the output is no terminal and COLUMNS is not set."""
    return get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNLIMITED_WIDTH


def wrap_text(text: str) -> str:
    """Break the lines that are wider than the terminal, between words."""
    width = output_width()
    lines = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) if len(line) > width else [line]
        for line in text.split("\n")
    )
    return "\n".join(part for parts in lines for part in parts)


def print_tables(tables: Iterable[Table], file: TextIO | None = None) -> None:
    """Print tables one below the other, to standard output or a file.

    A table that is wider than the terminal is printed as several blocks of columns, each with the names of the rows, so
    that no name and no number is cut. The width is unlimited if the output is no terminal and COLUMNS is not set.
    """
    from rich.console import Console

    _print_to(Console(file=file, markup=False, highlight=False, emoji=False, width=output_width()), tables)


def html_of_tables(tables: Iterable[Table], sentence: str = "") -> str:
    """Return tables one below the other as HTML without scripts and style sheets, below a sentence."""
    from rich.console import Console
    from rich.jupyter import JUPYTER_HTML_FORMAT

    console = Console(
        file=StringIO(), markup=False, highlight=False, emoji=False, width=_HTML_WIDTH, record=True, force_jupyter=False
    )
    if sentence:
        console.print(sentence)
    _print_to(console, tables)
    return console.export_html(inline_styles=True, code_format=JUPYTER_HTML_FORMAT)


def _print_to(console: Console, tables: Iterable[Table]) -> None:
    for table in tables:
        console.print(table.title, style="bold")
        for block in column_blocks(table, console.width):
            console.print(_rich_table(table, block))


def column_blocks(table: Table, width: int) -> list[list[int]]:
    """Return the columns of each block: the columns that name the rows, and as many of the others as fit into `width`.

    A list of names and texts is one block; its texts are wrapped.
    """
    if not any(table.columns):
        return [list(range(len(table.columns)))]
    widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    names = list(range(table.name_columns))
    name_width = sum(widths[: len(names)]) + _COLUMN_GAP * len(names)  # the table has a space at each edge
    blocks, used = [names.copy()], name_width
    for column in range(len(names), len(widths)):
        if used + widths[column] + _COLUMN_GAP > width + 1 and len(blocks[-1]) > len(names):
            blocks.append(names.copy())
            used = name_width
        blocks[-1].append(column)
        used += widths[column] + _COLUMN_GAP
    return blocks


def _rich_table(table: Table, block: Sequence[int]) -> RichTable:
    """Return a block of columns for rich, which wraps the widest ones where they do not fit; columns of numbers, with
    or without units, are aligned right."""
    from rich import box
    from rich.table import Table as RichTable

    has_headings = any(table.columns)
    result = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_header=has_headings)
    for index in block:
        is_right = has_headings and index and all(re.match(r"[-+]?$|[-+]?[.\d]", row[index]) for row in table.rows)
        result.add_column(table.columns[index], justify="right" if is_right else "left", overflow="fold")
    for row in table.rows:
        result.add_row(*(row[index] for index in block))
    return result
