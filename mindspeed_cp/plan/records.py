"""The parts a plan is made of, as NumPy records: tiles, slot contents and messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.layout import expand, joined

FULL, CAUSAL, BAND = 0, 1, 2
MASK_NAMES = {FULL: "full", CAUSAL: "causal", BAND: "band"}


def record(names: str) -> np.dtype:
    """A record of int64 columns."""
    return np.dtype([(name, np.int64) for name in names.split()])


#: q rows x rows of a slot, all of document `doc`; q_pos and k_pos are positions of the first rows in it.
#:
#: FULL: every q row sees every key. CAUSAL is aligned bottom right: q row i of the tile (from 0) sees the first
#: k_rows - q_rows + i + 1 keys. BAND: a query at position p sees those keys of the tile that the window lets it see
#: (`AttentionConfig.reach`); every q row of the tile sees one at least, every key is seen by one at least.
#:
#: When `AttentionConfig.by_position`, positions rise by one from row to row on both sides; else a tile may join several
#: runs, and only its first row has the position given.
TILE = record("step slot q_row q_rows k_row k_rows mask doc q_pos k_pos")

#: In step `step`, rank `rank` computes against rows `row` and on of slot `slot`, which hold
#: spans[first : first + count]. Several contents of one step and slot are several parts of it.
CONTENT = record("step rank slot row first count")

#: `rows` rows, runs[first : first + count], of slot src_slot at src go to slot dst_slot at dst. Posted when step
#: `start` begins, finished when step `done` ends.
MESSAGE = record("start done src dst src_slot dst_slot first count rows")

#: `rows` rows from src_row of the source slot on go to dst_row of the target slot on.
RUN = record("src_row dst_row rows")


def sorted_contents(contents: np.ndarray) -> np.ndarray:
    """Contents in the order that a program has them: by rank, step, slot and row."""
    return contents[np.lexsort([contents[name] for name in ("row", "slot", "step", "rank")])]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages in their one global order, in which every rank issues its sends and its receives.

    Attributes:
        items: records of dtype MESSAGE, sorted by `start`.
        runs: records of dtype RUN.
    """

    items: np.ndarray
    runs: np.ndarray

    @staticmethod
    def none() -> Messages:
        """No messages."""
        return Messages(np.empty(0, MESSAGE), np.empty(0, RUN))

    def __len__(self) -> int:
        return len(self.items)

    def runs_of(self, index: int) -> np.ndarray:
        """Runs (records) of one message."""
        item = self.items[index]
        return self.runs[item["first"] : item["first"] + item["count"]]

    def rows_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of one message in its source slot and in its target slot."""
        runs = self.runs_of(index)
        return expand(runs["src_row"], runs["rows"]), expand(runs["dst_row"], runs["rows"])

    @cached_property
    def flat_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(message number, run) of every run of every message, in the order of messages."""
        owner = np.repeat(np.arange(len(self.items)), self.items["count"])
        return owner, self.runs[expand(self.items["first"], self.items["count"])]

    def is_one_run(self, side: str) -> np.ndarray:
        """For every message whether its rows at one side ("src" or "dst") follow each other, bool [messages]."""
        owner, runs = self.flat_runs
        row = runs[side + "_row"]
        broken = (owner[1:] == owner[:-1]) & (row[1:] != row[:-1] + runs["rows"][:-1])
        out = np.ones(len(self.items), bool)
        out[owner[1:][broken]] = False
        return out

    def involving(self, rank: int) -> np.ndarray:
        """Numbers of the messages that the rank sends or receives, in order."""
        return np.flatnonzero((self.items["src"] == rank) | (self.items["dst"] == rank))

    def reversed(self) -> Messages:
        """Source and target exchanged, for gradients that go back where keys and values came from; same steps."""
        items, runs = self.items.copy(), self.runs.copy()
        for a, b in (("src", "dst"), ("src_slot", "dst_slot")):
            items[a], items[b] = self.items[b], self.items[a]
        runs["src_row"], runs["dst_row"] = self.runs["dst_row"], self.runs["src_row"]
        return Messages(items, runs)

    def sorted(self) -> Messages:
        """In global order: by start; within a step by rounds in which ranks are paired, source xor target, so that no
        rank is everybody's target at once. Nor is any node or NIC, where these have ranks in powers of two: the four
        ranks of a node begin with four different ranks of another (after one cyclic shift all would begin with the same
        one)."""
        pairing = self.items["dst"] ^ self.items["src"]
        return Messages(self.items[np.lexsort((self.items["src"], pairing, self.items["start"]))], self.runs)


class MessageList:
    """Collects messages one by one; runs that continue each other are joined, empty messages left out."""

    def __init__(self) -> None:
        self._items: list[tuple[int, ...]] = []
        self._runs: list[np.ndarray] = []
        self._count = 0

    def add(
        self,
        *,
        start: int,
        done: int,
        src: int,
        dst: int,
        src_slot: int,
        dst_slot: int,
        src_row: Iterable[int] | np.ndarray | int,
        dst_row: Iterable[int] | np.ndarray | int,
        rows: Iterable[int] | np.ndarray | int,
    ) -> None:
        """One message; src_row, dst_row and rows are numbers, or one entry for each run."""
        a, b, n = (np.atleast_1d(np.asarray(x, np.int64)) for x in (src_row, dst_row, rows))
        a, b, n = a[n > 0], b[n > 0], n[n > 0]
        if not len(n):
            return
        found = np.empty(len(n), RUN)
        found["src_row"], found["dst_row"], found["rows"] = a, b, n
        runs, _ = joined(found, ("src_row", "dst_row"))
        self._items.append((start, done, src, dst, src_slot, dst_slot, self._count, len(runs), int(n.sum())))
        self._runs.append(runs)
        self._count += len(runs)

    def messages(self) -> Messages:
        """All that was added, in global order."""
        if not self._items:
            return Messages.none()
        return Messages(np.array(self._items, MESSAGE), np.concatenate(self._runs)).sorted()
