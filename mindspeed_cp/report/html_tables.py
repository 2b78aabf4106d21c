"""Tables as HTML for notebooks: no script, no style sheet, nothing from elsewhere, and every text escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from mindspeed_cp.report.text import Table, is_numeric_column

CELL_LIMIT = 400  # characters of a cell; a longer text, such as the name of a registered algorithm, loses its end


def html_of_tables(tables: Iterable[Table], sentence: str = "") -> str:
    """Return tables one below the other in one element.

    Args:
        tables: cells are texts; columns of numbers are aligned to the right.
        sentence: stands above the tables.
    """
    begin = f"<p>{_text(sentence)}</p>" if sentence else ""
    return f"<div>{begin}{''.join(map(_html_of_table, tables))}</div>"


def _html_of_table(table: Table) -> str:
    aligned = ["right" if column and is_numeric_column(table, column) else "left" for column in _columns(table)]
    if not any(table.columns):  # names and texts
        aligned = ["left"] * len(aligned)
    head = "".join(_cell("th", name, side) for name, side in zip(table.columns, aligned, strict=True))
    rows = "".join(
        f"<tr>{''.join(_cell('td', text, side) for text, side in zip(row, aligned, strict=True))}</tr>"
        for row in table.rows
    )
    caption = f'<caption style="text-align:left;font-weight:bold">{_text(table.title)}</caption>'
    return (
        f'<table style="margin:0.5em 0">{caption}'
        f"{f'<thead><tr>{head}</tr></thead>' if any(table.columns) else ''}<tbody>{rows}</tbody></table>"
    )


def _columns(table: Table) -> range:
    return range(len(table.columns))


def _cell(tag: str, text: str, side: str) -> str:
    return f'<{tag} style="text-align:{side}">{_text(text)}</{tag}>'


def _text(text: str) -> str:
    short = text if len(text) <= CELL_LIMIT else f"{text[: CELL_LIMIT - 3]}..."
    return escape(short.encode("utf-8", "backslashreplace").decode())
