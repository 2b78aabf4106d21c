"""A pool of gloo processes that tests share, one thread each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.limits import HANG
from tests.processes import Pool, Ranks, answer, preload, serve, values

WORLD = 8
_groups: dict[int, Any] = {}  # in a process of the pool: the group of the first ranks, by their number


class GlooPool(Pool):
    """Processes with a group of the first ranks for every number of them."""

    def __init__(self, world: int = WORLD) -> None:
        super().__init__(world)
        preload("torch", "torch.distributed", "mindspeed_cp.engine")

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = HANG) -> list[Any]:
        """function(rank, group, *args) in `size` processes; its results in the order of ranks.

        Args:
            size: 1 to `world` (8) processes; `group` holds just these.
            function: at module level; its results travel by pickle.
            timeout: seconds until all must have answered.

        Raises:
            RankError: a process failed (with its traceback), died, or did not answer in time.
        """
        return self.call(size, _in_group, size, function, *args, limit=timeout)

    def start(self, ranks: Ranks) -> None:
        folder = tempfile.mkdtemp(prefix="mindspeed-cp-test-")
        for rank in range(self._world):
            ranks.start(_serve, rank, self._world, folder)
        values(ranks.outcomes(self._world))


def _serve(pipe: Connection, rank: int, world: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from tests.gloo import share_event_loop

    torch.set_num_threads(1)
    share_event_loop()
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN: whoever reads it is found
    torch.utils.deterministic.fill_uninitialized_memory = True

    def join() -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        _groups.update({size: dist.new_group(list(range(size))) for size in range(1, world + 1)})

    if answer(pipe, join):
        serve(pipe)


def _in_group(rank: int, size: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(rank, _groups[size], *args)
