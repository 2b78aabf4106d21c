"""One rank of an emulated cluster: python -m benchmarks.cluster.worker JOB RANK, in the rank's namespace."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.layer import ModelledAttention, count_sent_bytes, layer_run, planned_bytes
from benchmarks.cluster.network import Shape
from benchmarks.cluster.scale import Batch, Scale, narrowed, plan_for
from mindspeed_cp.cluster import ComputeCost
from mindspeed_cp.ops.host_memory import keep_freed_memory

AHEAD = 0.05  # seconds between agreeing on a start and the start


@dataclass(frozen=True)
class Job:
    """What all ranks of a cluster do.

    Attributes:
        shape: of the cluster.
        scale: of its time.
        folder: of the store and of the results.
        batches: a layer is measured for each.
        variants: names of the plans.
        repeat: runs of each.
    """

    shape: Shape
    scale: Scale
    folder: str
    batches: tuple[Batch, ...] = ()
    variants: tuple[str, ...] = ()
    repeat: int = 3


class Rank:
    """This process: timing, counters and results.

    Attributes:
        job: of all ranks.
        rank: of this one.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self._results = Path(job.folder, "results.jsonl")

    def time(self, run: Callable[[], None], **told: Any) -> None:
        """Run on all ranks from one moment on; rank 0 writes down the time of the slowest, and everybody's figures.

        Args:
            run: this rank's part.
            told: written beside the figures.
        """
        with count_sent_bytes() as sent:
            dist.barrier()  # whatever was on its way before has been counted
            cpu, own, asked = busy_cores(), time.process_time(), time.monotonic()
            begin = self._start()
            run()
            spent = time.monotonic() - begin
            dist.barrier()
            cpu, own = busy_cores() - cpu, time.process_time() - own
            elapsed = time.monotonic() - asked
        handed = [0] * self.job.shape.ranks
        for peer, size in sent.items():
            handed[peer] = size
        figures = {"seconds": spent, "handed": handed, "cores": cpu / elapsed, "own": own / elapsed}
        figures_of_ranks: list[Any] = [None] * self.job.shape.ranks
        dist.all_gather_object(figures_of_ranks, figures)
        if self.rank == 0:
            row = told | {
                "seconds": max(rank_figures["seconds"] for rank_figures in figures_of_ranks),
                "ranks": figures_of_ranks,
            }
            with self._results.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _start(self) -> float:
        """Return one starting time for all ranks, which share the clock of the machine."""
        dist.barrier()
        moment = torch.tensor([time.monotonic() + AHEAD], dtype=torch.float64)
        dist.broadcast(moment, 0)
        begin = float(moment)
        time.sleep(max(0.0, begin - time.monotonic()))
        return begin


def busy_cores() -> float:
    """Return the seconds for which the cores of this machine have worked since it started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def layer(rank: Rank) -> None:
    """Run forward and backward of one attention layer, by every variant, for every batch."""
    job, me = rank.job, rank.rank
    cost = ComputeCost(job.scale.cluster, job.scale.attention)
    model = ModelledAttention(cost, job.scale.seconds)
    for batch in job.batches:
        plans = {name: plan_for(name, batch, job.scale, job.shape.nodes) for name in job.variants}
        plans = {name: narrowed(plan, job.scale) for name, plan in plans.items()}
        planned = {name: planned_bytes(plan) for name, plan in plans.items()}
        runs = {name: layer_run(plan, me, model) for name, plan in plans.items()}
        if batch is job.batches[0]:
            next(iter(runs.values()))()  # once without a clock: what is done once in a process
        for repeat in range(job.repeat):
            for name, run in runs.items():
                rank.time(
                    run, batch=batch.name, number=batch.number, documents=len(batch.lengths), variant=name,
                    repeat=repeat, planned=planned[name],
                )  # fmt: skip


def connect(elements: int = 1 << 18) -> None:
    """Send messages of `elements` x 4 bytes between every two ranks, so that connections are up and their windows
    open."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    for distance in range(1, ranks):
        to, by = ((me + sign * distance) % ranks for sign in (1, -1))
        works = [
            dist.isend(torch.zeros(elements), to),
            dist.irecv(torch.empty(elements), by),
        ]
        for work in works:
            assert work is not None
            work.wait()


def end_with_parent() -> None:
    """End this process when the program that started it ends, even if that is killed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("the program that started this rank is gone")


def main() -> None:
    end_with_parent()
    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    number = int(sys.argv[2])
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=number, world_size=job.shape.ranks)
    rank = Rank(job, number)
    connect()
    layer(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
