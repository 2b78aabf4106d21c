"""Which replica and which micro-batch of a global batch computes which document, so that all replicas end together.

A step lasts as long as its slowest replica, and a replica as long as its documents take: linear layers by the token,
attention by the square, and something for each micro-batch (launches, and the loop itself)::

    documents   0: 8 tokens   1: 4   2: 3   3: 1   4: 4   5: 4      micro-batches of at most 8 tokens, 2 replicas
    in order    replica 0  [0]  [4 5]        64 + 32 = 96
                replica 1  [1 2 3]           26
    by time     replica 0  [0]               64
                replica 1  [1 4] [5 2 3]     32 + 26 = 58

So replicas get other numbers of tokens, and of micro-batches. Where the loss is a sum over tokens divided by their
number over all replicas, that changes nothing that a step computes: the documents of a global batch are the same.

What decides are whole numbers: costs become multiples of 2**-40 of the largest one, after which nothing is rounded. So
every rank, on whatever machine, derives the same assignment from the same costs. The pieces are longest processing time
first (Graham 1969), best fit decreasing for the micro-batches, and an exchange of documents between the slowest replica
and others; the documents as they came are a candidate too, so the result is never worse than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.data.deals import best
from mindspeed_cp.data.problem import Deal, Problem
from mindspeed_cp.errors import ConfigError

UNIT = 2**40  #: the largest cost, in the whole numbers that decide
Cost = Callable[[np.ndarray], np.ndarray] | Sequence[float] | np.ndarray


@dataclass(frozen=True, eq=False)
class Assignment:
    """Where each document of a global batch is computed.

    Attributes:
        replica: of each document, int64 [documents].
        micro_batch: of each document, its number among those of its replica, int64 [documents].
        seconds: modelled time of each replica, float64 [replicas], in the unit of the cost that was given.
        method: that made it.
    """

    replica: np.ndarray
    micro_batch: np.ndarray
    seconds: np.ndarray
    method: str

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches of each replica; 0 for a replica without documents."""
        found = np.zeros(len(self.seconds), np.int64)
        np.maximum.at(found, self.replica, self.micro_batch + 1)
        return tuple(found.tolist())

    def rows(self, replica: int) -> list[np.ndarray]:
        """The documents of each micro-batch of a replica, ascending: a list of int64 [documents]."""
        mine = np.flatnonzero(self.replica == replica)
        return [mine[self.micro_batch[mine] == number] for number in range(self.counts[replica])]

    @property
    def slowest(self) -> float:
        """Modelled time of the slowest replica."""
        return float(self.seconds.max())

    @property
    def imbalance(self) -> float:
        """The slowest replica's modelled time over the mean; 1.0 where nothing takes any time."""
        return self.slowest / float(self.seconds.mean()) if self.seconds.any() else 1.0


def assign(
    lengths: Sequence[int] | np.ndarray,
    cost: Cost,
    replicas: int,
    micro_batches: int | None = None,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
    equal_counts: bool = False,
) -> Assignment:
    """Documents of one global batch -> replicas and their micro-batches, for the least time of the slowest replica.

    Of equal times the one with fewer micro-batches, then the one whose longest micro-batch takes least. The
    micro-batches of a replica come longest first, so what does not fit into memory is told at once.

    Args:
        lengths: tokens of each document, int [documents].
        cost: modelled time of each document, float [documents], or a function from lengths to it.
        replicas: data-parallel replicas.
        micro_batches: of each replica, at most; all of them, if `rows` fills all of them. None: as many as are best,
            another number on each replica.
        token_bound: most tokens of a micro-batch: the context, or what memory holds.
        per_micro_batch: modelled time that a micro-batch takes beside its documents.
        rows: the micro-batch of each document as they came, int [documents], numbered from 0 over all replicas, of
            which row i is on replica i % replicas; None: filled in the order of the documents.
        equal_counts: every replica has as many micro-batches as the others, if there are at least as many documents as
            `rows` gives micro-batches: for replicas that wait for each other in each.

    Raises:
        ConfigError: a document is longer than the bound, documents do not fit into the micro-batches, or an argument
            is out of range.
    """
    problem = make_problem(lengths, cost, replicas, micro_batches, token_bound, per_micro_batch, rows, equal_counts)
    return finish(problem, best(problem), "time")


def make_problem(
    lengths: Sequence[int] | np.ndarray,
    cost: Cost,
    replicas: int,
    micro_batches: int | None,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
    equal_counts: bool = False,
) -> Problem:
    """What `assign` and the baselines decide about; arguments and errors as there."""
    tokens = _numbers("lengths", lengths, np.int64)
    for name, value in (("replicas", replicas), ("token_bound", token_bound)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be 1 or more")
    if micro_batches is not None and micro_batches < 1:
        raise ConfigError(f"micro_batches = {micro_batches}: must be 1 or more, or None: as many as are best")
    seconds = _numbers("cost", cost(tokens) if callable(cost) else cost, np.float64)
    if len(seconds) != len(tokens):
        raise ConfigError(f"cost has {len(seconds)} numbers for {len(tokens)} documents; give one for each")
    for name, values in (("lengths", tokens), ("cost", seconds), ("per_micro_batch", np.array([per_micro_batch]))):
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(bad):
            raise ConfigError(f"{name}: {values[bad[0]]} at {bad[0]}; valid: finite numbers, 0 or more")
    longer = np.flatnonzero(tokens > token_bound)
    if len(longer):
        raise ConfigError(
            f"document {longer[0]} has {tokens[longer[0]]} tokens, and a micro-batch at most {token_bound}; cut it, or "
            "raise the bound (data.seq_length)"
        )
    given = None if rows is None else _numbers("rows", rows, np.int64)
    if given is not None and (len(given) != len(tokens) or given.min(initial=0) < 0):
        raise ConfigError(f"rows has {len(given)} numbers for {len(tokens)} documents; give one for each, 0 or more")
    unit = max(float(seconds.max(initial=0.0)), float(per_micro_batch)) / UNIT
    whole = np.rint(seconds / unit).astype(np.int64) if unit else np.zeros(len(tokens), np.int64)
    return Problem(
        lengths=tuple(tokens.tolist()),
        costs=tuple(whole.tolist()),
        fixed=round(per_micro_batch / unit) if unit else 0,
        replicas=int(replicas),
        micro_batches=micro_batches,
        equal_counts=equal_counts,
        bound=int(token_bound),
        rows=None if given is None else tuple(given.tolist()),
        unit=unit,
    )


def finish(problem: Problem, deal: Deal, method: str) -> Assignment:
    """A deal as arrays; the micro-batches of each replica by time, longest first."""
    replica, micro_batch = (np.zeros(len(problem.lengths), np.int64) for _ in range(2))
    for number, group in enumerate(deal):
        ordered = sorted((sorted(row) for row in group), key=lambda row: (-problem.time_of(row), row))
        for at, row in enumerate(ordered):
            replica[row], micro_batch[row] = number, at
    seconds = np.array([problem.replica_time(group) for group in deal]) * problem.unit
    for array in (replica, micro_batch, seconds):
        array.setflags(write=False)
    return Assignment(replica, micro_batch, seconds, method)


def _numbers(name: str, values: Sequence[float] | np.ndarray, kind: type) -> np.ndarray:
    found = np.asarray(values)
    whole = found.size == 0 or np.issubdtype(found.dtype, np.integer)
    if found.ndim != 1 or not (whole or (kind is np.float64 and np.issubdtype(found.dtype, np.floating))):
        what = "numbers" if kind is np.float64 else "whole numbers"
        raise ConfigError(f"{name} must be a flat list of {what}, not {found.dtype} of shape {list(found.shape)}")
    return found.astype(kind)
