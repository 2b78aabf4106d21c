"""Assignment of the documents of a global batch to replicas and micro-batches, so that all replicas end together.

A step lasts as long as its slowest replica, and a replica as long as its documents take: time proportional to the
tokens for linear layers, quadratic in the length for attention, and a constant for each micro-batch (launches, and the
loop itself)::

    documents   0: 8 tokens   1: 4   2: 3   3: 1   4: 4   5: 4      micro-batches of at most 8 tokens, 2 replicas
    in order    replica 0  [0]  [4 5]        64 + 32 = 96
                replica 1  [1 2 3]           26
    by time     replica 0  [0]               64
                replica 1  [1 4] [5 2 3]     32 + 26 = 58

Replicas may thus get different numbers of tokens and of micro-batches. If the loss is a sum over tokens divided by
their number over all replicas, the result of the step is the same, as the documents of the global batch are the same.

All decisions use integers: costs are rounded to multiples of 2**-40 of the largest one. Every rank, on any machine,
therefore derives the same assignment from the same costs. The candidates use longest processing time first (Graham
1969), best fit decreasing for micro-batches, and exchanges of documents between the slowest replica and others. The
documents in their given order are a candidate too, so the result is never worse than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.data.candidates import DispatchProblem, DocumentGroups, best_candidate
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.plan.problem import document_pairs

LARGEST_COST = 2**40  #: the integer to which the largest cost is scaled
CostFunction = Callable[[np.ndarray], np.ndarray] | Sequence[float] | np.ndarray


@dataclass(frozen=True, eq=False)
class Assignment:
    """The replica and micro-batch of each document of a global batch.

    Attributes:
        micro_batches: micro-batches of each replica, none for a replica without documents; each the ascending
            documents, int64.
        seconds: modelled time of each replica, float64 [replicas], in the unit of the given cost.
    """

    micro_batches: Sequence[Sequence[np.ndarray]]
    seconds: np.ndarray

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of micro-batches of each replica."""
        return tuple(map(len, self.micro_batches))


def assign(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    *,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
    equal_counts: bool = False,
) -> Assignment:
    """Assign the documents of one global batch to replicas and their micro-batches.

    The time of the slowest replica is minimized; of equal times, the assignment with fewer micro-batches is taken, then
    the one whose longest micro-batch is shortest. The micro-batches of a replica are sorted by descending time, so that
    one that does not fit into memory fails first.

    Args:
        lengths: tokens of each document, int [documents].
        cost: modelled time of each document, float [documents], or a function from lengths to it.
        replicas: number of data-parallel replicas.
        token_bound: maximum number of tokens in a micro-batch: the context, or what fits into memory.
        per_micro_batch: modelled time that a micro-batch takes in addition to its documents.
        rows: micro-batch of each document in the given order, int [documents], numbered from 0 over all replicas; row i
            is on replica i % replicas. None: micro-batches are filled in the order of the documents.
        equal_counts: all replicas have the same number of micro-batches, for replicas that wait for each other in each
            of them. Always possible if `rows` has the same number of micro-batches on each replica, none empty.

    Raises:
        ConfigError: a document is longer than the bound, there are too few documents for equal counts, or an argument
            is out of range.
    """
    problem = make_dispatch_problem(lengths, cost, replicas, token_bound, per_micro_batch, rows, equal_counts)
    return to_assignment(problem, best_candidate(problem))


def make_dispatch_problem(
    lengths: Sequence[int] | np.ndarray,
    cost: CostFunction,
    replicas: int,
    token_bound: int,
    per_micro_batch: float = 0.0,
    rows: Sequence[int] | np.ndarray | None = None,
    equal_counts: bool = False,
) -> DispatchProblem:
    """Check the arguments of :func:`assign` and convert them to integers."""
    tokens = _numbers("lengths", lengths, np.int64)
    seconds = _numbers("cost", cost(tokens) if callable(cost) else cost, np.float64)
    row_numbers = None if rows is None else tuple(_numbers("rows", rows, np.int64).tolist())
    for name, count in (("cost", len(seconds)), ("rows", len(tokens if row_numbers is None else row_numbers))):
        if count != len(tokens):
            raise ConfigError(f"{name} has {count} numbers for {len(tokens)} documents; give one for each")
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
    unit = max(float(seconds.max(initial=0.0)), float(per_micro_batch)) / LARGEST_COST
    costs = np.rint(seconds / unit).astype(np.int64) if unit else np.zeros(len(tokens), np.int64)
    return DispatchProblem(
        lengths=tuple(tokens.tolist()),
        costs=tuple(costs.tolist()),
        micro_batch_cost=round(per_micro_batch / unit) if unit else 0,
        replicas=int(replicas),
        equal_counts=equal_counts,
        token_bound=int(token_bound),
        rows=row_numbers,
        unit=unit,
    )


def to_assignment(problem: DispatchProblem, groups: DocumentGroups) -> Assignment:
    """Return the groups as arrays; the micro-batches of each replica by descending time."""
    micro_batches = [
        [np.array(row, np.int64) for row in sorted(map(sorted, group), key=lambda row: (-problem.time_of(row), row))]
        for group in groups
    ]
    return Assignment(micro_batches, np.array([problem.replica_time(group) for group in groups]) * problem.unit)


def _numbers(name: str, values: Sequence[float] | np.ndarray, kind: type) -> np.ndarray:
    array = np.asarray(values)
    is_whole = array.size == 0 or np.issubdtype(array.dtype, np.integer)
    if array.ndim != 1 or not (is_whole or (kind is np.float64 and np.issubdtype(array.dtype, np.floating))):
        what = "numbers" if kind is np.float64 else "whole numbers"
        raise ConfigError(f"{name} must be a flat list of {what}, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(kind)


# The cost of documents: modelled seconds of a training step on one rank of a replica.
#
# Every rank of the replica has an equal share of the document. The time of linear layers is proportional to tokens,
# that of attention to the visible (query, key) pairs, with a higher rate for short tiles
# (`mindspeed_cp.cluster.ComputeCost`); the backward takes 2 and 2.5 times as long. A micro-batch adds the launches of
# its kernels. Communication is left out: most of it is hidden, and the rest grows with the documents, as compute does.
# Only elementwise sums, products and quotients are used, so every machine gets the same bits.

#: Kernels of a layer besides attention, forward and backward: norms, projections, rotary positions, MLP, residuals.
LINEAR_KERNELS = 36


@dataclass(frozen=True)
class DocumentCost:
    """Modelled seconds of documents and micro-batches on one rank.

    Attributes:
        cluster: the devices.
        layers: attention and linear part of each layer, on one tensor-parallel rank.
        ranks: number of context-parallel ranks, which share every document.
        whole_documents: True if attention tiles are as long as documents, because heads are split or short documents
            are on one rank; False if they are as long as a rank's share of a document.
        recomputed: forwards of attention and of the linear part that the backward computes again, 0 or 1 each.
    """

    cluster: Cluster
    layers: Sequence[tuple[AttentionConfig, LayerCost]]
    ranks: int = 1
    whole_documents: bool = False
    recomputed: tuple[int, int] = (0, 0)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds of each document, float64 [documents], from lengths, int64 [documents]."""
        documents, tokens = Documents(lengths), lengths / self.ranks
        short = lengths if self.whole_documents else -(-lengths // self.ranks)
        attention_forwards, linear_forwards = (1 + again for again in self.recomputed)
        total = np.zeros(len(lengths))
        for attention, layer in dict.fromkeys(self.layers):  # equal layers are computed once
            cost = ComputeCost(self.cluster, attention, layer)
            pairs = document_pairs(documents, documents, attention) / self.ranks
            seconds = cost.attention_seconds(pairs, short) * attention_forwards
            seconds = seconds + cost.attention_seconds(pairs, short, backward=True)
            seconds = seconds + cost.linear_layer_seconds(tokens) * linear_forwards
            seconds = seconds + cost.linear_layer_seconds(tokens, backward=True)
            total = total + seconds * self.layers.count((attention, layer))
        return total

    @property
    def per_micro_batch(self) -> float:
        """Seconds of kernel launches in a micro-batch: linear kernels of all layers, and an attention call for each
        rank's block, forward and backward."""
        return len(self.layers) * (LINEAR_KERNELS + 2 * self.ranks) * self.cluster.launch
