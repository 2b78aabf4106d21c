"""The numbers of a plan that people ask for: who holds, sends and computes how much, and how even that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.plan import Plan, Program
from mindspeed_cp.plan.tiles import pairs


@dataclass(frozen=True, eq=False)
class PlanSummary:
    """Counts over ranks and forward steps of one plan.

    Attributes:
        algorithm: name of the builder.
        lengths: tokens of each document, int64 [documents].
        tokens: local rows, int64 [ranks].
        documents: documents of which a rank holds at least one token, int64 [ranks].
        spans: pieces of documents, int64 [ranks].
        tiles: attention tiles, int64 [ranks, steps].
        work: visible (query, key) pairs, int64 [ranks, steps].
        sent, received: key/value rows of the forward, int64 [ranks].
        reduced: gradient rows sent in the backward, int64 [ranks].
        slots: rows of receive buffers (slots other than 0), int64 [ranks].
    """

    algorithm: str
    lengths: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    spans: np.ndarray
    tiles: np.ndarray
    work: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    reduced: np.ndarray
    slots: np.ndarray

    @property
    def ranks(self) -> int:
        """Context-parallel ranks."""
        return len(self.tokens)

    @property
    def steps(self) -> int:
        """Forward steps."""
        return self.work.shape[1]

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
            "ranks": self.ranks,
            "steps": self.steps,
            "imbalance": self.imbalance,
            "step_imbalance": self.step_imbalance,
            "token_imbalance": self.token_imbalance,
            "per_rank": [
                {
                    "rank": rank,
                    **{name: int(getattr(self, name)[rank]) for name in ("tokens", "documents", "spans")},
                    "tiles": self.tiles[rank].tolist(),
                    "work": self.work[rank].tolist(),
                    "kv_rows_sent": int(self.sent[rank]),
                    "kv_rows_received": int(self.received[rank]),
                    "gradient_rows_sent": int(self.reduced[rank]),
                    "buffer_rows": int(self.slots[rank]),
                }
                for rank in range(self.ranks)
            ],
        }


def summarize(plan: Plan) -> PlanSummary:
    """Count what a plan does on every rank.  Derives the tiles of all of them: with a thousand documents, milliseconds
    for 8 ranks and seconds for 64."""
    layout, ranks, steps = plan.layout, plan.ranks, plan.forward.steps
    tiles = np.zeros((ranks, steps), np.int64)
    work = np.zeros((ranks, steps), np.int64)
    for rank in range(ranks):
        found = plan.forward.tiles(rank)
        tiles[rank] = np.bincount(found["step"], minlength=steps)
        np.add.at(work[rank], found["step"], pairs(found))
    sent, received = _rows(plan.forward, "fetch")
    return PlanSummary(
        algorithm=plan.algorithm,
        lengths=plan.documents.lengths,
        tokens=layout.token_counts,
        documents=np.array([len(np.unique(layout.of(rank)["doc"])) for rank in range(ranks)], np.int64),
        spans=np.diff(layout.bounds),
        tiles=tiles,
        work=work,
        sent=sent,
        received=received,
        reduced=_rows(plan.backward, "reduce")[0],
        slots=plan.forward.capacity[:, 1:].sum(1),
    )


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
