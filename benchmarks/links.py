"""Attention on the links of a node, simulated: one ring, direct fetches, and direct by exchanges.

    python -m benchmarks.links [--cluster a2] [--nodes 1 2] [--tokens 18432 32768 131072] [--kv-heads 32 8]

One causal document of so many tokens per node, 32 heads of 128 channels in bf16, without linear layers. Times are the
simulator's, from the preset's nominal bandwidths; nothing here was measured on the devices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster import LayerCost, load_cluster

VARIANTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("ring", "ring", {}),
    ("direct", "direct", {}),
    ("direct, `prefetch: 3`", "direct", {"prefetch": 3}),
    ("direct, `exchange: all_to_all`", "direct", {"exchange": "all_to_all"}),
)


def table(cluster_name: str, cases: Sequence[tuple[int, int]], kv_heads: int) -> dict[str, list[str]]:
    """Return for each variant a cell for each case: ms of the forward + of the backward, in brackets those of both in
    which the mean rank waits for messages.

    Args:
        cluster_name: preset.
        cases: numbers of nodes, and of tokens for each node.
        kv_heads: key/value heads.
    """
    cluster, attention = load_cluster(cluster_name), AttentionConfig(heads=32, kv_heads=kv_heads, head_dim=128)
    cells: dict[str, list[str]] = {label: [] for label, *_ in VARIANTS}
    for nodes, tokens in cases:
        topology = Topology(nodes, cluster.ranks_per_node, cluster_name)
        for label, name, options in VARIANTS:
            plan = build_plan(Documents([tokens * nodes]), topology, attention, name, **options)
            made = simulate_plan(plan, cluster, LayerCost(0.0, 4096))
            forward, exposed = float(made.steps_forward[:, -1, 2].max()), float(made.exposed.mean())
            cells[label].append(f"{1e3 * forward:.1f} + {1e3 * (made.total - forward):.1f} ({1e3 * exposed:.1f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="a2")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[18432, 32768, 131072])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    arguments = parser.parse_args()
    cases = [(nodes, tokens) for nodes in arguments.nodes for tokens in arguments.tokens]
    ranks = load_cluster(arguments.cluster).ranks_per_node
    print(f"{arguments.cluster}; ms forward + backward (exposed), simulated")
    for kv_heads in arguments.kv_heads:
        heads = [f"{nodes * ranks} ranks, {nodes * tokens:,}" for nodes, tokens in cases]
        print(f"\n| {kv_heads} key/value heads | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
        for label, row in table(arguments.cluster, cases, kv_heads).items():
            print(f"| {label} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
