"""Tables, matrices and bars of a page as HTML; every text is escaped."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape

from mindspeed_cp.report.text import Table, is_numeric_column

#: Widest line of text of a cell that stays on one line.
SHORT_TEXT = 40
HEAT_LOW, HEAT_HIGH = (224, 72, 62), (43, 138, 87)  # red and green, as in the findings

#: Colours of bars and of their text: attributes, since some programs that show pages keep styles from pictures.
MEASURED, PREDICTED, TEXT = "#4c7fc4", "#e6a323", "#1c2430"
BAR_HEIGHT, ROW_HEIGHT, NAME_WIDTH, BAR_WIDTH, NUMBER_WIDTH = 9, 27, 110, 480, 170


def section(title: str, *parts: str) -> str:
    """Return a section of the page; "" without parts."""
    content = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def table_html(table: Table) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    classes = []
    for column in range(len(table.columns)):
        cells = [row[column] for row in table.rows]
        numeric = column > 0 and is_numeric_column(table, column) and max(map(len, cells), default=0) < SHORT_TEXT
        classes.append("" if numeric else "left")
    head = "".join(f"<th class='{name}'>{escape(text)}</th>" for text, name in zip(table.columns, classes, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row, classes))}</tr>" for row in table.rows)
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return f"{title}<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(text: str, name: str) -> str:
    if name and len(text) > SHORT_TEXT:
        name = "text"
    if text.startswith(("FAILED", "WRONG")):
        name += " bad"
    return f"<td class='{name}'>{escape(text)}</td>"


def heat_html(
    title: str,
    size: int,
    values: Mapping[tuple[int, int], float],
    unit: str,
    failed: Collection[tuple[int, int]] = (),
) -> str:
    """Return a matrix from rows to columns; the colour of a cell is its share of the largest value.

    Args:
        title: stands above it.
        size: ranks.
        values: by (row, column); others are empty.
        unit: of the values.
        failed: (row, column) of what could not be measured; those that have a value show it.
    """
    most = max(values.values(), default=0.0)
    head = "".join(f"<th>{column}</th>" for column in range(size))
    rows = []
    for row in range(size):
        cells = []
        for column in range(size):
            value = values.get((row, column))
            if value is None:
                cells.append("<td class='bad'>failed</td>" if (row, column) in failed else "<td></td>")
                continue
            red, green, blue = _mixed(value / most if most else 0.0)
            style = f"background: rgba({red},{green},{blue},.45)"
            text = f"{value:.3g}"
            cells.append(f"<td style='{style}' title='{row} to {column}: {text} {escape(unit)}'>{text}</td>")
        rows.append(f"<tr><th>{row}</th>{''.join(cells)}</tr>")
    return (
        f"<div><h3>{escape(title)}</h3><div class='wide'><table class='heat'><thead><tr><th>from \\ to</th>{head}</tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _mixed(share: float) -> tuple[int, ...]:
    return tuple(round(low + (high - low) * share) for low, high in zip(HEAT_LOW, HEAT_HIGH, strict=True))


def bars_html(rows: Sequence[tuple[str, float, float | None]], unit: str) -> str:
    """Return pairs of bars, measured above predicted.

    Args:
        rows: name, measured and predicted value; None: not predicted.
        unit: of the values.
    """
    most = max((max(measured, predicted or 0.0) for _, measured, predicted in rows), default=0.0)
    height = ROW_HEIGHT * len(rows) + 4
    parts = []
    for number, (name, measured, predicted) in enumerate(rows):
        top = number * ROW_HEIGHT + 4
        parts.append(f"<text x='0' y='{top + 14}'>{escape(name)}</text>")
        for offset, colour, value in ((0, MEASURED, measured), (BAR_HEIGHT + 1, PREDICTED, predicted)):
            if value is not None:
                width = BAR_WIDTH * value / most if most else 0.0
                place = f"x='{NAME_WIDTH}' y='{top + offset}' width='{width:.1f}' height='{BAR_HEIGHT}'"
                parts.append(f"<rect fill='{colour}' {place}/>")
        text = f"{measured:.4g}" + ("" if predicted is None else f" / {predicted:.4g}")
        right = NAME_WIDTH + BAR_WIDTH * max(measured, predicted or 0.0) / most + 6 if most else NAME_WIDTH
        parts.append(f"<text x='{right:.1f}' y='{top + 14}'>{text} {escape(unit)}</text>")
    width = NAME_WIDTH + BAR_WIDTH + NUMBER_WIDTH
    colours = ((MEASURED, "measured"), (PREDICTED, "simulated on the fitted cluster"))
    keys = "".join(f"<i style='background: {colour}'></i>{text}" for colour, text in colours)
    font = f"font-family='sans-serif' font-size='12' fill='{TEXT}'"
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    return f"<svg {size} {font} role='img'>{''.join(parts)}</svg><p class='quiet key'>{keys}</p>"
