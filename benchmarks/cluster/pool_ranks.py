"""What the ranks of an emulated cluster do for a global batch: on replicas of some ranks each, or on a pool of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.cluster.layer import busy_seconds, layer_run, planned_bytes
from benchmarks.cluster.modelled import ModelledAttention
from benchmarks.cluster.worker import Job, Rank, connect
from mindspeed_cp.cluster import ComputeCost
from mindspeed_cp.engine.agreement import plan_digest
from mindspeed_cp.ops.host_memory import keep_freed_memory
from mindspeed_cp.plan import Plan

AHEAD = 1.0  # seconds between agreeing on a start and the start: many ranks share few cores
Number = TypeVar("Number", int, float)
SHORT = 1024  # elements of the messages that bring connections up; more than slow links need to open their windows


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Ranks that compute micro-batches together.

    Attributes:
        ranks: ascending.
        plans: of the micro-batches, one after the other, with the rows that really travel.
    """

    ranks: tuple[int, ...]
    plans: tuple[Plan, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """A layer of a global batch, by groups of ranks that do not know of each other; it ends when all have ended.

    Attributes:
        batch: name of the set of lengths.
        number: of the batch.
        way: how documents are assigned to ranks.
        groups: every rank is in one of them.
        planned: bytes that each rank sends.
        busy: modelled seconds on this machine in which each rank computes.
    """

    batch: str
    number: int
    way: str
    groups: tuple[RankGroup, ...]
    planned: list[int]
    busy: list[float]

    def group_of(self, rank: int) -> RankGroup:
        """Return the group of a rank."""
        return next(group for group in self.groups if rank in group.ranks)


def make_step(batch: str, number: int, way: str, plans: Sequence[Sequence[Plan]], model: ModelledAttention) -> Step:
    """Return the step of groups of consecutive ranks, in the order of these.

    Args:
        batch, number, way: as of :class:`Step`.
        plans: of each group's micro-batches, with the rows that really travel; every group has one at least.
        model: of the kernels.
    """
    groups: list[RankGroup] = []
    planned: list[int] = []
    busy: list[float] = []
    for plans_of_group in plans:
        ranks = plans_of_group[0].ranks
        groups.append(RankGroup(tuple(range(len(planned), len(planned) + ranks)), tuple(plans_of_group)))
        planned += _sums([planned_bytes(plan) for plan in plans_of_group])
        busy += _sums([busy_seconds(plan, model, linear=True) for plan in plans_of_group])
        for plan in plans_of_group:
            plan_digest(plan)  # kept with the plan, before ranks are forked
    return Step(batch, number, way, tuple(groups), planned, busy)


def model_of(job: Job) -> ModelledAttention:
    """Return the model of the kernels' times."""
    return ModelledAttention(ComputeCost(job.scale.cluster, job.scale.attention), job.scale.seconds)


def run_rank(job: Job, first: Step, steps: Sequence[Step], number: int) -> None:
    """Be one rank: run `first` once without a clock, then every step, those of one batch in turn.

    Args:
        job: of all ranks; its batches and variants are not used.
        first: a short step that uses the same groups as the others.
        steps: to be measured, batch by batch.
        number: of this rank.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=number, world_size=job.shape.ranks)
    rank, model, groups = Rank(job, number, AHEAD), model_of(job), _process_groups(steps, number, job.shape.ranks)
    for group in groups.values():
        connect(SHORT, group)
    _run(first, number, model, groups)()
    for batch in dict.fromkeys(step.number for step in steps):
        steps_of_batch = [step for step in steps if step.number == batch]
        runs = [_run(step, number, model, groups) for step in steps_of_batch]
        for repeat in range(job.repeat):
            for step, run in zip(steps_of_batch, runs, strict=True):
                rank.time(
                    run, step.group_of(number).ranks, batch=step.batch, number=step.number, variant=step.way,
                    repeat=repeat, planned=step.planned, busy=step.busy,
                )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


Groups = dict[tuple[int, ...], dist.ProcessGroup | None]


def _process_groups(steps: Sequence[Step], rank: int, ranks: int) -> Groups:
    """Make the process groups that a rank is in; None is that of all ranks."""
    groups: Groups = {tuple(range(ranks)): None}
    for members in dict.fromkeys(step.group_of(rank).ranks for step in steps):
        if members not in groups:
            groups[members] = dist.new_group(list(members), use_local_synchronization=True)
    return groups


def _run(step: Step, rank: int, model: ModelledAttention, groups: Groups) -> Callable[[], None]:
    """Return a rank's part of a step."""
    group = step.group_of(rank)
    place = group.ranks.index(rank)
    runs = [layer_run(plan, place, model, "modelled", True, groups[group.ranks]) for plan in group.plans]

    def run() -> None:
        for run_micro_batch in runs:
            run_micro_batch()

    return run


def _sums(rows: Sequence[Sequence[Number]]) -> list[Number]:
    """Return the sum of each column."""
    return [sum(column) for column in zip(*rows, strict=True)]
