"""Attention on the links of a node, simulated: one ring, rings on all links, direct fetches, and direct by exchanges.

    python -m benchmarks.links [--cluster a2] [--nodes 1 2] [--tokens 18432 32768 131072] [--kv-heads 32]

One causal document of so many tokens per node, 32 heads of 128 channels in bf16, without linear layers. Times are the
simulator's, from the preset's nominal bandwidths; nothing here was measured on the devices.
"""

from __future__ import annotations

import argparse

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster import LayerCost, load_cluster

VARIANTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("ring", "ring", {}),
    ("ring, `cycles: all`", "ring", {"cycles": "all"}),
    ("direct", "direct", {}),
    ("direct, `prefetch: 3`", "direct", {"prefetch": 3}),
    ("direct, `exchange: all_to_all`", "direct", {"exchange": "all_to_all"}),
)


def times(cluster_name: str, nodes: int, tokens: int, kv_heads: int) -> list[tuple[str, float, float, float]]:
    """Return for each variant its label, milliseconds of the forward and of the backward, and milliseconds of both in
    which the mean rank waits for messages."""
    cluster = load_cluster(cluster_name)
    topology = Topology(nodes, cluster.ranks_per_node, cluster_name)
    attention = AttentionConfig(heads=32, kv_heads=kv_heads, head_dim=128)
    rows = []
    for label, name, options in VARIANTS:
        plan = build_plan(Documents([tokens * nodes]), topology, attention, name, **options)
        made = simulate_plan(plan, cluster, LayerCost(0.0, 4096))
        forward = float(made.steps_forward[:, -1, 2].max())
        milliseconds = [1e3 * seconds for seconds in (forward, made.total - forward, float(made.exposed.mean()))]
        rows.append((label, milliseconds[0], milliseconds[1], milliseconds[2]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="a2")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[18432, 32768, 131072])
    parser.add_argument("--kv-heads", type=int, default=32)
    arguments = parser.parse_args()
    print(f"{arguments.cluster}, {arguments.kv_heads} key/value heads; ms forward + backward (exposed), simulated")
    heads = [f"{nodes} x {tokens:,} tokens" for nodes in arguments.nodes for tokens in arguments.tokens]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    cells: dict[str, list[str]] = {label: [] for label, *_ in VARIANTS}
    for nodes in arguments.nodes:
        for tokens in arguments.tokens:
            for label, forward, backward, exposed in times(arguments.cluster, nodes, tokens, arguments.kv_heads):
                cells[label].append(f"{forward:.1f} + {backward:.1f} ({exposed:.1f})")
    for label, row in cells.items():
        print(f"| {label} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
