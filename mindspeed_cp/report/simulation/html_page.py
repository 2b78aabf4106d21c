"""The data of the page of a comparison, as JSON values; `simulated*.js` read it.

Times are whole numbers of UNIT seconds, so that the page stays small; bytes and positions are exact. Of more ranks than
can be drawn, some stand for all (:func:`.recorded.shown_ranks`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.plan import Plan
from mindspeed_cp.report.messages import Bars, is_far
from mindspeed_cp.report.recorded import DIRECTIONS, detailed_ranks, shown_ranks
from mindspeed_cp.report.shares import Share, shares
from mindspeed_cp.report.simulated import Comparison, Simulated
from mindspeed_cp.report.text import attention_text
from mindspeed_cp.report.turns import Turns
from mindspeed_cp.report.waits import NAMES, waits

UNIT = 1e-7

#: Of each bar so many tiles, or documents, are told, the largest first.
TILES, DOCUMENTS = 3, 4

#: So many documents are drawn at most, the longest ones.
MOST_DOCUMENTS = 400


def page_data(comparison: Comparison) -> dict[str, Any]:
    """Everything that the page shows."""
    problem = comparison.problem
    batch, attention, topology = problem.batches[0], problem.attention, problem.topology
    layouts = _Layouts()
    return {
        "unit": UNIT,
        "problem": {
            "cluster": problem.cluster.name,
            "nodes": topology.nodes,
            "ranks_per_node": topology.ranks_per_node,
            "lengths": batch.lengths.tolist(),
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "head_dim_v": attention.head_dim_v,
            "reach": list(attention.reach),
            "attention": attention_text(attention),
            "source": problem.source,
            "batches": len(problem.batches),
            "memory": problem.cluster.memory,
        },
        "bound": comparison.bound,
        "kinds": list(NAMES),
        "notes": list(comparison.notes),
        "refused": [{"name": one.name, "reason": one.reason} for one in comparison.refused],
        "algorithms": [_algorithm(one, layouts) for one in comparison.simulated],
        "layouts": layouts.found,
    }


def _algorithm(one: Simulated, layouts: _Layouts) -> dict[str, Any]:
    figures, timeline = one.figures, one.timeline
    ranks = shown_ranks(timeline)
    detailed = detailed_ranks(timeline, ranks)
    return {
        "name": one.name,
        "seconds": figures.seconds,
        "speedup": figures.speedup,
        "fraction": figures.fraction,
        "imbalance": figures.imbalance,
        "compute": figures.compute,
        "attention": figures.attention,
        "linear": figures.linear,
        "exposed": figures.exposed,
        "late": figures.late,
        "hidden": figures.hidden,
        "sent": figures.sent,
        "memory": figures.memory,
        "causes": [[name, seconds] for name, seconds in figures.causes],
        "ranks": ranks,
        "detailed": detailed,
        "total": _units(timeline.total),
        "directions": [_direction(timeline, direction, ranks, detailed) for direction in DIRECTIONS],
        "per_rank": _per_rank(timeline),
        "layout": layouts.number_of(timeline.plan),
    }


def _direction(timeline: Timeline, direction: str, ranks: list[int], detailed: list[int]) -> dict[str, Any]:
    """Turns, tiles, waits and messages of some ranks.

    turns: for each rank its begin, then kernel, wait, kernel, wait ... of each turn. tiles: for each detailed rank, and
    turn, [tiles, documents, pairs, then document, first and last query, first and last key of some]. waits and
    messages are lists, see there.
    """
    forward = direction == "forward"
    turns = (timeline.forward if forward else timeline.backward)[ranks]
    borders = _units(np.concatenate([turns[:, :1, 0], turns[:, :, 1:].reshape(len(ranks), -1)], 1))
    deltas = np.concatenate([borders[:, :1], np.diff(borders, axis=1)], 1)
    plan = timeline.plan
    steps = [f"{part}.{step}" if plan.parts else str(step) for part, step in plan.turns(direction)]
    found = Turns(plan, direction, detailed)
    known = set(detailed)
    tiles = [[_tiles(found.of(rank, turn)) for turn in range(turns.shape[1])] if rank in known else 0 for rank in ranks]
    return {
        "name": direction,
        "steps": [*[""] * timeline.edges, *steps, *[""] * timeline.edges],
        "turns": deltas.tolist(),
        "tiles": tiles,
        "waits": _waits(timeline, direction, ranks),
        "messages": _messages(timeline, direction, ranks, detailed),
    }


def _tiles(tiles: np.ndarray) -> list[int] | int:
    if not len(tiles):
        return 0
    out = [len(tiles), len(np.unique(tiles["doc"])), int((tiles["pairs"] * tiles["heads"]).sum())]
    for tile in tiles[:TILES].tolist():
        out += [tile[2], tile[3], tile[4], tile[6], tile[7]]
    return out


def _waits(timeline: Timeline, direction: str, ranks: list[int]) -> list[list[int]]:
    """[rank, turn, kind, far, from, to, bytes] of each."""
    found = waits(timeline, direction)
    found = found[np.isin(found["rank"], ranks)]
    sent = (timeline.transfers if direction == "forward" else timeline.transfers_backward)[found["message"]]
    columns = [found["rank"], found["turn"], sent["kind"], is_far(sent, timeline.cluster), sent["src"], sent["dst"]]
    return np.stack([*columns, sent["bytes"].astype(np.int64)], 1).tolist()


def _messages(timeline: Timeline, direction: str, ranks: list[int], detailed: list[int]) -> list[list[int]]:
    """[to, from, messages, kind, far, posted in turn, due in turn, bytes, begin, time, documents, then some of them]
    of messages of one kind to one rank that are posted together; from: of the largest."""
    bars = Bars.of(timeline, direction, "dst", detailed)
    out = []
    for number in np.flatnonzero(np.isin(bars.bars["rank"], ranks)).tolist():
        bar, documents = bars.bars[number], bars.documents(number)
        row = [int(bar[name]) for name in ("rank", "peer", "messages", "kind", "far", "start", "done", "bytes")]
        begin, end = (int(_units(bar[name])) for name in ("begin", "end"))
        out.append([*row, begin, end - begin, len(documents), *documents[:DOCUMENTS]])
    return out


def _per_rank(timeline: Timeline) -> dict[str, list[int]]:
    """Of all ranks: times, bytes, tokens."""
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
        "tokens": (timeline.plan.linear or timeline.plan.layout).token_counts,
    }
    return {
        **{name: _units(values).tolist() for name, values in seconds.items()},
        **{name: np.asarray(values).astype(np.int64).tolist() for name, values in counts.items()},
    }


def _units(seconds: Any) -> Any:
    return np.rint(np.asarray(seconds) / UNIT).astype(np.int64) if np.ndim(seconds) else round(float(seconds) / UNIT)


class _Layouts:
    """Who shares which document, in numbers; algorithms that cut documents alike have one entry.

    An entry has `groups`, lists of ranks, and `documents`: [document, queries, keys], both [group, rows, group, rows,
    ...] along the document, and keys 0 where they are as the queries.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def number_of(self, plan: Plan) -> int:
        """The number of the entry of a plan."""
        entry = _entry(shares(plan, MOST_DOCUMENTS))
        if entry not in self.found:
            self.found.append(entry)
        return self.found.index(entry)


def _entry(found: list[Share]) -> dict[str, Any]:
    groups: dict[tuple[int, ...], int] = {}

    def flat(runs: tuple[tuple[tuple[int, ...], int], ...]) -> list[int]:
        return [number for ranks, rows in runs for number in (groups.setdefault(ranks, len(groups)), rows)]

    documents = [
        [share.doc, flat(share.queries), 0 if share.keys == share.queries else flat(share.keys)] for share in found
    ]
    return {"groups": [list(ranks) for ranks in groups], "documents": documents}
