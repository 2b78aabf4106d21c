"""A comparison as one HTML page: a table to sort and filter, a timeline to zoom, tiles to point at.

The page is one file that needs no network and no library: template, styles and scripts of `assets/` are put together
with the data. Times in the data are whole multiples of TIME_UNIT seconds, so that the page stays small; bytes and
positions are exact. Of more ranks than can be drawn, some stand for all (:func:`.trace.ranks_to_draw`).
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from mindspeed_cp.choose.compare import AlgorithmResult, Comparison
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.report.files import write_atomically
from mindspeed_cp.report.simulation.details import ComputedTiles, DocumentShare, document_shares
from mindspeed_cp.report.simulation.messages import MessageBars
from mindspeed_cp.report.simulation.tables import conclusion
from mindspeed_cp.report.simulation.trace import ranks_to_draw, ranks_with_details
from mindspeed_cp.report.text import describe_attention
from mindspeed_cp.simulate.timeline import Timeline
from mindspeed_cp.simulate.waits import MESSAGE_KIND_NAMES, is_internode, wait_records

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("table.js", "timeline.js", "documents.js")


def write_html(comparison: Comparison, path: str | Path) -> Path:
    """Write the page.

    Args:
        comparison: simulated algorithms.
        path: HTML file to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = page(comparison)
    return write_atomically("--html", path, lambda new: new.write_text(text, encoding="utf-8"))


def page(comparison: Comparison) -> str:
    """Return the page as text."""
    topology = comparison.case.topology
    data = json.dumps(page_data(comparison), separators=(",", ":"), allow_nan=False).encode()
    return Template(_read("page.html")).substitute(
        title=html.escape(f"{topology.ranks} ranks of {comparison.case.cluster.name}"),
        conclusion=html.escape(conclusion(comparison)),
        style=_read("page.css"),
        data=base64.b64encode(gzip.compress(data, 6, mtime=0)).decode(),
        script="\n".join(_read(name) for name in SCRIPTS),
    )


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8").strip()


TIME_UNIT = 1e-7

#: Fields of LayerMetrics in the table.
METRICS = (
    *("seconds", "speedup", "fraction", "imbalance", "compute", "attention", "linear", "exposed", "late", "hidden"),
    *("sent", "memory"),
)

#: Number of tiles, and of documents, that a bar lists, the largest first.
LISTED_TILES, LISTED_DOCUMENTS = 3, 4

#: Largest number of documents that are drawn, the longest ones.
DRAWN_DOCUMENT_LIMIT = 400


def page_data(comparison: Comparison) -> dict[str, Any]:
    """Return all data of the page as JSON values."""
    case = comparison.case
    batch, attention, topology = case.batches[0], case.attention, case.topology
    layouts = _Layouts()
    return {
        "unit": TIME_UNIT,
        "problem": {
            "cluster": case.cluster.name,
            "nodes": topology.nodes,
            "ranks_per_node": topology.ranks_per_node,
            "lengths": batch.lengths.tolist(),
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "head_dim_v": attention.head_dim_v,
            "reach": list(attention.reach),
            "attention": describe_attention(attention),
            "source": case.source,
            "batches": len(case.batches),
            "memory": case.cluster.memory,
        },
        "bound": comparison.bound,
        "kinds": list(MESSAGE_KIND_NAMES),
        "notes": list(comparison.notes),
        "refused": [{"name": item.name, "reason": item.reason} for item in comparison.refused],
        "algorithms": [_algorithm(item, layouts) for item in comparison.results],
        "layouts": layouts.entries,
    }


def _algorithm(result: AlgorithmResult, layouts: _Layouts) -> dict[str, Any]:
    metrics, timeline = result.metrics, result.timeline
    ranks = ranks_to_draw(timeline)
    detailed = ranks_with_details(timeline, ranks)
    return {
        "name": result.name,
        **{name: getattr(metrics, name) for name in METRICS},
        "causes": [[name, seconds] for name, seconds in metrics.waiting_causes],
        "ranks": ranks,
        "detailed": detailed,
        "total": _units(timeline.total),
        "directions": [_direction(timeline, direction, ranks, detailed) for direction in DIRECTIONS],
        "per_rank": _per_rank(timeline),
        "layout": layouts.number_of(timeline.plan),
    }


def _direction(timeline: Timeline, direction: str, ranks: list[int], detailed: list[int]) -> dict[str, Any]:
    """Return steps, tiles, waits and messages of some ranks.

    "times" has for each rank its begin, then the durations of kernel, wait, kernel, wait, ... of all steps. "tiles" has
    for each rank with details and each step [tiles, documents, pairs], then [document, first and last query, first and
    last key] of the largest tiles. For "waits" and "messages" see :func:`_waits` and :func:`_messages`.
    """
    times = timeline.steps(direction)[ranks]
    borders = _units(np.concatenate([times[:, :1, 0], times[:, :, 1:].reshape(len(ranks), -1)], 1))
    deltas = np.concatenate([borders[:, :1], np.diff(borders, axis=1)], 1)
    plan = timeline.plan
    names = [f"{part}.{step}" if plan.parts else str(step) for part, step in plan.step_order(direction)]
    computed_tiles = ComputedTiles(plan, direction, detailed)
    with_details = set(detailed)
    tiles = [
        [_tiles(computed_tiles.of(rank, step)) for step in range(times.shape[1])] if rank in with_details else 0
        for rank in ranks
    ]
    return {
        "name": direction,
        "steps": [*[""] * timeline.edge_steps, *names, *[""] * timeline.edge_steps],
        "times": deltas.tolist(),
        "tiles": tiles,
        "waits": _waits(timeline, direction, ranks),
        "messages": _messages(timeline, direction, ranks, detailed),
    }


def _tiles(tiles: np.ndarray) -> list[int] | int:
    if not len(tiles):
        return 0
    out = [len(tiles), len(np.unique(tiles["doc"])), int((tiles["pairs"] * tiles["heads"].astype(float)).sum())]
    for tile in tiles[:LISTED_TILES].tolist():
        out += [tile[2], tile[3], tile[4], tile[6], tile[7]]
    return out


def _waits(timeline: Timeline, direction: str, ranks: list[int]) -> list[list[int]]:
    """Return [rank, step, kind, far, src, dst, bytes] of each wait."""
    waits = wait_records(timeline, direction)
    waits = waits[np.isin(waits["rank"], ranks)]
    sent = timeline.transfers(direction)[waits["message"]]
    columns = [waits["rank"], waits["step"], sent["kind"], is_internode(sent, timeline.cluster)]
    columns += [sent["src"], sent["dst"], sent["bytes"].astype(np.int64)]
    return np.stack(columns, 1).tolist()


def _messages(timeline: Timeline, direction: str, ranks: list[int], detailed: list[int]) -> list[list[int]]:
    """Return the messages of one kind to one rank that are posted together, as lists.

    A list is [dst, src of the largest, messages, kind, far, posted in step, due in step, bytes, begin, duration,
    documents], then some of the documents.
    """
    bars = MessageBars(timeline, direction, "dst", detailed)
    rows = []
    for number in np.flatnonzero(np.isin(bars.bars["rank"], ranks)).tolist():
        bar, documents = bars.bars[number], bars.documents(number)
        row = [int(bar[name]) for name in ("rank", "peer", "messages", "kind", "far", "start", "done", "bytes")]
        begin, end = (_units(bar[name]) for name in ("begin", "end"))
        rows.append([*row, begin, end - begin, len(documents), *documents[:LISTED_DOCUMENTS]])
    return rows


def _per_rank(timeline: Timeline) -> dict[str, list[int]]:
    """Return times, bytes and tokens of all ranks."""
    seconds = {
        "attention": timeline.compute,
        "linear": timeline.linear,
        "exposed": timeline.exposed,
        "late": timeline.waiting - timeline.exposed,
        "hidden": timeline.hidden,
    }
    counts = {
        "sent": timeline.bytes_sent,
        "memory": timeline.memory,
        "tokens": timeline.plan.batch_layout.token_counts,
    }
    return {
        **{name: _units(values).tolist() for name, values in seconds.items()},
        **{name: np.asarray(values).astype(np.int64).tolist() for name, values in counts.items()},
    }


def _units(seconds: Any) -> Any:
    """Return seconds, an array or a number, as whole multiples of TIME_UNIT."""
    units = np.rint(np.asarray(seconds) / TIME_UNIT).astype(np.int64)
    return units if np.ndim(seconds) else int(units)


class _Layouts:
    """Which ranks share which documents, as numbers; algorithms with the same shares have one entry.

    An entry has `groups`, lists of ranks, and `documents`: [document, queries, keys]. Queries and keys are [group,
    rows, group, rows, ...] along the document; keys are 0 if they equal the queries.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def number_of(self, plan: Plan) -> int:
        """Return the index of the entry of a plan."""
        entry = _entry(document_shares(plan, DRAWN_DOCUMENT_LIMIT))
        if entry not in self.entries:
            self.entries.append(entry)
        return self.entries.index(entry)


def _entry(shares: list[DocumentShare]) -> dict[str, Any]:
    groups: dict[tuple[int, ...], int] = {}

    def flat(runs: tuple[tuple[tuple[int, ...], int], ...]) -> list[int]:
        return [number for ranks, rows in runs for number in (groups.setdefault(ranks, len(groups)), rows)]

    documents = [
        [share.doc, flat(share.queries), 0 if share.keys == share.queries else flat(share.keys)] for share in shares
    ]
    return {"groups": [list(ranks) for ranks in groups], "documents": documents}
