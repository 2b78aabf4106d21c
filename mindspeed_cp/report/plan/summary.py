"""The numbers of a plan that people ask for: who holds, sends and computes how much, and how even that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.plan import AttentionConfig, Plan, Program, Topology, peak_bytes, traffic
from mindspeed_cp.plan.tiles import pairs


@dataclass(frozen=True, eq=False)
class PlanSummary:
    """Counts over ranks and forward steps of one plan; of a plan of parts the steps are its turns.

    Attributes:
        algorithm: name of the builder.
        attention: what is computed.
        topology: where.
        lengths: tokens of each document, int64 [documents].
        kv_lengths: keys of each document, int64 [documents]; `lengths`, but in cross-attention.
        heads: first and last-plus-one query head and kv head of each rank, int64 [ranks, 4]; in a plan of parts each
            part has its own, and here are all heads.
        tokens: local rows, int64 [ranks].
        documents: documents of which a rank holds at least one token, int64 [ranks].
        spans: pieces of documents, int64 [ranks].
        tiles: attention tiles, int64 [ranks, steps].
        work: visible (query, key) pairs times the rank's query heads, int64 [ranks, steps].
        sent, received: key/value rows of the forward's messages, int64 [ranks].
        reduced: gradient rows sent in the backward's messages, int64 [ranks].
        slots: rows of receive buffers (slots other than 0), int64 [ranks].
        bytes_per_element: of q, k, v and out.
        traffic: bytes that each rank sends (`mindspeed_cp.plan.traffic`).
        buffers: peak bytes of communication buffers, forward and backward, int64 [ranks, 2].
        moves: whether rows move to the layout in which attention is computed, and back.
        labels: names of the steps: "3", or "1.3" for step 3 of part 1.
        parts: the same of each part, in a plan of parts.
    """

    algorithm: str
    attention: AttentionConfig
    topology: Topology
    lengths: np.ndarray
    kv_lengths: np.ndarray
    heads: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    spans: np.ndarray
    tiles: np.ndarray
    work: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    reduced: np.ndarray
    slots: np.ndarray
    bytes_per_element: int
    traffic: np.ndarray
    buffers: np.ndarray
    moves: bool
    labels: tuple[str, ...]
    parts: tuple[PlanSummary, ...] = ()

    @property
    def ranks(self) -> int:
        """Context-parallel ranks."""
        return len(self.tokens)

    @property
    def steps(self) -> int:
        """Forward steps."""
        return self.work.shape[1]

    @property
    def splits_heads(self) -> bool:
        """Whether ranks compute different heads, in some part at least."""
        if self.parts:
            return any(part.splits_heads for part in self.parts)
        return bool((self.heads != self.heads[0]).any() or self.heads[0, 1] < self.attention.heads)

    @property
    def sent_forward(self) -> np.ndarray:
        """Bytes that each rank sends in the forward, int64 [ranks]."""
        return self.traffic["fetch_forward"] + self.traffic["move_forward"]

    @property
    def sent_backward(self) -> np.ndarray:
        """Bytes that each rank sends in the backward, int64 [ranks]."""
        return self.traffic["fetch_backward"] + self.traffic["reduce"] + self.traffic["move_backward"]

    @property
    def imbalance(self) -> float:
        """Attention work of the slowest rank over that of the mean rank; 1 is even, and what no work at all gives."""
        return _over_mean(self.work.sum(1))

    @property
    def token_imbalance(self) -> float:
        """Tokens of the fullest rank over those of the mean rank: the balance of everything but attention."""
        return _over_mean(self.tokens)

    @property
    def step_imbalance(self) -> float:
        """`imbalance` if every rank waited for the slowest after each step: the sum of the maxima over the mean."""
        mean = self.work.sum() / self.ranks
        return float(self.work.max(0).sum() / mean) if mean else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers and lists, for JSON."""
        return {
            "algorithm": self.algorithm,
            "documents": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "kv_tokens": int(self.kv_lengths.sum()),
            "nodes": self.topology.nodes,
            "ranks": self.ranks,
            "steps": self.steps,
            "imbalance": self.imbalance,
            "step_imbalance": self.step_imbalance,
            "token_imbalance": self.token_imbalance,
            "bytes_per_element": self.bytes_per_element,
            "bytes_sent_forward": int(self.sent_forward.sum()),
            "bytes_sent_backward": int(self.sent_backward.sum()),
            "per_rank": [self._rank(rank) for rank in range(self.ranks)],
            **({"turns": list(self.labels), "parts": [part.as_dict() for part in self.parts]} if self.parts else {}),
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "heads": self.heads[rank, :2].tolist(),
            "kv_heads": self.heads[rank, 2:].tolist(),
            **{name: int(getattr(self, name)[rank]) for name in ("tokens", "documents", "spans")},
            "tiles": self.tiles[rank].tolist(),
            "work": self.work[rank].tolist(),
            "kv_rows_sent": int(self.sent[rank]),
            "kv_rows_received": int(self.received[rank]),
            "gradient_rows_sent": int(self.reduced[rank]),
            "buffer_rows": int(self.slots[rank]),
            "bytes_sent": {name: int(self.traffic[name][rank]) for name in self.traffic.dtype.names or ()},
            "bytes_sent_forward": int(self.sent_forward[rank]),
            "bytes_sent_backward": int(self.sent_backward[rank]),
            "peak_buffer_bytes_forward": int(self.buffers[rank, 0]),
            "peak_buffer_bytes_backward": int(self.buffers[rank, 1]),
        }


def summarize(plan: Plan, bytes_per_element: int = 2) -> PlanSummary:
    """Count what a plan does on every rank.  Derives the tiles of all of them: with a thousand documents, milliseconds
    for 8 ranks and seconds for 64.

    Args:
        plan: any plan.
        bytes_per_element: of q, k, v and out.
    """
    layout, ranks, attention = plan.layout, plan.ranks, plan.attention
    parts = tuple(summarize(part, bytes_per_element) for part in plan.parts)
    if parts:
        tiles, work = (
            np.stack([getattr(parts[part], name)[:, step] for part, step in plan.turns()], 1)
            for name in ("tiles", "work")
        )
        heads = np.tile([0, attention.heads, 0, attention.kv_heads], (ranks, 1))
    else:
        heads = np.array(
            [
                plan.q_layout.head_range(rank, attention.heads) + plan.kv_layout.head_range(rank, attention.kv_heads)
                for rank in range(ranks)
            ]
        )
        tiles, work = _tiles_and_work(plan, heads[:, 1] - heads[:, 0])
    rows = [(*_rows(piece.forward, "fetch"), _rows(piece.backward, "reduce")[0]) for piece in plan.pieces]
    sent, received, reduced = np.sum(rows, axis=0)
    return PlanSummary(
        algorithm=plan.algorithm,
        attention=attention,
        topology=plan.topology,
        lengths=plan.documents.lengths,
        kv_lengths=plan.kv_documents.lengths,
        heads=heads,
        tokens=layout.token_counts,
        documents=np.array([len(np.unique(layout.of(rank)["doc"])) for rank in range(ranks)], np.int64),
        spans=np.diff(layout.bounds),
        tiles=tiles,
        work=work,
        sent=sent,
        received=received,
        reduced=reduced,
        slots=np.sum([piece.forward.capacity[:, 1:].sum(1) for piece in plan.pieces], axis=0),
        bytes_per_element=bytes_per_element,
        traffic=traffic(plan, bytes_per_element),
        buffers=np.stack([peak_bytes(plan, way, bytes_per_element)["total"] for way in ("forward", "backward")], 1),
        moves=any(piece.q_move is not None or piece.kv_move is not None for piece in plan.pieces),
        labels=tuple(f"{part}.{step}" if parts else str(step) for part, step in plan.turns()),
        parts=parts,
    )


def _tiles_and_work(plan: Plan, heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tiles, and (query, key) pairs times heads, of each rank and step of a plan without parts."""
    tiles, work = np.zeros((2, plan.ranks, plan.forward.steps), np.int64)
    for rank in range(plan.ranks):
        found = plan.forward.tiles(rank)
        tiles[rank] = np.bincount(found["step"], minlength=plan.forward.steps)
        np.add.at(work[rank], found["step"], pairs(found, plan.attention) * heads[rank])
    return tiles, work


def _rows(program: Program, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows that each rank sends and receives in the messages of one kind."""
    items = getattr(program, kind).items
    count = {
        end: np.bincount(items[end], weights=items["rows"], minlength=program.ranks).astype(np.int64)
        for end in ("src", "dst")
    }
    return count["src"], count["dst"]


def _over_mean(values: np.ndarray) -> float:
    return float(values.max() * len(values) / values.sum()) if values.sum() else 1.0
