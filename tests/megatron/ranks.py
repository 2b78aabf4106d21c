"""Processes for Megatron, which takes the default process group for its world: each run gets one of just its ranks."""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.workers import Workers

PROCESSES = 4


class MegatronRanks(Workers):
    """The pool of :class:`tests.workers.Workers` with a default process group made anew for every run.

    run(size, function, *args) calls function(rank, None, *args) in `size` processes, 1 to 4, whose world is these.
    """

    def __init__(self) -> None:
        super().__init__()
        self._context.set_forkserver_preload(["tests.megatron.gpt"])  # no effect where other tests started the server

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="mindspeed-cp-test-") as folder:
            return super().run(size, _in_a_world, size, folder, function, *args, timeout=timeout)

    def _start(self) -> None:
        for rank in range(PROCESSES):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            _, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, None, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _in_a_world(rank: int, group: None, size: int, folder: str, function: Callable[..., Any], *args: Any) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=size)
    try:
        return function(rank, group, *args)
    finally:
        dist.destroy_process_group()
        gc.collect()  # a gloo group that a cycle holds goes on polling: fifty threads, a third of a core after twenty tests
