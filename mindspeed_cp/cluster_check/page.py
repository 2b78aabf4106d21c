"""The report as one HTML page that needs no network: findings first, then the figures, stage by stage."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_cp.cluster_check.html_parts import bars_html, section, table_html
from mindspeed_cp.cluster_check.page_links import links_section
from mindspeed_cp.cluster_check.results import CheckResults
from mindspeed_cp.cluster_check.verdict import attention_rate, describe_item, findings, hidden_share
from mindspeed_cp.report.text import Table, format_bytes, format_count

STYLE = Path(__file__).parent / "assets" / "page.css"
LABELS = {"bad": "FAILED", "warning": "note", "good": "ok"}


def page(results: CheckResults, pictures: Mapping[str, bytes]) -> str:
    """Return the page.

    Args:
        results: figures.
        pictures: PNG of the simulated timelines of each batch, by its name.
    """
    title = f"A day on a cluster: {results.nodes} node{'s' * (results.nodes > 1)} x {results.ranks_per_node} ranks"
    sections = [
        _header(title, results), _ranks(results), links_section(results), _kernels(results), _overlap(results),
        _cluster(results), *_algorithms(results, pictures), _failures(results), _environment(results),
    ]  # fmt: skip
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _header(title: str, results: CheckResults) -> str:
    request = results.request
    what = (
        f"{request['device']}, {request['dtype']}, {request['heads']} heads of {request['head_dim']}, "
        f"{request['tokens_per_rank']:,} tokens a rank; {sum(results.seconds.values()):.0f} s of measurements"
    )
    unfinished = "" if results.finished else "<p><b>Not finished:</b> the check was still running or was ended.</p>"
    items = "".join(
        f"<li class='{finding.level}'><b>{LABELS[finding.level]}</b>{escape(finding.text)}</li>"
        for finding in findings(results)
    )
    return (
        f"<h1>{escape(title)}</h1><p class='quiet'>mindspeed-cp doctor --cluster: {escape(what)}</p>{unfinished}"
        f"<section><h2>Findings</h2><ul class='findings'>{items}</ul></section>"
    )


def _ranks(results: CheckResults) -> str:
    rows = []
    for rank, facts in enumerate(results.ranks):
        if facts is None:
            rows.append((str(rank), "-", "-", "FAILED: gave no answer", "-", "-", "-"))
            continue
        threads = f"{facts['threads']} of {facts['cores']}"
        memory = f"{format_bytes(facts['free'])} of {format_bytes(facts['memory'])}"
        node, local, host = (
            str(facts["node"]),
            str(facts["local_rank"]),
            f"#{facts['host']}",
        )  # of digits, but no number
        rows.append((str(rank), node, local, facts["device"], memory, threads, host))
    if not rows:
        return ""
    columns = ("rank", "node", "local rank", "device", "free memory", "threads of cores", "host (hashed)")
    first = next((facts for facts in results.ranks if facts is not None), None)
    versions = tuple(
        (name, version or "not installed") for name, version in (first or {"versions": {}})["versions"].items()
    )
    return section(
        "Ranks", table_html(Table("", columns, tuple(rows))),
        _fold("versions", table_html(Table("", ("package", "version"), versions))),
    )  # fmt: skip


def _fold(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _kernels(results: CheckResults) -> str:
    rows = tuple(
        (
            str(rank),
            *(f"{attention_rate(measurements, kind) / 1e12:.4g}" for kind in ("attention", "linear")),
            f"{min(row['seconds'] for row in measurements) * 1e6:,.0f}",
        )
        for rank, measurements in sorted(results.kernels.items())
    )
    if not rows:
        return ""
    columns = ("rank", "attention, TFLOP/s", "matrix products, TFLOP/s", "shortest kernel, us")
    note = (
        "<p class='quiet'>The highest rate over all sizes, forward and backward together, measured on all ranks at the "
        "same time.</p>"
    )
    return section("Kernels", note, table_html(Table("", columns, rows)))


def _overlap(results: CheckResults) -> str:
    rows = tuple(
        (
            str(row["rank"]), str(row["partner"]), format_bytes(row["bytes"]),
            *(f"{row[name] * 1e3:.2f}" for name in ("compute", "send", "receive", "exchange")),
            *(f"{row[f'compute+{name}'] * 1e3:.2f}" for name in ("send", "receive", "exchange")),
            f"{hidden_share(row, 'exchange'):.0%}",
        )
        for row in results.overlap
    )  # fmt: skip
    if not rows:
        return ""
    columns = (
        "rank", "partner", "message", "kernels, ms", "send", "receive", "both ways", "kernels + send",
        "kernels + receive", "kernels + both ways", "hidden",
    )  # fmt: skip
    note = (
        "<p class='quiet'>Kernels and messages alone, then at the same time. Hidden: the share of the shorter of the "
        "two that the longer one covers; 100 % if both streams run side by side, 0 % if one after the other.</p>"
    )
    return section("Overlap of send, receive and compute", note, table_html(Table("", columns, rows)))


def _cluster(results: CheckResults) -> str:
    cluster = results.cluster
    if cluster is None:
        return ""
    values = tuple(
        (key, f"{value:.4g}" if isinstance(value, float) else str(value), cluster["sources"][key])
        for key, value in cluster["values"].items()
    )
    fits = tuple(
        (name, str(row["points"]), f"{row['median_error']:.1%}", f"{row['largest_error']:.1%}")
        for name, row in cluster["fits"].items()
    )
    note = (
        "<p class='quiet'>The archive has it as cluster.yaml, for the option --cluster of plan and simulate and for "
        "the setting cluster.</p>"
    )
    return section(
        "Fitted cluster", note, table_html(Table("", ("", "value", "from"), values)),
        table_html(Table("Error of the fit: |modelled / measured - 1|", ("", "points", "median", "largest"), fits)),
    )  # fmt: skip


def _algorithms(results: CheckResults, pictures: Mapping[str, bytes]) -> list[str]:
    sections = []
    for batch, lengths in results.batches.items():
        rows = [row for row in results.algorithms if row["batch"] == batch]
        if not rows:
            continue
        measured = sorted((row for row in rows if "measured" in row), key=lambda row: row["measured"])
        bars = [
            (row["algorithm"], row["measured"] * 1e3, None if row["predicted"] is None else row["predicted"] * 1e3)
            for row in measured
        ]
        others = [row for row in rows if "measured" not in row]
        cells = tuple(_algorithm_cells(row) for row in (*measured, *others))
        columns = (
            "algorithm", "measured, ms", "simulated, ms", "simulated / measured", "kernels, ms", "simulated",
            "waits, ms", "simulated ", "sent by a rank", "result",
        )  # fmt: skip
        shortest, longest = min(lengths), max(lengths)
        span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        what = f"{len(lengths):,} document{'s' * (len(lengths) > 1)} of {span} tokens"
        total = f", {format_count(sum(lengths))} in all" if len(lengths) > 1 else ""
        note = (
            f"<p class='quiet'>{what}{total}. One layer of attention, forward and "
            "backward; the slowest rank, median of the repeats. Kernels and waits: mean of the ranks in one more run, "
            "which is recorded.</p>"
        )
        picture = ""
        if batch in pictures:
            data = base64.b64encode(pictures[batch]).decode()
            image = f"<img alt='simulated timelines' src='data:image/png;base64,{data}'>"
            picture = _fold("simulated timelines on the fitted cluster: the fastest, and the even ring", image)
        table = table_html(Table("", columns, cells))
        sections.append(section(f"Algorithms: {batch}", note, bars_html(bars, "ms") if bars else "", table, picture))
    return sections


def _algorithm_cells(row: dict[str, Any]) -> tuple[str, ...]:
    predicted = row.get("predicted")
    if "measured" not in row:
        text = f"refused: {row['refused']}" if "refused" in row else f"FAILED: {row['error']}"
        return (row["algorithm"], "", "" if predicted is None else _ms(predicted), *[""] * 6, text)
    waits = sum(row["busy"].get(name, 0.0) for name in ("wait", "post", "unpack"))
    simulated = [""] * 4
    if predicted is not None:
        parts = _ms(row["predicted_attention"]), _ms(row["predicted_exposed"])
        simulated = [_ms(predicted), f"{predicted / row['measured']:.2f}", *parts]
    result = f"ok, {row['queries']} queries" if row["wrong"] is None else f"WRONG: {row['wrong']}"
    sent = format_bytes(sum(row["sent"]) / len(row["sent"]))
    return (
        row["algorithm"], _ms(row["measured"]), simulated[0], simulated[1], _ms(row["busy"].get("compute", 0.0)),
        simulated[2], _ms(waits), simulated[3], sent, result,
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _failures(results: CheckResults) -> str:
    rows = tuple(
        (failure.stage, describe_item(failure.item), str(rank), text)
        for failure in results.failures
        for rank, text in failure.errors.items()
    )
    return section("What failed", table_html(Table("", ("stage", "what", "rank", "message"), rows))) if rows else ""


def _environment(results: CheckResults) -> str:
    facts = [row for row in results.ranks if row is not None]
    names = sorted({name for row in facts for name in row["environment"]})
    rows = []
    for name in names:
        values: dict[str, list[str]] = {}
        for rank, row in enumerate(results.ranks):
            if row is not None:
                values.setdefault(row["environment"].get(name, "not set"), []).append(str(rank))
        same = len(values) == 1
        rows += [(name, value, "all" if same else ", ".join(ranks)) for value, ranks in values.items()]
    if not rows:
        return ""
    note = (
        "<p class='quiet'>Variables that libraries of communication and devices read. Addresses, names of hosts and "
        "paths are left out.</p>"
    )
    return section("Environment", note, table_html(Table("", ("variable", "value", "ranks"), tuple(rows))))
