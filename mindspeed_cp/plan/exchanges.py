"""Exchanges: messages that travel together, as one all-to-all-v of all ranks.

In a plan with `exchange="all_to_all"`, all messages with the same first and last step are one exchange, K/V and
gradients alike. Every rank takes part in every exchange, also a rank without messages in it: it posts the exchange at
the beginning of its first step and waits for it at the end of its last step. All ranks take the steps of a plan in one
order, so they post the exchanges in one order. A rank in the earliest step waits only for exchanges that all other
ranks have posted, so no plan can dead-lock.

Between the two ends of an exchange the rows of a message are packed: for each pair of ranks the messages in global
order, of each message the rows of K and then those of V, each of which begins at a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_cp.plan.program import Program

#: Bytes; a multiple of the size of every element, so that rows of several types can lie in one buffer.
ALIGNMENT = 16


def aligned(size: np.ndarray | int) -> np.ndarray | int:
    """Round bytes up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of a program, in the order in which all ranks post them.

    Attributes:
        start, done: steps in which an exchange is posted and waited for, int64 [exchanges].
        of_reduce, of_fetch: exchange of each reduce and of each fetch, int64 [messages].
    """

    start: np.ndarray
    done: np.ndarray
    of_reduce: np.ndarray
    of_fetch: np.ndarray

    @staticmethod
    def of(program: Program) -> Exchanges:
        """Group the messages of a program by their first and last step."""
        items = np.concatenate([program.reduce.items, program.fetch.items])
        steps = np.stack([items["start"], items["done"]], 1)
        pairs, number = np.unique(steps, axis=0, return_inverse=True)
        number, reduces = number.reshape(-1), len(program.reduce)
        return Exchanges(pairs[:, 0], pairs[:, 1], number[:reduces], number[reduces:])

    def __len__(self) -> int:
        return len(self.start)
