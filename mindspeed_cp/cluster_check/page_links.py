"""The section of a report about links: matrices of all pairs, all NICs at once, forwarding."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median, median_high
from typing import Any

from mindspeed_cp.cluster_check.html_parts import heat_html, section, table_html
from mindspeed_cp.cluster_check.results import CheckResults, rate_text, rate_unit
from mindspeed_cp.cluster_check.verdict import alone_rates
from mindspeed_cp.report.text import Table, format_bytes

KINDS = {"in_node": "inside nodes", "network": "between nodes"}
MATRIX_RANKS = 64  # a larger matrix is not readable; the table has the slowest links
LISTED, LISTED_BELOW = 12, 0.9
MATRIX_NOTE = (
    "From the rank of the row to the rank of the column. Alone: no other message of the pair is on its way. Both ways: "
    "the opposite message travels at the same time."
)


def links_section(results: CheckResults) -> str:
    """Return the section; "" if no link was measured."""
    parts = []
    if results.links and results.size <= MATRIX_RANKS:
        matrices = [_matrix(results, kind, ways) for kind in KINDS for ways in (("there", "back"), ("both", "both"))]
        note = f"<p class='quiet'>{MATRIX_NOTE}</p>"
        parts += [note, f"<div class='beside'>{''.join(matrices)}</div>"]
    if results.links:
        parts += [table_html(_summary(results.links)), _slowest(results.links)]
    return section("Links", *parts, _together(results), _forwarding(results))


def _matrix(results: CheckResults, kind: str, ways: tuple[str, str]) -> str:
    values = {}
    for row in results.links:
        if row["kind"] == kind:
            first, second = row["pair"]
            values[first, second], values[second, first] = row[ways[0]], row[ways[1]]
    if not values:
        return ""
    unit, size = rate_unit(max(values.values()))
    title = f"{KINDS[kind]}, {'both ways' if ways[0] == 'both' else 'alone'}, {unit}"
    return heat_html(
        title, results.size, {pair: rate / size for pair, rate in values.items()}, unit, _failed(results, kind)
    )


def _failed(results: CheckResults, kind: str) -> set[tuple[int, int]]:
    """Return both directions of the links of failed measurements; some of these may have been measured."""
    items = [failure.item for failure in results.failures if failure.stage == "links" and failure.item]
    pairs = [tuple(pair) for item in items if item["kind"] == kind for pair in item["pairs"]]
    return {ends for first, second in pairs for ends in ((first, second), (second, first))}


def _summary(links: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for kind, name in KINDS.items():
        of_kind = [row for row in links if row["kind"] == kind]
        if of_kind:
            alone = [row[way] for row in of_kind for way in ("there", "back")]
            both = [row["both"] for row in of_kind]
            rows.append(
                (
                    name, str(len(of_kind)), rate_text(min(alone)), rate_text(median(alone)), rate_text(max(alone)),
                    rate_text(min(both)), rate_text(median(both)),
                    f"{median(row['latency'] for row in of_kind) * 1e6:,.0f}",
                    f"{max(row['latency'] for row in of_kind) * 1e6:,.0f}",
                )
            )  # fmt: skip
    columns = (
        "links", "pairs", "alone: least", "median", "most", "both ways: least", "median ", "latency, us: median",
        "most ",
    )  # fmt: skip
    return Table("", columns, tuple(rows))


def _slowest(links: Sequence[dict[str, Any]]) -> str:
    rows = []
    for kind, name in KINDS.items():
        directions = [
            (row[way], pair, row)
            for row in links
            if row["kind"] == kind
            for way, pair in (("there", row["pair"]), ("back", row["pair"][::-1]))
        ]
        middle = median_high(rate for rate, *_ in directions) if directions else 0.0
        for rate, (source, target), row in sorted(directions, key=lambda entry: entry[0])[:LISTED]:
            if rate < LISTED_BELOW * middle:
                ends, size = f"{source} to {target}", format_bytes(row["bytes"])
                rows.append((ends, name, rate_text(rate), f"{rate / middle:.0%}", size))
    if not rows:
        return f"<p class='quiet'>No direction is below {LISTED_BELOW:.0%} of the median of its kind.</p>"
    title = f"Slowest directions, below {LISTED_BELOW:.0%} of the median of their kind"
    return table_html(Table(title, ("from, to", "", "rate", "of the median", "message"), tuple(rows)))


def _together(results: CheckResults) -> str:
    if not results.together:
        return ""
    alone = alone_rates(results)
    rows = []
    for row in results.together:
        rank, rate = row["rank"], row["rate"]
        network = row["kind"] == "network_all"
        share = f"{rate / alone[rank]:.0%}" if network and rank in alone else ""
        name = "to its like on the next node" if network else "to all ranks of its node"
        rows.append((str(rank), str(rank // results.ranks_per_node), name, rate_text(rate), share))
    columns = ("rank", "node", "sends, and receives as much", "each way", "of what it sends alone")
    return table_html(Table("All links at once", columns, tuple(rows)))


def _forwarding(results: CheckResults) -> str:
    if not results.forwarding:
        return ""
    rows = tuple(
        (
            "over all NICs, forwarded inside both nodes" if row["forwarded"] else "over one NIC",
            format_bytes(row["bytes"]), f"{row['seconds'] * 1e3:.2f}", rate_text(row["rate"]),
        )
        for row in results.forwarding
    )  # fmt: skip
    first = results.forwarding[0]
    title = escape(f"One message from rank {first['source']} to rank {first['target']}")
    return table_html(Table(title, ("way", "bytes", "ms", "rate"), rows))
