"""Counts of a plan: what ranks hold, send and compute, and how even it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.plan import Plan, peak_bytes, traffic
from mindspeed_cp.plan.tiles import count_pairs


@dataclass(frozen=True, eq=False)
class PlanSummary:
    """Counts of ranks and forward steps of one plan; the steps of a plan of parts are those of `Plan.step_order`.

    Attributes:
        plan: the plan.
        bytes_per_element: of q, k, v and out.
        heads: first and last-plus-one query head and kv head of each rank, int64 [ranks, 4]; all heads in a plan of
            parts, whose parts have their own.
        tiles: attention tiles, int64 [ranks, steps].
        work: visible (query, key) pairs times the rank's query heads, fp64 [ranks, steps].
        sent, received: key/value rows of the forward's messages, int64 [ranks].
        reduced: gradient rows sent in the backward's messages, int64 [ranks].
        traffic: bytes that each rank sends (`mindspeed_cp.plan.traffic`).
        buffers: peak bytes of communication buffers, forward and backward, int64 [ranks, 2].
        parts: summaries of the parts of a plan of parts.
    """

    plan: Plan
    bytes_per_element: int
    heads: np.ndarray
    tiles: np.ndarray
    work: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    reduced: np.ndarray
    traffic: np.ndarray
    buffers: np.ndarray
    parts: tuple[PlanSummary, ...] = ()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return self.plan.documents.lengths

    @property
    def kv_lengths(self) -> np.ndarray:
        """Keys of each document, int64 [documents]; the same array as `lengths` except in cross-attention."""
        return self.plan.kv_documents.lengths

    @property
    def tokens(self) -> np.ndarray:
        """Local rows, int64 [ranks]."""
        return self.plan.layout.token_counts

    @property
    def documents(self) -> np.ndarray:
        """Documents of which a rank holds at least one token, int64 [ranks]."""
        layout = self.plan.layout
        return np.array([len(np.unique(layout.rank_spans(rank)["doc"])) for rank in range(self.ranks)], np.int64)

    @property
    def spans(self) -> np.ndarray:
        """Token spans, int64 [ranks]."""
        return np.diff(self.plan.layout.span_offsets)

    @property
    def slots(self) -> np.ndarray:
        """Rows of receive buffers (slots other than 0), int64 [ranks]."""
        rows: np.ndarray = np.sum([part.forward.capacity[:, 1:].sum(1) for part in self.plan.parts_or_self], axis=0)
        return rows

    @property
    def has_redistribution(self) -> bool:
        """True if rows are redistributed to the layout in which attention is computed, and back."""
        parts = self.plan.parts_or_self
        return any(part.q_redistribution is not None or part.kv_redistribution is not None for part in parts)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the steps: "3", or "1.3" for step 3 of part 1."""
        return tuple(f"{part}.{step}" if self.parts else str(step) for part, step in self.plan.step_order())

    @property
    def ranks(self) -> int:
        """Number of context-parallel ranks."""
        return self.plan.ranks

    @property
    def steps(self) -> int:
        """Number of forward steps."""
        return self.work.shape[1]

    @property
    def splits_heads(self) -> bool:
        """True if ranks compute different heads in any part."""
        if self.parts:
            return any(part.splits_heads for part in self.parts)
        return bool((self.heads != self.heads[0]).any() or self.heads[0, 1] < self.plan.attention.heads)

    @property
    def sent_forward(self) -> np.ndarray:
        """Bytes that each rank sends in the forward, int64 [ranks]."""
        return self.traffic["fetch_forward"] + self.traffic["redistribution_forward"]

    @property
    def sent_backward(self) -> np.ndarray:
        """Bytes that each rank sends in the backward, int64 [ranks]."""
        return self.traffic["fetch_backward"] + self.traffic["reduce"] + self.traffic["redistribution_backward"]

    @property
    def imbalance(self) -> float:
        """Attention work of the slowest rank over the mean; 1 is even, also for no work."""
        return _over_mean(self.work.sum(1))

    @property
    def token_imbalance(self) -> float:
        """Tokens of the fullest rank over the mean: the imbalance of everything but attention."""
        return _over_mean(self.tokens)

    @property
    def step_imbalance(self) -> float:
        """Imbalance if all ranks wait for the slowest after each step: sum of the largest work of each step over the
        mean."""
        mean = self.work.sum() / self.ranks
        return float(self.work.max(0).sum() / mean) if mean else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as numbers and lists, for JSON."""
        return {
            "algorithm": self.plan.algorithm,
            "documents": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "kv_tokens": int(self.kv_lengths.sum()),
            "nodes": self.plan.topology.nodes,
            "ranks": self.ranks,
            "steps": self.steps,
            "imbalance": self.imbalance,
            "step_imbalance": self.step_imbalance,
            "token_imbalance": self.token_imbalance,
            "bytes_per_element": self.bytes_per_element,
            "bytes_sent_forward": int(self.sent_forward.sum()),
            "bytes_sent_backward": int(self.sent_backward.sum()),
            "per_rank": [self._rank(rank) for rank in range(self.ranks)],
            **({"step_labels": list(self.labels)} if self.parts else {}),
            **({"parts": [part.as_dict() for part in self.parts]} if self.parts else {}),
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        counts = {
            **{name: getattr(self, name) for name in ("tokens", "documents", "spans")},
            "kv_rows_sent": self.sent,
            "kv_rows_received": self.received,
            "gradient_rows_sent": self.reduced,
            "buffer_rows": self.slots,
            "bytes_sent_forward": self.sent_forward,
            "bytes_sent_backward": self.sent_backward,
            "peak_buffer_bytes_forward": self.buffers[:, 0],
            "peak_buffer_bytes_backward": self.buffers[:, 1],
        }
        return {
            "rank": rank,
            "heads": self.heads[rank, :2].tolist(),
            "kv_heads": self.heads[rank, 2:].tolist(),
            "tiles": self.tiles[rank].tolist(),
            "work": list(map(int, self.work[rank])),
            "bytes_sent": {name: int(self.traffic[name][rank]) for name in self.traffic.dtype.names or ()},
            **{name: int(values[rank]) for name, values in counts.items()},
        }


def summarize_plan(plan: Plan, bytes_per_element: int = 2) -> PlanSummary:
    """Count what a plan does on every rank.  Derives the tiles of all of them: with a thousand documents, milliseconds
    for 8 ranks and seconds for 64.

    Args:
        plan: any plan.
        bytes_per_element: of q, k, v and out.
    """
    attention = plan.attention
    parts = tuple(summarize_plan(part, bytes_per_element) for part in plan.parts)
    if parts:
        tiles, work = (
            np.stack([getattr(parts[part], name)[:, step] for part, step in plan.step_order()], 1)
            for name in ("tiles", "work")
        )
        heads = np.tile([0, attention.heads, 0, attention.kv_heads], (plan.ranks, 1))
    else:
        bounds = plan.q_layout_compute.head_bounds(attention.heads)
        heads = np.hstack([bounds, plan.kv_layout_compute.head_bounds(attention.kv_heads)])
        tiles = np.zeros((plan.ranks, plan.forward.steps), np.int64)
        work = np.zeros(tiles.shape)  # in fp64: pairs alone may have 62 bits
        for rank in range(plan.ranks):
            rank_tiles = plan.forward.tiles(rank)
            np.add.at(tiles[rank], rank_tiles["step"], 1)
            pairs = count_pairs(rank_tiles, attention) * float(heads[rank, 1] - heads[rank, 0])
            np.add.at(work[rank], rank_tiles["step"], pairs)
    programs = [(part.forward.fetch.items, part.backward.reduce.items) for part in plan.parts_or_self]
    fetched = np.concatenate([fetch for fetch, _ in programs])
    reduced = np.concatenate([reduce for _, reduce in programs])

    def rows(messages: np.ndarray, end: str) -> np.ndarray:
        return np.bincount(messages[end], messages["rows"], plan.ranks).astype(np.int64)

    return PlanSummary(
        plan=plan,
        bytes_per_element=bytes_per_element,
        heads=heads,
        tiles=tiles,
        work=work,
        sent=rows(fetched, "src"),
        received=rows(fetched, "dst"),
        reduced=rows(reduced, "src"),
        traffic=traffic(plan, bytes_per_element),
        buffers=np.stack([peak_bytes(plan, way, bytes_per_element)["total"] for way in ("forward", "backward")], 1),
        parts=parts,
    )


def _over_mean(values: np.ndarray) -> float:
    return float(values.max() / values.mean()) if values.any() else 1.0
