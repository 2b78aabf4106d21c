"""Assignment of the documents of a step to pools of whole replicas, each of which is planned by itself.

To the assignment a pool is what a replica is to :mod:`mindspeed_cp.data.balance`: documents go to pools by their
modelled work, the longest first, each to the pool with the least work, and those of a pool into micro-batches that have
room for as many tokens as its replicas have together::

    ranks           0  1  2  3  4  5  6  7        8 replicas of one rank
    one pool      [ 0  1  2  3  4  5  6  7 ]      planned as a whole, by everyone
    two pools     [ 0  1  2  3 ][ 4  5  6  7 ]    equal in work; a rank plans its own pool alone
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.data.balance import Assignment, assign

#: A step on several pools is also compared with one pool of all ranks if the busiest of them has more than this many
#: times the mean work: a document of more than a pool's share then keeps one pool busier than the others. Below, one
#: pool has nothing to level: several pools are also planned more thoroughly (docs/balancing.md).
UNEVEN = 1.1


@dataclass(frozen=True, eq=False)
class PoolAssignment:
    """The pool and micro-batch of each document of a step.

    Attributes:
        assignment: pools in the place of replicas.
        work: modelled work of each document, float64 [documents].
    """

    assignment: Assignment
    work: np.ndarray

    @property
    def pools(self) -> int:
        """Number of pools."""
        return len(self.assignment.seconds)

    @cached_property
    def micro_batches(self) -> list[list[np.ndarray]]:
        """Micro-batches of each pool, each the ascending numbers of its documents, int64."""
        return [self.assignment.rows(pool) for pool in range(self.pools)]

    @property
    def shares(self) -> np.ndarray:
        """Modelled time of each pool over that of the slowest, float64 [pools]."""
        seconds, slowest = self.assignment.seconds, self.assignment.slowest
        return seconds / slowest if slowest else np.ones(self.pools)

    @property
    def is_uneven(self) -> bool:
        """True if one pool of all ranks may be faster."""
        return self.assignment.imbalance > UNEVEN

    @property
    def slowest(self) -> list[int]:
        """The pools that may be the slowest: that with most work, and that with the document of most work."""
        busiest = int(np.argmax(self.assignment.seconds))
        if not len(self.work):
            return [busiest]
        return sorted({busiest, int(self.assignment.replica[np.argmax(self.work)])})


def assign_to_pools(
    lengths: np.ndarray,
    work: np.ndarray,
    pools: int,
    replicas: int,
    *,
    context: int,
    per_micro_batch: float = 0.0,
    rows: np.ndarray | None = None,
    equal_counts: bool = False,
    stages: int = 1,
) -> PoolAssignment:
    """Assign the documents of a step to equal pools and their micro-batches.

    A pool has as few micro-batches as there can be (with pipeline stages, as many as end soonest), equal in modelled
    time, each with as many tokens as its replicas have room for together.

    Args:
        lengths: tokens of each document, int64 [documents].
        work: modelled seconds of each on the ranks of one replica, float64 [documents].
        pools: number of pools, a divisor of `replicas`; 1: all documents are of one pool.
        replicas: number of data-parallel replicas.
        context: maximum number of tokens in a micro-batch of one replica.
        per_micro_batch: modelled seconds that a micro-batch takes in addition to its documents.
        rows: row of each document as it was packed, int64 [documents]; row i is of replica i % replicas.
        equal_counts: all pools have the same number of micro-batches, as where experts span them.
        stages: number of pipeline stages.

    Raises:
        ConfigError: a document is longer than such a micro-batch, or there are too few documents for equal counts.
    """
    per_pool = replicas // pools
    assignment = assign(
        lengths,
        work / per_pool,
        pools,
        token_bound=context * per_pool,
        per_micro_batch=per_micro_batch,
        rows=None if rows is None else rows // per_pool,
        equal_counts=equal_counts,
        stages=stages,
    )
    return PoolAssignment(assignment, work)
