"""Context length x nodes: what one layer takes, by simulation, and how much of the devices that leaves in use.

    python docs/examples/scaling.py [--cluster a2] [--lengths wikipedia] [--contexts 32768 262144] [--png scaling.png]

Every batch is one row of that many tokens: one document, or documents of a length set. Nothing here is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, load_cluster, simulate_plan
from mindspeed_cp.cli.lengths import draw_batches
from mindspeed_cp.report.files import check_output_path

CONTEXTS = [2**15, 2**16, 2**17, 2**18, 2**20]
NODES = [1, 2, 4, 8, 16]
ATTENTION = AttentionConfig(heads=32, kv_heads=8, head_dim=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="a2")
    parser.add_argument(
        "--lengths", help="as for mindspeed-cp simulate: a set, such as wikipedia, or a file; default: one document"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of a row")
    parser.add_argument("--png", default="scaling.png")
    options = parser.parse_args()
    try:
        check_output_path("--png", Path(options.png), [".png"])
        sweep(options)
    except ConfigError as error:
        parser.error(str(error))


def sweep(options: argparse.Namespace) -> None:
    """Simulates, prints and draws."""
    cluster = load_cluster(options.cluster)
    figure, (times, shares) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for context in options.contexts:
        batch = draw_batches(options.lengths, context, 1, seed=0)[0] if options.lengths else Documents([context])
        seconds, busy = [], []
        for nodes in NODES:
            topology = Topology(nodes, cluster.ranks_per_node, options.cluster)
            plan = build_plan(batch, topology, ATTENTION, "hierarchical")
            made = simulate_plan(plan, cluster)
            seconds.append(1e3 * made.total)
            busy.append(float((made.compute + made.linear).mean()) / made.total)
            print(f"{context >> 10:5}K on {nodes:2} nodes: {1e3 * made.total:9.2f} ms a layer, {busy[-1]:.0%} busy")
        times.plot(NODES, seconds, marker="o", label=f"{context >> 10}K")
        shares.plot(NODES, busy, marker="o", label=f"{context >> 10}K")
    times.set(xscale="log", yscale="log", xlabel="nodes", ylabel="ms a layer, modelled", title="time")
    shares.set(xscale="log", ylim=(0, 1), xlabel="nodes", ylabel="mean share of time computing", title="devices in use")
    for axes in (times, shares):
        axes.set_xticks(NODES, [str(n) for n in NODES], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    times.legend(title="context")
    what = options.lengths or "one document"
    figure.suptitle(f"{what}, {cluster.ranks_per_node} ranks a node of {cluster.name}, hierarchical: modelled")
    figure.savefig(options.png, dpi=120)


if __name__ == "__main__":
    main()
