"""A pool of gloo processes that tests share: started once, one thread each, with time-outs and the worker's error."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

WORLD = 8
START_SECONDS = 120


class WorkerError(AssertionError):
    """A function failed in a worker; carries the worker's traceback."""


class Workers:
    """`run` executes a function in as many processes as asked for; after a failure the pool is started anew."""

    def __init__(self, world: int = WORLD) -> None:
        self._world = world
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "mindspeed_cp.engine"])
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """function(rank, group, *args) in `size` processes; its results in the order of ranks.

        Args:
            size: 1 to `world` (8) processes; `group` holds just these.
            function: at module level; its results travel by pickle.
            timeout: seconds until all must have answered.

        Raises:
            WorkerError: a process failed (with its traceback), died, or did not answer in time.
        """
        if not 1 <= size <= self._world:
            raise ValueError(f"size is {size}; valid: 1 to {self._world}")
        if not self._processes:
            self._start()
        pipes = self._pipes[:size]
        for pipe in pipes:
            pipe.send((size, function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < size and time.monotonic() < deadline:
            open_pipes = [p for rank, p in enumerate(pipes) if rank not in results and rank not in errors]
            for pipe in wait(open_pipes, max(0.0, deadline - time.monotonic())):
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else errors)[rank] = value
                if not ok:  # the others now wait for it in vain: give them a moment to say so
                    deadline = min(deadline, time.monotonic() + 3)
        if len(results) < size:
            self.close()
            silent = [rank for rank in range(size) if rank not in results and rank not in errors]
            text = [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
            if silent:
                text.append(f"no answer from ranks {silent} (bound: {timeout} s)")
            raise WorkerError("\n".join(text))
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        """End the processes of this pool."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="mindspeed-cp-test-")
        for rank in range(self._world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, self._world, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(START_SECONDS):
                self.close()
                raise WorkerError(f"worker {rank} did not start within {START_SECONDS} s")
            pipe.recv()


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN: whoever reads it is found
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    pipe.send("ready")
    while True:
        try:
            size, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, groups[size], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
