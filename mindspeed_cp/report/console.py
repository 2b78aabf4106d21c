"""Tables on a terminal, by rich; as wide as the text where the output is no terminal, so that nothing is cut."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from mindspeed_cp.report.text import Table


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables one below the other."""
    screen = console if console is not None else Console()
    if not screen.is_terminal:
        screen = Console(file=screen.file, width=400)
    for table in tables:
        shown = RichTable(
            title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        shown.show_header = any(table.columns)
        for index, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if index == 0 or not any(table.columns) else "right")
        for row in table.rows:
            shown.add_row(*row)
        screen.print(shown)
