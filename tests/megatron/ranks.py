"""Processes for Megatron, which takes the default process group for its world: each run gets one of just its ranks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import Pool

PROCESSES = 4


class SilentGroup:
    """Stands for a process group, of which only size and rank are read: no message is sent."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class MegatronRanks(Pool):
    """A pool whose processes get a new default process group for every run."""

    def __init__(self) -> None:
        super().__init__(PROCESSES)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, None, *args) in `size` processes, 1 to 4, whose world is these."""
        with tempfile.TemporaryDirectory(prefix="mindspeed-cp-test-") as folder:
            return self.call(size, _in_a_world, size, folder, function, *args)


def _in_a_world(rank: int, size: int, folder: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from tests.gloo import share_event_loop
    from tests.megatron.gpt import collect_garbage

    torch.set_num_threads(1)
    share_event_loop()
    dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=size)
    try:
        return function(rank, None, *args)
    finally:
        if torch.__version__ < "2.9":
            # The group's destructor waits for gloo's thread, with the interpreter's lock held (py-spy, torch 2.7.1). If
            # that thread still has the last operation, whose tensors need the lock, both wait for ever.
            time.sleep(0.1)
        dist.destroy_process_group()
        collect_garbage()
