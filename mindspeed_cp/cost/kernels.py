"""Modelled seconds of every rank's attention kernels, turn by turn."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.compute import ComputeCost
from mindspeed_cp.cost.transfers import edges, heads_of, places
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.tiles import pairs

#: Spans of keys whose tiles are found exactly, in one direction. Larger plans, of many documents each cut over very
#: many ranks, have billions of tiles; there the tiles of some ranks, evenly spaced, stand for all.
MOST_SPANS = 2**20

#: A rank stands for others only where at least so many are looked at.
LEAST_RANKS = 4


def kernel_seconds(
    plan: Plan, cost: ComputeCost, direction: str, most_spans: int = MOST_SPANS
) -> tuple[np.ndarray, int]:
    """Seconds of attention's kernels of every rank and turn of the plan, fp64 [ranks, plan turns], and the number of
    ranks whose tiles were looked at: all, but in plans of more than `most_spans` spans."""
    out = np.zeros((plan.ranks, len(plan.turns(direction))))
    chosen = _chosen(plan, direction, most_spans)
    attention = plan.attention
    for piece, place in zip(plan.pieces, places(plan, direction), strict=True):
        program: Program = getattr(piece, direction)
        share = heads_of(piece.q_layout, attention.heads) / attention.heads
        for rank in chosen.tolist():
            tiles = program.tiles(rank)
            if not len(tiles):
                continue
            at = place[tiles["step"]] - edges(plan)
            short = np.minimum(tiles["q_rows"], tiles["k_rows"])
            seconds = cost.attention_seconds(pairs(tiles, attention), short, 0, direction == "backward")
            out[rank] += np.bincount(at, seconds * share[rank], out.shape[1])
            slots = int(tiles["slot"].max()) + 1
            calls = np.unique((at * slots + tiles["slot"]) * 4 + tiles["mask"]) // 4 // slots
            out[rank] += np.bincount(calls, minlength=out.shape[1]) * cost.cluster.launch
    if len(chosen) < plan.ranks:  # the nearest one stands for a rank
        borders = (chosen[1:] + chosen[:-1] + 1) // 2
        out = out[chosen[np.searchsorted(borders, np.arange(plan.ranks), "right")]]
    return out, len(chosen)


def _chosen(plan: Plan, direction: str, most_spans: int) -> np.ndarray:
    """Ranks whose tiles are looked at."""
    spans = sum(int(getattr(piece, direction).contents["count"].sum()) for piece in plan.pieces)
    if spans <= most_spans:
        return np.arange(plan.ranks)
    count = min(plan.ranks, max(LEAST_RANKS, plan.ranks * most_spans // spans))
    return np.unique(np.linspace(0, plan.ranks - 1, count).round().astype(np.int64))
