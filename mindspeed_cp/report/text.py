"""Tables of text cells, on a terminal and as HTML for notebooks, and numbers and settings as text."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table as RichTable

_COLUMN_GAP = 3  # spaces between columns
_LEAST_WIDTH = 12  # of a column that is wrapped
_UNLIMITED_WIDTH = 400
_HTML_CELL_LIMIT = 400  # characters; a longer text, such as the name of a registered algorithm, loses its end


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

    console = Console(file=file, markup=False, highlight=False, emoji=False, width=output_width())
    for table in tables:
        console.print(table.title, style="bold")
        for block in column_blocks(table, console.width):
            console.print(_rich_table(table, block, console.width))


def column_blocks(table: Table, width: int) -> list[list[int]]:
    """Return the columns of each block: the columns that name the rows, and as many of the others as fit into `width`.

    A list of names and texts is one block; its texts are wrapped.
    """
    if not any(table.columns):
        return [list(range(len(table.columns)))]
    widths = _column_widths(table)
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


def _column_widths(table: Table) -> list[int]:
    return [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]


def is_numeric_column(table: Table, column: int) -> bool:
    """Return True if the cells of a column are numbers, with or without units."""
    return all(re.match(r"[-+]?$|[-+]?[.\d]", row[column]) for row in table.rows)


def _rich_table(table: Table, block: Sequence[int], width: int) -> RichTable:
    """Return a block of columns for rich. Where they do not fit, the widest ones are wrapped."""
    from rich import box
    from rich.table import Table as RichTable

    widths, has_headings = _column_widths(table), any(table.columns)
    unwrapped = _unwrapped_columns(widths, block, width)
    result = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_header=has_headings)
    for index in block:
        result.add_column(
            table.columns[index],
            justify="right" if has_headings and index and is_numeric_column(table, index) else "left",
            overflow="fold",
            no_wrap=index in unwrapped,
        )
    for row in table.rows:
        result.add_row(*(row[index] for index in block))
    return result


def _unwrapped_columns(widths: Sequence[int], block: Sequence[int], width: int) -> set[int]:
    """Return the columns that get all of their width: the narrowest ones, such that each of the others has some."""
    least = {index: min(widths[index], _LEAST_WIDTH) for index in block}
    room, unwrapped = width + 1 - sum(least.values()) - _COLUMN_GAP * len(block), set()
    for index in sorted(block, key=lambda index: widths[index]):
        room -= widths[index] - least[index]
        if room >= 0:
            unwrapped.add(index)
    return unwrapped


def html_of_tables(tables: Iterable[Table], sentence: str = "") -> str:
    """Return tables one below the other as HTML without scripts and style sheets, below a sentence; all texts are
    escaped."""
    begin = f"<p>{_html_text(sentence)}</p>" if sentence else ""
    return f"<div>{begin}{''.join(map(_html_of_table, tables))}</div>"


def _html_of_table(table: Table) -> str:
    has_headings = any(table.columns)
    sides = [
        "right" if has_headings and column and is_numeric_column(table, column) else "left"
        for column in range(len(table.columns))
    ]

    def row(tag: str, cells: Sequence[str]) -> str:
        texts = [
            f'<{tag} style="text-align:{side}">{_html_text(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        ]
        return f"<tr>{''.join(texts)}</tr>"

    head = f"<thead>{row('th', table.columns)}</thead>" if has_headings else ""
    caption = f'<caption style="text-align:left;font-weight:bold">{_html_text(table.title)}</caption>'
    rows = "".join(row("td", cells) for cells in table.rows)
    return f'<table style="margin:0.5em 0">{caption}{head}<tbody>{rows}</tbody></table>'


def _html_text(text: str) -> str:
    short = text if len(text) <= _HTML_CELL_LIMIT else f"{text[: _HTML_CELL_LIMIT - 3]}..."
    return escape(short.encode("utf-8", "backslashreplace").decode())
