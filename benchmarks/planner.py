"""CPU time of planning on one machine: every rank its own plans, or one rank those of all (`train.planner`).

    python -m benchmarks.planner [--ranks 128] [--local 4 8] [--batches 5] [--lengths wikipedia] [--kv-heads 8]

A job of `--ranks` ranks, of which `--local` run on this machine, plans batches of 4,096 tokens a rank by `hierarchical`
(32 heads of 128 channels, nodes of 8 ranks), prepares the engine for each plan, and sends nothing else. CPU seconds are
those of processes, so other work on the machine bears little on them; wall seconds are those of the slowest rank. The
last lines have the bytes of a plan and of the slices of its ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.engine import prepare
from mindspeed_cp.plan.plan_bytes import plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan
from mindspeed_cp.train.node_ranks import NodeRanks
from mindspeed_cp.train.plan_sharing import PlanSharing, decode_plans
from mindspeed_cp.train.world import World

TOKENS = 4096  # of a rank
NODE = 8  # ranks


@dataclass(frozen=True)
class Case:
    """Batches of a job.

    Attributes:
        topology: ranks of the job.
        attention: attention of a layer.
        batches: documents of each batch.
    """

    topology: Topology
    attention: AttentionConfig
    batches: Sequence[Documents]

    def plan(self, documents: Documents) -> Plan:
        """Return the plan of a batch."""
        return build_plan(documents, self.topology, self.attention, "hierarchical")


def make_case(ranks: int, batches: int, lengths: str, kv_heads: int) -> Case:
    """Return batches of a set of lengths for so many ranks."""
    drawn = [Documents(sample_batch(lengths, TOKENS * ranks, seed)) for seed in range(batches)]
    return Case(Topology(max(1, ranks // NODE), min(NODE, ranks)), AttentionConfig(32, kv_heads, 128), drawn)


def plan_alone(case: Case, world: World) -> Iterator[Plan]:
    """Yield this rank's own plans."""
    yield from map(case.plan, case.batches)


def plan_shared(case: Case, world: World) -> Iterator[Plan]:
    """Yield plans, made on the first rank."""
    sharing = PlanSharing.open(Settings(train={"planner": "node"}), world, lambda: False)
    assert sharing is not None

    def decode(content: bytes) -> Plan:
        return decode_plans(content)[1][0].read()

    def encode(plan: Plan, ranks: Sequence[int]) -> Any:
        return sharing.encode_plans(0, [plan], False, ranks)

    with sharing:
        for documents in case.batches:
            yield sharing.share("replica", lambda documents=documents: case.plan(documents), encode, decode)  # type: ignore[misc]


def run_rank(
    rank: int,
    local: int,
    plans: Callable[[Case, World], Iterator[Plan]],
    case: Case,
    folder: Path,
    barrier: Barrier,
) -> None:
    """Plan all batches as one of the ranks of this machine, and write CPU and wall seconds into a file."""
    torch.set_num_threads(1)

    class LocalWorld(World):
        """A rank without process groups."""

        def gather_json(self, value: Any) -> list[Any]:
            """Return the values of the ranks of this machine."""
            (folder / f"path {rank}").write_text(json.dumps(value))
            barrier.wait()
            return [json.loads((folder / f"path {other}").read_text()) for other in range(local)]

    size = case.topology.ranks
    world = LocalWorld(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        replicas=1,
        replica=0,
        cp_size=size,
        cp_rank=rank,
        local_size=local,
        tp_size=1,
        store=None,  # type: ignore[arg-type]
        node=NodeRanks(tuple(range(local)), 0.0),
    )
    barrier.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for plan in plans(case, world):
        prepare(plan, rank, torch.bfloat16)
    seconds = time.process_time() - cpu, time.perf_counter() - began
    (folder / f"seconds {rank}").write_text(json.dumps(seconds))


def measure(case: Case, local: int, plans: Callable[[Case, World], Iterator[Plan]]) -> np.ndarray:
    """Return CPU and wall seconds of each rank and batch, fp64 [local, 2]."""
    context = multiprocessing.get_context("fork")  # the imports of this process serve all
    with tempfile.TemporaryDirectory() as name:
        folder, barrier = Path(name), context.Barrier(local)
        arguments = (local, plans, case, folder, barrier)
        processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(local)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        seconds = [json.loads((folder / f"seconds {rank}").read_text()) for rank in range(local)]
    return np.array(seconds) / len(case.batches)


def print_sizes(case: Case) -> None:
    """Print the bytes of the first batch's plan and of some ranks' slices, and the time that these take."""
    plan, ranks = case.plan(case.batches[0]), case.topology.ranks
    chosen = np.unique(np.linspace(0, ranks - 1, 16).astype(int)).tolist()
    began = time.process_time()
    sizes = [len(plan_to_bytes(slice_plan(plan, rank))) for rank in chosen]
    milliseconds = (time.process_time() - began) / len(chosen) * 1e3
    print(
        f"{ranks} ranks, {len(plan.documents)} documents: plan {len(plan_to_bytes(plan)) / 1e3:,.0f} KB, slice of a "
        f"rank {np.mean(sizes) / 1e3:,.0f} KB (at most {max(sizes) / 1e3:,.0f}), {milliseconds:.1f} ms to make"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128])
    parser.add_argument("--local", type=int, nargs="*", default=[4, 8], help="none: only bytes")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--lengths", default="wikipedia")
    parser.add_argument("--kv-heads", type=int, default=8)
    args = parser.parse_args()
    for documents in (warm := make_case(NODE, 1, args.lengths, args.kv_heads)).batches:
        prepare(warm.plan(documents), 0, torch.bfloat16)
    for ranks in args.ranks:
        case = make_case(ranks, args.batches, args.lengths, args.kv_heads)
        for local in args.local:
            alone, shared = (measure(case, local, plans) for plans in (plan_alone, plan_shared))
            print(
                f"{ranks} ranks, {local} on this machine, CPU ms of a batch: each alone {alone[:, 0].sum() * 1e3:.0f} "
                f"in all ({alone[:, 0].mean() * 1e3:.0f} a rank); one for all {shared[:, 0].sum() * 1e3:.0f} (planner "
                f"{shared[0, 0] * 1e3:.0f}, others {shared[1:, 0].mean() * 1e3:.1f} each), "
                f"{shared[:, 0].sum() / alone[:, 0].sum():.2f} times; wall {alone[:, 1].max() * 1e3:.0f} and "
                f"{shared[:, 1].max() * 1e3:.0f}",
                flush=True,
            )
        print_sizes(case)


if __name__ == "__main__":
    main()
