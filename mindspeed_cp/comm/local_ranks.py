"""Ranks that are processes of this machine, started to run one function."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: Answer of a rank that did not answer in time.
NO_ANSWER = "no answer"


def run_local_ranks(
    function: Callable[..., Any], ranks: int, arguments: tuple[Any, ...], limit: float, grace: float = 0.0
) -> dict[int, Any]:
    """Run a function on new ranks and return their answers: what the function returned, or the text of its error.

    Answers are in the order in which they arrived; ranks without an answer come last, with :data:`NO_ANSWER`. All
    processes are ended on return.

    Args:
        function: called as function(rank, ranks, init_method, *arguments); a function of a module, since processes are
            spawned. It does not return a str.
        ranks: number of processes.
        arguments: further arguments.
        limit: seconds to wait for all answers.
        grace: seconds to wait for further answers after an error, since other ranks may then wait in vain.
    """
    context = mp.get_context("spawn")
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="mindspeed-cp-") as folder:
        init_method = (Path(folder) / "store").as_uri()
        try:
            for rank in range(ranks):
                pipe, child_pipe = context.Pipe()
                process = context.Process(
                    target=_rank_process, args=(child_pipe, function, rank, ranks, init_method, *arguments), daemon=True
                )
                process.start()
                child_pipe.close()
                processes.append(process)
                pipes.append(pipe)
            return _collect_answers(pipes, limit, grace)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect_answers(pipes: list[Connection], limit: float, grace: float) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + limit
    while len(answers) < len(pipes) and time.monotonic() < deadline:
        silent = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        for pipe in wait(silent, max(0.0, deadline - time.monotonic())):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = pipes[rank].recv()
            except EOFError:
                answers[rank] = "the process died"
            if isinstance(answers[rank], str):
                deadline = min(deadline, time.monotonic() + grace)
    return answers | {rank: NO_ANSWER for rank in range(len(pipes)) if rank not in answers}


def _rank_process(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        pipe.send(function(*arguments))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split())[:300])
