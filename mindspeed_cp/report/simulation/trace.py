"""A simulated layer as a recording for :mod:`.trace`: kernels, waits and messages of ranks, with what they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.cost.transfers import KINDS
from mindspeed_cp.report.messages import Bars
from mindspeed_cp.report.trace import Event, Recording
from mindspeed_cp.report.turns import Turns
from mindspeed_cp.report.waits import NAMES, WAIT, waits

#: Ranks and, over both directions, turns of ranks that are shown at most; beyond, some ranks stand for all.
MOST_RANKS, MOST_TURNS = 64, 12_000

#: Spans of keys, over both directions, of the ranks whose tiles and documents are told.
MOST_SPANS = 2**19

#: Documents and tiles that a bar lists, the largest first.
LISTED = 4

#: The two parts of a layer that are plans, in the order in which a rank computes them, and which come before and after
#: the linear layers.
DIRECTIONS = ("forward", "backward")


def shown_ranks(timeline: Timeline) -> list[int]:
    """The ranks to draw: all, or of very many the busiest, the one that waits longest, and others evenly spaced."""
    each = timeline.forward.shape[1] + timeline.backward.shape[1]
    most = min(MOST_RANKS, max(4, MOST_TURNS // each))
    if timeline.ranks <= most:
        return list(range(timeline.ranks))
    chosen = {int(timeline.waiting.argmax()), int((timeline.compute + timeline.linear).argmax())}
    for rank in np.linspace(0, timeline.ranks - 1, most - len(chosen)).round().astype(int).tolist():
        chosen.add(rank)
    return sorted(chosen)


def detailed_ranks(timeline: Timeline, shown: Sequence[int]) -> list[int]:
    """Those of the shown ranks whose tiles, and the documents of whose messages, are told: all, or in very large plans
    some, evenly spaced."""
    programs = [getattr(piece, direction) for piece in timeline.plan.pieces for direction in DIRECTIONS]
    spans = sum(int(program.contents["count"].sum()) for program in programs) * len(shown) / timeline.ranks
    if spans <= MOST_SPANS:
        return list(shown)
    many = max(1, int(len(shown) * MOST_SPANS / spans))
    return [shown[i] for i in np.unique(np.linspace(0, len(shown) - 1, many).round().astype(int))]


def recording(timeline: Timeline, name: str, ranks: Sequence[int] | None = None) -> Recording:
    """The recording of a simulated layer.

    Args:
        timeline: of :func:`mindspeed_cp.cost.simulate.simulate`.
        name: of the recording.
        ranks: default: :func:`shown_ranks`.
    """
    shown = shown_ranks(timeline) if ranks is None else ranks
    detailed = detailed_ranks(timeline, shown)
    events: list[Event] = []
    for direction in DIRECTIONS:
        events += _computed(timeline, direction, shown, detailed)
        events += _messages(timeline, direction, shown, detailed)
    events += _linear(timeline, shown)
    about = {
        "modelled": True,
        "layer_seconds": timeline.total,
        "ranks": timeline.ranks,
        "ranks_shown": len(shown),
        "ranks_with_tiles": len(detailed),
        "cluster": timeline.cluster.name,
    }
    return Recording(name, events, about)


def _computed(timeline: Timeline, direction: str, ranks: Sequence[int], detailed: Sequence[int]) -> Iterator[Event]:
    """Kernels, and waits for messages that are due."""
    turns = timeline.forward if direction == "forward" else timeline.backward
    sent = timeline.transfers if direction == "forward" else timeline.transfers_backward
    found, waited = Turns(timeline.plan, direction, detailed), waits(timeline, direction)
    names = [f"{part}.{step}" if timeline.plan.parts else str(step) for part, step in timeline.plan.turns(direction)]
    own = timeline.is_attention(direction)
    for rank in ranks:
        for turn, (start, computed, _) in enumerate(turns[rank].tolist()):
            if computed > start and not own[turn]:
                tokens = {"turn": turn, "tokens": int(timeline.plan.layout.token_counts[rank])}
                yield Event(rank, "compute", f"projections {direction}", start, computed - start, "linear", tokens)
            elif computed > start:
                details = {"turn": turn, "step": names[turn - timeline.edges], **_tiles(found.of(rank, turn))}
                yield Event(rank, "compute", f"attention {direction}", start, computed - start, "attention", details)
    chosen = waited[np.isin(waited["rank"], list(ranks))]
    for wait in chosen:
        details = {"turn": int(wait["turn"]), **awaited(wait, sent, timeline.cluster.ranks_per_node)}
        name = f"waits for {details['for']}"
        begin, end = float(wait["begin"]), float(wait["end"])
        yield Event(int(wait["rank"]), "compute", name, begin, end - begin, "wait", details)


def awaited(wait: np.ndarray, sent: np.ndarray, ranks_per_node: int) -> dict[str, Any]:
    """What a wait (record of dtype WAIT) is for: the message that is there last."""
    assert wait.dtype == WAIT
    message = sent[wait["message"]]
    src, dst = int(message["src"]), int(message["dst"])
    near = src // ranks_per_node == dst // ranks_per_node
    return {
        "for": NAMES[int(message["kind"])],
        "src": src,
        "dst": dst,
        "bytes": int(message["bytes"]),
        "between": "ranks of a node" if near else "nodes",
    }


def _tiles(tiles: np.ndarray) -> dict[str, Any]:
    """What a turn computes, in numbers, and its largest tiles in words; nothing where they were not looked at."""
    if not len(tiles):
        return {}
    documents = np.unique(tiles["doc"])
    return {
        "tiles": len(tiles),
        "pairs": int(tiles["pairs"].sum()),
        "heads": sorted(set(tiles["heads"].tolist())),
        "documents_in_all": len(documents),
        "documents": [int(doc) for doc in dict.fromkeys(tiles["doc"].tolist())][:LISTED],
        "largest_tiles": [tile_text(tile) for tile in tiles[:LISTED]],
    }


def tile_text(tile: np.ndarray) -> str:
    """A tile (record of dtype PLACED) in words, positions counted from 0 in its document."""
    return f"document {tile['doc']}: queries {_run(tile, 'q')} x keys {_run(tile, 'k')}: {int(tile['pairs']):,} pairs"


def _run(tile: np.ndarray, side: str) -> str:
    first, last, rows = (int(tile[f"{side}_{name}"]) for name in ("first", "last", "rows"))
    return f"{first}-{last}" + (f" ({rows} of them)" if rows < last - first + 1 else "")


def _messages(timeline: Timeline, direction: str, ranks: Sequence[int], detailed: Sequence[int]) -> Iterator[Event]:
    """What ranks send and receive; messages of one kind that are posted together are one event."""
    wanted = set(ranks)
    for thread, end in (("send", "src"), ("receive", "dst")):
        bars = Bars.of(timeline, direction, end, detailed)
        for number, bar in enumerate(bars.bars):
            rank = int(bar["rank"])
            if rank not in wanted:
                continue
            peers, documents = bars.peers(number), bars.documents(number)
            kind = KINDS[int(bar["kind"])]
            details = {
                "kind": kind,
                "bytes": int(bar["bytes"]),
                "src": rank if end == "src" else peers,
                "dst": rank if end == "dst" else peers,
                "between": "nodes" if bar["far"] else "ranks of a node",
                "posted_in_turn": int(bar["start"]),
                "due_in_turn": int(bar["done"]),
            }
            if documents:
                details |= {"documents_in_all": len(documents), "documents": documents[:LISTED]}
            begin, until = float(bar["begin"]), float(bar["end"])
            yield Event(rank, thread, f"{kind} {direction}", begin, until - begin, kind, details)


def _linear(timeline: Timeline, ranks: Sequence[int]) -> Iterator[Event]:
    """Linear layers, which stand between the two directions, and the wait for the slowest rank at the end."""
    tokens = (timeline.plan.linear or timeline.plan.layout).token_counts
    for rank in ranks:
        begin, end = float(timeline.forward[rank, -1, 2]), float(timeline.backward[rank, 0, 0])
        details: dict[str, Any] = {"tokens": int(tokens[rank])}
        yield Event(rank, "compute", "linear layers, forward and backward", begin, end - begin, "linear", details)
        done = float(timeline.backward[rank, -1, 2])
        if timeline.total > done:
            last = int(timeline.backward[:, -1, 2].argmax())
            details = {"for": f"rank {last}, the last one"}
            yield Event(rank, "compute", "waits for the slowest rank", done, timeline.total - done, "late", details)
