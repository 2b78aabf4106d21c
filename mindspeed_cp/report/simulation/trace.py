"""A simulated layer as a recording for :mod:`mindspeed_cp.report.trace_events`: kernels, waits and messages with
details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mindspeed_cp.plan.program import DIRECTIONS
from mindspeed_cp.plan.transfers import KINDS
from mindspeed_cp.report.simulation.details import ComputedTiles
from mindspeed_cp.report.simulation.messages import MessageBars
from mindspeed_cp.report.trace_events import Recording, TraceEvent
from mindspeed_cp.simulate.timeline import Timeline
from mindspeed_cp.simulate.waits import MESSAGE_KIND_NAMES, wait_records

#: Largest number of ranks, and of steps of all ranks in both directions, that are shown; some ranks stand for the
#: others.
DRAWN_RANK_LIMIT, DRAWN_STEP_LIMIT = 64, 12_000

#: Largest number of key spans, in both directions, of the ranks whose tiles and documents are listed.
DRAWN_SPANS = 2**19

#: Number of documents and of tiles that a bar lists, the largest first.
LISTED_ITEMS = 4


def ranks_to_draw(timeline: Timeline) -> list[int]:
    """Return the ranks to draw: all; of too many the busiest, the one that waits longest, and others evenly spaced."""
    steps_per_rank = timeline.steps_forward.shape[1] + timeline.steps_backward.shape[1]
    limit = min(DRAWN_RANK_LIMIT, max(4, DRAWN_STEP_LIMIT // steps_per_rank))
    if timeline.ranks <= limit:
        return list(range(timeline.ranks))
    chosen = {int(timeline.waiting.argmax()), int((timeline.compute + timeline.linear).argmax())}
    for rank in np.linspace(0, timeline.ranks - 1, limit - len(chosen)).round().astype(int).tolist():
        chosen.add(rank)
    return sorted(chosen)


def ranks_with_details(timeline: Timeline, shown: Sequence[int]) -> list[int]:
    """Return the drawn ranks whose tiles and documents are listed: all; in very large plans some, evenly spaced."""
    programs = [getattr(part_plan, direction) for part_plan in timeline.plan.parts_or_self for direction in DIRECTIONS]
    spans = sum(int(program.contents["count"].sum()) for program in programs) * len(shown) / timeline.ranks
    if spans <= DRAWN_SPANS:
        return list(shown)
    count = max(1, int(len(shown) * DRAWN_SPANS / spans))
    return [shown[i] for i in np.unique(np.linspace(0, len(shown) - 1, count).round().astype(int))]


def timeline_recording(timeline: Timeline, name: str) -> Recording:
    """Return the recording of a simulated layer.

    Args:
        timeline: result of :func:`mindspeed_cp.simulate.simulator.simulate_plan`.
        name: name of the recording.
    """
    shown = ranks_to_draw(timeline)
    detailed = ranks_with_details(timeline, shown)
    events: list[TraceEvent] = []
    for direction in DIRECTIONS:
        events += _computed(timeline, direction, shown, detailed)
        events += _messages(timeline, direction, shown, detailed)
    events += _linear(timeline, shown)
    metadata = {
        "modelled": True,
        "layer_seconds": timeline.total,
        "ranks": timeline.ranks,
        "ranks_shown": len(shown),
        "ranks_with_tiles": len(detailed),
        "cluster": timeline.cluster.name,
    }
    return Recording(name, events, metadata)


def _computed(
    timeline: Timeline, direction: str, ranks: Sequence[int], detailed: Sequence[int]
) -> Iterator[TraceEvent]:
    """Yield the kernels, with the posting before them, and the waits for messages that are due."""
    times = timeline.steps(direction)
    sent = timeline.transfers(direction)
    computed_tiles, waits = ComputedTiles(timeline.plan, direction, detailed), wait_records(timeline, direction)
    names = [
        f"{part}.{step}" if timeline.plan.parts else str(step) for part, step in timeline.plan.step_order(direction)
    ]
    is_attention = timeline.is_attention(direction)
    for rank in ranks:
        for step, (start, computed, _) in enumerate(times[rank].tolist()):
            if computed > start and not is_attention[step]:
                tokens = {"step": step, "tokens": int(timeline.plan.layout.token_counts[rank])}
                yield TraceEvent(rank, "compute", f"projections {direction}", start, computed - start, "linear", tokens)
            elif computed > start and not 0 <= step - timeline.edge_steps < len(names):
                yield TraceEvent(
                    rank, "compute", f"posts messages {direction}", start, computed - start, "attention", {"step": step}
                )
            elif computed > start:
                details = {
                    "step": step,
                    "plan_step": names[step - timeline.edge_steps],
                    **_tiles(computed_tiles.of(rank, step)),
                }
                yield TraceEvent(
                    rank, "compute", f"attention {direction}", start, computed - start, "attention", details
                )
    chosen = waits[np.isin(waits["rank"], list(ranks))]
    for wait in chosen:
        details = {"step": int(wait["step"]), **describe_wait(wait, sent, timeline.cluster.ranks_per_node)}
        name = f"waits for {details['for']}"
        begin, end = float(wait["begin"]), float(wait["end"])
        yield TraceEvent(int(wait["rank"]), "compute", name, begin, end - begin, "wait", details)


def describe_wait(wait: np.ndarray, sent: np.ndarray, ranks_per_node: int) -> dict[str, Any]:
    """Return what a wait (record of dtype WAIT_RECORD) is for: the message that arrives last."""
    message = sent[wait["message"]]
    src, dst = int(message["src"]), int(message["dst"])
    is_in_node = src // ranks_per_node == dst // ranks_per_node
    return {
        "for": MESSAGE_KIND_NAMES[int(message["kind"])],
        "src": src,
        "dst": dst,
        "bytes": int(message["bytes"]),
        "between": "ranks of a node" if is_in_node else "nodes",
    }


def _tiles(tiles: np.ndarray) -> dict[str, Any]:
    """Return the number of tiles, pairs and documents of a step and its largest tiles; empty for ranks without
    details."""
    if not len(tiles):
        return {}
    documents = np.unique(tiles["doc"])
    return {
        "tiles": len(tiles),
        "pairs": int(tiles["pairs"].sum()),
        "heads": sorted(set(tiles["heads"].tolist())),
        "documents_in_all": len(documents),
        "documents": [int(doc) for doc in dict.fromkeys(tiles["doc"].tolist())][:LISTED_ITEMS],
        "largest_tiles": [tile_description(tile) for tile in tiles[:LISTED_ITEMS]],
    }


def tile_description(tile: np.ndarray) -> str:
    """Return a tile (record of dtype COMPUTED_TILE) in words; positions are counted from 0 in its document, in a tree
    from the root."""
    what = f"keys {_run(tile, 'k')}: {int(tile['pairs']):,} pairs"
    if tile["last_doc"] != tile["doc"]:
        return f"documents {tile['doc']}-{tile['last_doc']}: {tile['q_rows']} queries x {what}"
    return f"document {tile['doc']}: queries {_run(tile, 'q')} x {what}"


def _run(tile: np.ndarray, side: str) -> str:
    first, last, rows = (int(tile[f"{side}_{name}"]) for name in ("first", "last", "rows"))
    return f"{first}-{last}" + (f" ({rows} of them)" if rows < last - first + 1 else "")


def _messages(
    timeline: Timeline, direction: str, ranks: Sequence[int], detailed: Sequence[int]
) -> Iterator[TraceEvent]:
    """Yield what ranks send and receive; messages of one kind that are posted together are one event."""
    shown = set(ranks)
    for thread, end in (("send", "src"), ("receive", "dst")):
        bars = MessageBars(timeline, direction, end, detailed)
        for number, bar in enumerate(bars.bars):
            rank = int(bar["rank"])
            if rank not in shown:
                continue
            peers, documents = bars.peers(number), bars.documents(number)
            kind = KINDS[int(bar["kind"])]
            details = {
                "kind": kind,
                "bytes": int(bar["bytes"]),
                "src": rank if end == "src" else peers,
                "dst": rank if end == "dst" else peers,
                "between": "nodes" if bar["far"] else "ranks of a node",
                "posted_in_step": int(bar["start"]),
                "due_in_step": int(bar["done"]),
            }
            if documents:
                details |= {"documents_in_all": len(documents), "documents": documents[:LISTED_ITEMS]}
            begin, until = float(bar["begin"]), float(bar["end"])
            yield TraceEvent(rank, thread, f"{kind} {direction}", begin, until - begin, kind, details)


def _linear(timeline: Timeline, ranks: Sequence[int]) -> Iterator[TraceEvent]:
    """Yield the linear layers between the two programs, and the wait for the slowest rank at the end."""
    tokens = timeline.plan.batch_layout.token_counts
    for rank in ranks:
        begin, end = float(timeline.steps_forward[rank, -1, 2]), float(timeline.steps_backward[rank, 0, 0])
        details: dict[str, Any] = {"tokens": int(tokens[rank])}
        yield TraceEvent(rank, "compute", "linear layers, forward and backward", begin, end - begin, "linear", details)
        done = float(timeline.steps_backward[rank, -1, 2])
        if timeline.total > done:
            last = int(timeline.steps_backward[:, -1, 2].argmax())
            details = {"for": f"rank {last}, the last one"}
            yield TraceEvent(
                rank, "compute", "waits for the slowest rank", done, timeline.total - done, "late", details
            )
