"""Bytes and seconds of multi-head latent attention in which latents travel, over those in which keys and values do.

    python -m benchmarks.latents [--tokens 32768 131072] [--tensor-parallel 1 8] [--algorithms ring direct]
        [--clusters a2:2 a3:1] [--measure] [--repeats 5]

Sizes are DeepSeek-V3's: 128 heads of 192 channels of q and k and 128 of v, a latent of 512 channels and 64 that all
heads share. The first table is modelled, for one document over all ranks of so many nodes of a cluster (a2:2 is two
nodes of A2): bytes that all ranks send in the forward and the backward, milliseconds of the layer with and without
latents, and what `latents: auto` takes.

--measure runs all ranks of a plan in this process on the CPU, with 8 heads in fp32: CPU seconds of forward and backward
with latents over those without, the expansion of each rank's own rows included in both. Nothing travels over a link
there, so that the figure is the price of the work that readers repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster.cluster import load_cluster
from mindspeed_cp.engine import attend_all_ranks
from mindspeed_cp.engine.latent_attention import expanded_rows
from mindspeed_cp.plan.transfers import traffic

HEADS, WIDTH, WIDTH_V, LATENT = 128, 192, 128, (512, 64)


def deepseek_attention(heads: int) -> AttentionConfig:
    """Return DeepSeek-V3's attention with so many heads."""
    return AttentionConfig(heads, head_dim=WIDTH, head_dim_v=WIDTH_V, latent=LATENT)


def modelled_rows(
    tokens: Sequence[int], tensor_parallel: Sequence[int], algorithms: Sequence[str], clusters: Sequence[str]
) -> list[list[str]]:
    """Return the cells of the modelled table, row by row."""
    rows = []
    for shards in tensor_parallel:
        for name, _, nodes in (cluster.partition(":") for cluster in clusters):
            cluster = load_cluster(name)
            topology = Topology(int(nodes or 1), cluster.ranks_per_node, name)
            for count in tokens:
                for algorithm in algorithms:
                    plans = {
                        latents: build_plan(
                            Documents([count]),
                            topology,
                            deepseek_attention(HEADS // shards),
                            algorithm,
                            latents=latents,
                        )
                        for latents in ("off", "on", "auto")
                    }
                    sent = {key: float(traffic(plan)["total"].sum()) for key, plan in plans.items()}
                    layer = {key: 1e3 * simulate_plan(plan, cluster).total for key, plan in plans.items()}
                    chosen = "latents" if plans["auto"].attention.latent is not None else "keys, values"
                    rows.append([
                        f"{shards}", f"{topology.ranks} ({name})", f"{count // 1024}k", algorithm,
                        f"{sent['off'] / 2**30:.2f}", f"{sent['on'] / sent['off']:.3f}",
                        f"{layer['off']:.1f}", f"{layer['on']:.1f}", chosen, f"{layer['auto'] / layer['off']:.2f}",
                    ])  # fmt: skip
    return rows


def measured_ratio(plan: Plan, without: Plan, repeats: int) -> float:
    """Return the median CPU seconds of forward and backward with latents over those without, of all ranks."""
    attention, tokens = plan.attention, plan.documents.tokens
    latent, shared = LATENT
    torch.manual_seed(0)
    inputs = [torch.randn(tokens, attention.heads, WIDTH), torch.randn(tokens, shared), torch.randn(tokens, latent)]
    kv_up = (torch.randn(attention.heads * (WIDTH - shared + WIDTH_V), latent) / latent**0.5).requires_grad_()
    shards = [[plan.layout.shard(x, rank).requires_grad_() for rank in range(plan.ranks)] for x in inputs]

    def with_latents() -> Sequence[torch.Tensor]:
        keys, values = ([x[:, None] for x in xs] for xs in shards[1:])
        return attend_all_ranks(shards[0], keys, values, plan, kv_up=kv_up)

    def with_keys() -> Sequence[torch.Tensor]:
        expanded = [expanded_rows(*rows, kv_up, attention) for rows in zip(*shards[1:], strict=True)]
        return attend_all_ranks(shards[0], [k for k, _ in expanded], [v for _, v in expanded], without)

    seconds: dict[Callable[[], Sequence[torch.Tensor]], list[float]] = {with_latents: [], with_keys: []}
    for _ in range(repeats + 1):
        for run, times in seconds.items():
            begin = time.process_time()
            out = run()
            torch.autograd.grad(out, [kv_up, *(x for xs in shards for x in xs)], [torch.ones_like(x) for x in out])
            times.append(time.process_time() - begin)
    own, other = (statistics.median(times[1:]) for times in seconds.values())
    return own / other


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    for cells in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--algorithms", nargs="+", default=["ring", "direct", "all_gather", "hierarchical"])
    parser.add_argument("--clusters", nargs="+", default=["a2:2", "a3:1"])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print_table(
        ["TP", "CP", "tokens", "algorithm", "GiB, keys", "bytes, ratio", "ms, keys", "ms, latents", "auto", "layer"],
        modelled_rows(given.tokens, given.tensor_parallel, given.algorithms, given.clusters),
    )
    if given.measure:
        rows = []
        for tokens in (1024, 4096):
            plans = [
                build_plan(Documents([tokens]), Topology(1, 4), deepseek_attention(8), "ring", latents=latents)
                for latents in ("on", "off")
            ]
            rows.append([f"{tokens}", "4", f"{measured_ratio(plans[0], plans[1], given.repeats):.2f}"])
        print()
        print_table(["tokens", "ranks", "CPU seconds, ratio"], rows)


if __name__ == "__main__":
    main()
