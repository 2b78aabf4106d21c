"""What one planner of a machine costs (`train.planner: node`): the plan, the slices of other ranks, and their bytes.

    python -m benchmarks.planner [--ranks 128 1024] [--local 8] [--lengths wikipedia] [--kv-heads 8] [--seed 0]
    python -m benchmarks.planner --processes 8 [--steps 4] [--ranks 128] ...

One batch of 4,096 tokens a rank, planned by `hierarchical` (32 heads of 128 channels, nodes of 8 ranks). All times are
CPU milliseconds of one process. Sums over the ranks of a machine are computed from these; preparing the engine for a
plan, which every rank does either way, and the socket are not in them.

With --processes, that many processes stand for the first ranks of a plan, on one machine. They get the plans of some
batches, once each its own and once those of the first one over the sockets of `mindspeed_cp.plan_sharing`: measured
are the CPU seconds of all of them for plans, slices, sockets and the digests that ranks compare; nothing runs a model
or prepares the engine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.engine.agreement import plan_digest
from mindspeed_cp.plan.plan_bytes import plan_from_bytes, plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan
from mindspeed_cp.plan_sharing.node_sockets import Patience
from mindspeed_cp.plan_sharing.sharing import PlanSharing, decode_plans

TOKENS, NODE = 4096, 8  # tokens of a rank, and ranks of a node
WAIT_SECONDS = 600.0  # until another process is taken for lost


def make_plan(ranks: int, lengths: str, kv_heads: int, seed: int) -> Plan:
    """Return the plan of one batch."""
    documents = Documents(sample_batch(lengths, TOKENS * ranks, seed))
    topology = Topology(max(1, ranks // NODE), min(NODE, ranks))
    return build_plan(documents, topology, AttentionConfig(32, kv_heads, 128), "hierarchical")


class Process:
    """A process that stands for a rank.

    Args:
        rank: its number.
        args: arguments of the command.
        paths: takes the path of the first process, once for each of the others.
        results: takes its number, the CPU seconds of its plans, and the sum of their digests.
    """

    def __init__(self, rank: int, args: argparse.Namespace, paths: Any, results: Any) -> None:
        self.rank, self.args, self.paths, self.results = rank, args, paths, results

    def make(self, ranks: int, step: int) -> Plan:
        """Return the plan of a step."""
        return make_plan(ranks, self.args.lengths, self.args.kv_heads, self.args.seed + step)

    def plan_alone(self, ranks: int) -> None:
        """Make the plan of every step."""
        self._measure(self.make(ranks, step) for step in range(self.args.steps))

    def plan_shared(self, ranks: int) -> None:
        """Get the plan of every step from the first process, which makes it."""
        processes = range(self.args.processes)
        sharing = PlanSharing(self.rank, {"machine": processes}, Patience(lambda: False, WAIT_SECONDS), "--processes")
        if self.rank == 0:
            for _ in processes[1:]:
                self.paths.put(sharing.path)
        else:
            sharing.paths = {0: self.paths.get()}

        def encode(plan: Plan, receivers: Sequence[int]) -> Iterable[bytes]:
            return sharing.encode_slices(0, [plan], receivers)

        def decode(content: bytes) -> Plan:
            _, (received,) = decode_plans(content)
            return received.read()

        with sharing:
            self._measure(
                sharing.share("machine", lambda step=step: self.make(ranks, step), encode, decode)
                for step in range(self.args.steps)
            )

    def _measure(self, plans: Iterable[Plan]) -> None:
        began = time.process_time()
        digest = sum(map(plan_digest, plans))
        self.results.put((self.rank, time.process_time() - began, digest))


def measure_processes(args: argparse.Namespace, ranks: int) -> None:
    """Print the CPU seconds of all processes, where each plans and where one does for the others."""
    context = multiprocessing.get_context("fork")
    seconds, digests = {}, set()
    for kind in ("plan_alone", "plan_shared"):
        paths, results = context.Queue(), context.Queue()
        processes = [
            context.Process(target=getattr(Process(rank, args, paths, results), kind), args=(ranks,), daemon=True)
            for rank in range(args.processes)
        ]
        for process in processes:
            process.start()
        values = sorted(results.get(timeout=WAIT_SECONDS) for _ in processes)
        for process in processes:
            process.join()
        seconds[kind] = np.array([value for _, value, _ in values])
        digests |= {digest for _, _, digest in values}
    if len(digests) > 1:
        raise SystemExit("the processes do not have the same plans")
    alone, shared = seconds["plan_alone"], seconds["plan_shared"]
    print(
        f"{ranks} ranks, {args.steps} steps, {args.processes} processes: {alone.sum():.2f} s of CPU where each plans, "
        f"{shared.sum():.2f} s with one planner ({shared[0]:.2f} s of it, the others {shared[1:].mean():.3f} s each on "
        f"average): ratio {shared.sum() / alone.sum():.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--local", type=int, default=8, help="ranks of a machine")
    parser.add_argument("--lengths", default="wikipedia")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=0, help="measure that many processes, 2 or more")
    parser.add_argument("--steps", type=int, default=4, help="batches of each measurement, with --processes")
    args = parser.parse_args()
    if args.processes and not 2 <= args.processes <= min(args.ranks):
        parser.error(f"--processes is {args.processes}; valid: 2 to {min(args.ranks)}, the ranks of a plan")
    make_plan(NODE, args.lengths, args.kv_heads, args.seed)  # to warm up
    for ranks in args.ranks:
        if args.processes:
            measure_processes(args, ranks)
            continue
        began = time.process_time()
        plan = make_plan(ranks, args.lengths, args.kv_heads, args.seed)
        built = time.process_time()
        slices = [plan_to_bytes(slice_plan(plan, rank)) for rank in range(args.local)]
        encoded = time.process_time()
        for content in slices:
            plan_from_bytes(content)
        decoded = time.process_time()
        build, encode, decode = np.diff([began, built, encoded, decoded]) / [1, args.local, args.local] * 1e3
        alone, shared = build * args.local, build + (encode + decode) * (args.local - 1)
        kilobytes, most = len(plan_to_bytes(plan)) / 1e3, max(map(len, slices)) / 1e3
        print(
            f"{ranks} ranks, {len(plan.documents)} documents: plan {build:.0f} ms, {kilobytes:.0f} KB; slice at most "
            f"{most:.0f} KB, {encode:.1f} ms to make, {decode:.1f} ms to read; {args.local} ranks: {alone:.0f} ms "
            f"alone, {shared:.0f} ms with one planner ({shared / alone:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
