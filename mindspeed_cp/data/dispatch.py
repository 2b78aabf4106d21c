"""The rows of a global batch, dealt to replicas: as they come, or laid anew so that replicas end together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from mindspeed_cp.data.balance import assign

BALANCES = ("none", "time")
DIGEST_BITS = 52  # whole numbers that float64 holds, in which ranks compare them


@dataclass(frozen=True, eq=False)
class Dealt:
    """A global batch on its replicas.

    Attributes:
        pieces: of all its documents, PIECE [pieces], in the order of the rows that they came in.
        micro_batches: for each replica its micro-batches, each the ascending numbers of its pieces, int64.
        seconds: modelled time of each replica, float64 [replicas].
        took: seconds that dealing took, on the clock.
    """

    pieces: np.ndarray
    micro_batches: Sequence[Sequence[np.ndarray]]
    seconds: np.ndarray
    took: float

    @property
    def imbalance(self) -> float:
        """Modelled time of the slowest replica over the mean."""
        return float(self.seconds.max() / self.seconds.mean()) if self.seconds.any() else 1.0

    @property
    def digest(self) -> int:
        """A number of 52 bits: whoever has another one has dealt other documents, or dealt them otherwise."""
        found = blake2b(digest_size=8)
        for replica in self.micro_batches:
            found.update(len(replica).to_bytes(8, "little"))
            for numbers in replica:
                found.update(len(numbers).to_bytes(8, "little"))
                for name in ("document", "start", "length"):
                    found.update(self.pieces[name][numbers].astype("<i8").tobytes())
        return int.from_bytes(found.digest(), "little") >> (64 - DIGEST_BITS)


@dataclass(frozen=True)
class Dealer:
    """How global batches are dealt: a decision from lengths alone, the same on every rank.

    Attributes:
        balance: "none": row i is a micro-batch of replica i % replicas; "time": by `balance.assign`.
        replicas: data-parallel replicas.
        context: most tokens of a micro-batch.
        cost: modelled seconds of documents, from lengths int64 [documents] to float64 [documents].
        per_micro_batch: modelled seconds that a micro-batch takes beside its documents.
        equal_counts: every replica has as many micro-batches as the others.
        keeps_numbers: a document keeps its number in the global batch, on which what attention drops depends; the
            documents of other micro-batches are then there with no token.
    """

    balance: str
    replicas: int
    context: int
    cost: Callable[[np.ndarray], np.ndarray]
    per_micro_batch: float = 0.0
    equal_counts: bool = False
    keeps_numbers: bool = False

    def __call__(self, rows: Sequence[np.ndarray]) -> Dealt:
        """Deal the rows of one global batch, each PIECE [pieces]; their number is a multiple of `replicas`."""
        began = time.perf_counter()
        pieces = np.concatenate(rows)
        of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        if self.balance == "none":
            times = np.bincount(of, self.cost(pieces["length"]), len(rows)) + self.per_micro_batch
            numbers = np.split(np.arange(len(pieces)), np.flatnonzero(np.diff(of)) + 1)
            seconds = times.reshape(-1, self.replicas).sum(0)
            mine = [numbers[at :: self.replicas] for at in range(self.replicas)]
            return Dealt(pieces, mine, seconds, time.perf_counter() - began)
        found = assign(
            pieces["length"],
            self.cost,
            self.replicas,
            token_bound=self.context,
            per_micro_batch=self.per_micro_batch,
            rows=of,
            equal_counts=self.equal_counts,
        )
        mine = [found.rows(replica) for replica in range(self.replicas)]
        return Dealt(pieces, mine, found.seconds, time.perf_counter() - began)
