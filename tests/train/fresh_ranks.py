"""New ranks for every run: process groups, random state and Megatron's globals belong to a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from tests.processes import Ranks, answer, values


class FreshRanks:
    """`run` executes a function in as many new processes as asked for."""

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) in `size` ranks, which find each other as the ranks of torchrun do.

        Args:
            size: number of ranks.
            function: at module level; arguments and results travel by pickle.

        Returns:
            The results in the order of ranks.

        Raises:
            RankError: a rank raised or died.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
        ranks = Ranks()
        try:
            for rank in range(size):
                ranks.start(_rank, rank, size, store.port, function, *args)
            return values(ranks.outcomes(size))
        finally:
            ranks.end()


def _rank(pipe: Connection, rank: int, size: int, port: int, function: Callable[..., Any], *args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(max(size, os.cpu_count() or 1)),  # one thread each
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    answer(pipe, function, *args)
    os._exit(0)
