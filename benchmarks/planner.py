"""What one planner of a machine costs (`train.planner: node`): the plan, the slices of other ranks, and their bytes.

    python -m benchmarks.planner [--ranks 128 1024] [--local 8] [--lengths wikipedia] [--kv-heads 8] [--seed 0]

One batch of 4,096 tokens a rank, planned by `hierarchical` (32 heads of 128 channels, nodes of 8 ranks). All times are
CPU milliseconds of one process. Sums over the ranks of a machine are computed from these; preparing the engine for a
plan, which every rank does either way, and the socket are not in them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.plan.plan_bytes import plan_from_bytes, plan_to_bytes
from mindspeed_cp.plan.rank_slice import slice_plan

TOKENS, NODE = 4096, 8  # tokens of a rank, and ranks of a node


def make_plan(ranks: int, lengths: str, kv_heads: int, seed: int) -> Plan:
    """Return the plan of one batch."""
    documents = Documents(sample_batch(lengths, TOKENS * ranks, seed))
    topology = Topology(max(1, ranks // NODE), min(NODE, ranks))
    return build_plan(documents, topology, AttentionConfig(32, kv_heads, 128), "hierarchical")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--local", type=int, default=8, help="ranks of a machine")
    parser.add_argument("--lengths", default="wikipedia")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_plan(NODE, args.lengths, args.kv_heads, args.seed)  # to warm up
    for ranks in args.ranks:
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
