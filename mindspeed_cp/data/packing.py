"""Which pieces of which documents make up each row: pure decisions from lengths alone.

Documents longer than the context are cut; an epoch shuffles all pieces, so that one long document does not fill many
rows in a row, and packs them into rows::

    documents               a: 5 tokens   b: 11       c: 2    d: 3           context 8
    pieces, shuffled        a[0:5]   c[0:2]   b[8:11]   b[0:8]   d[0:3]
    rows                    [ a[0:5] | b[8:11] ]   [ c[0:2] | d[0:3] ]   [ b[0:8] ]

A row begins with the piece that has waited longest, so that none waits for ever, and is filled with the longest pieces
that fit, taken from the next `lookahead` pieces. Rows never mix epochs: every epoch holds every token exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any

import numpy as np

#: Tokens start .. start+length-1 of a document.
PIECE = np.dtype([("document", np.int64), ("start", np.int64), ("length", np.int64)])


def epoch_order(pieces: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the pieces in an epoch: a permutation, int64 [pieces].

    Sorted by raw PCG64 numbers: NumPy promises these for all its releases, but not what `Generator.permutation` makes
    of them, and a run must resume in the same order under another NumPy.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(pieces), kind="stable")


def cut(lengths: np.ndarray, context: int) -> np.ndarray:
    """All documents, cut into pieces of `context` tokens and a remainder: PIECE [pieces], in their order."""
    counts = -(-lengths // context)
    first = np.repeat(np.cumsum(counts) - counts, counts)  # number of the first piece of the same document
    pieces = np.empty(int(counts.sum()), PIECE)
    pieces["document"] = np.repeat(np.arange(len(lengths)), counts)
    pieces["start"] = (np.arange(len(pieces)) - first) * context
    pieces["length"] = np.minimum(lengths[pieces["document"]] - pieces["start"], context)
    return pieces


class Packer:
    """Endless rows of pieces; the same for the same arguments, on every machine.

    Args:
        lengths: tokens of each document, int64 [documents]; at least one is not zero.
        context: most tokens of a row.
        seed: of the shuffle.
        lookahead: how many pieces wait for a place at any time.
    """

    def __init__(self, lengths: np.ndarray, context: int, seed: int, lookahead: int) -> None:
        self.lengths, self.context, self.seed, self.lookahead = lengths, context, seed, lookahead
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        pieces = cut(self.lengths, self.context)
        self._pieces = pieces[epoch_order(len(pieces), self.seed, epoch)]
        self._next = 0  # first piece of the epoch that does not wait yet
        self._waiting: dict[int, None] = {}  # pieces by number, that is, by age
        self._by_length: list[tuple[int, int]] = []  # (length, -piece), ascending: of equal lengths the oldest is last

    def next_row(self) -> np.ndarray:
        """The pieces of the next row, in the order in which they are laid: PIECE [pieces], at least one."""
        if not self._waiting and self._next == len(self._pieces):
            self._begin(self.epoch + 1)
        self._refill()
        row = [self._take(next(iter(self._waiting)))]
        room = self.context - int(self._pieces["length"][row[0]])
        while (best := bisect_right(self._by_length, (room, 0)) - 1) >= 0:
            length, piece = self._by_length[best]
            row.append(self._take(-piece))
            room -= length
        return self._pieces[row]

    def _take(self, piece: int) -> int:
        del self._waiting[piece]
        del self._by_length[bisect_left(self._by_length, (int(self._pieces["length"][piece]), -piece))]
        self._refill()
        return piece

    def _refill(self) -> None:
        while len(self._waiting) < self.lookahead and self._next < len(self._pieces):
            self._wait(self._next)
            self._next += 1

    def _wait(self, piece: int) -> None:
        self._waiting[piece] = None
        insort(self._by_length, (int(self._pieces["length"][piece]), -piece))

    def state_dict(self) -> dict[str, Any]:
        """Where the packing stands: the epoch, its next piece, and the pieces that wait; a few numbers, for JSON."""
        return {"epoch": self.epoch, "next": self._next, "waiting": list(self._waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, which a Packer with equal arguments gave."""
        self._begin(state["epoch"])
        for piece in state["waiting"]:
            self._wait(piece)
        self._next = state["next"]
