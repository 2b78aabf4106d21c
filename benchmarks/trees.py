"""Trees of documents against their trajectories, flat: pairs, balance, modelled layers, and attention on this host.

    python -m benchmarks.trees [--ranks 8] [--nodes 1] [--clusters a2 a3] [--seed 0] [--shrink 8] [--repeat 3]
                               [--heads 2] [--json FILE]

Five batches: three of answers sampled for prompts (GRPO's shape), agents' traces, and many tiny prompts. "Flat" is
every trajectory as a document of its own. Plans are those of `algorithm: hierarchical` without options.

Pairs are visible (query, key) pairs that the plan's tiles compute, over those that the trees need at least. Busiest is
the rank with most tokens, or most pairs, over the mean. Modelled: a layer of 32 heads, 8 kv heads of 128 channels by
the project's simulator, of the tree over all-gathered keys, and flat over the tree. Host: forward and backward of
attention on --heads heads of 64 channels, all ranks in this process on one thread, lengths divided by --shrink (not
those of the tiny prompts); tree and flat take turns, medians of --repeat; the saving in time over the saving in pairs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np
import torch

from benchmarks.arguments import Arguments, natural, new_file, positive
from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan, verify_plan
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.engine import attend_in_process
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.problem import document_pairs
from mindspeed_cp.simulate.simulator import simulate_plan

#: Batches whose median document is shorter are not shrunk.
SHORT = 64

ATTENTION = AttentionConfig(heads=32, kv_heads=8, head_dim=128)


@dataclass(frozen=True)
class Row:
    """Figures of one batch; ratios as in the text of the module.

    Attributes:
        batch: name of the batch.
        documents, tokens, flat_tokens: of the trees, and of the trajectories.
        pairs: visible pairs of the trees, over those of the trajectories.
        computed: pairs that the plan computes, over visible ones.
        busiest_tokens, busiest_pairs: busiest rank over the mean.
        modelled: by cluster, (layer over one with all-gathered keys, flat layer over the tree's).
        host: seconds of the tree, seconds flat, saving in time over saving in pairs.
    """

    batch: str
    documents: int
    tokens: int
    flat_tokens: int
    pairs: float
    computed: float
    busiest_tokens: float
    busiest_pairs: float
    modelled: dict[str, tuple[float, float]]
    host: tuple[float, float, float]


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--clusters", nargs="+", default=["a2", "a3"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=positive, default=8, help="lengths on this host are divided by it")
    parser.add_argument("--repeat", type=positive, default=3)
    parser.add_argument("--heads", type=natural, default=2, help="heads on this host; 0: not timed")
    parser.add_argument("--json", type=new_file, help="write all figures to this file")
    options = parser.parse_args()
    if options.ranks % options.nodes:
        parser.error(f"--nodes is {options.nodes}; valid: a divisor of {options.ranks} ranks")
    torch.set_num_threads(1)
    print(f"{options.ranks} ranks on {options.nodes} node(s), seed {options.seed}; modelled on {options.clusters}")
    heads = [f"{name}: {what}" for name in options.clusters for what in ("/all-gather", "flat/tree")]
    print(
        f"{'batch':36}{'docs':>6}{'tokens':>9}{'of flat':>8}{'pairs of flat':>14}{'computed':>9}{'busiest tokens':>15}"
        f"{'pairs':>7}" + "".join(f"{head:>17}" for head in heads) + f"{'host s, tree':>13}{'flat':>8}{'of pairs':>9}"
    )
    rows = []
    try:
        for name, documents in batches(options.seed).items():
            small = batches(options.seed, options.shrink)[name]
            rows.append(measure(name, documents, small, options))
            print_row(rows[-1])
    except ConfigError as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


def batches(seed: int, shrink: int = 1) -> dict[str, Documents]:
    """Return the five batches; lengths are divided by `shrink`."""
    rng = np.random.default_rng(seed)
    drawn = {
        "16 prompts of 1k, 8 answers of 2k": answers(rng, 16, 8, 1024, 2048),
        "4 prompts of 8k, 16 answers of 1k": answers(rng, 4, 16, 8192, 1024),
        "1 prompt of 32k, 32 answers of 512": answers(rng, 1, 32, 32768, 512),
        "4 agents' traces, 6 levels": traces(rng, 4, 6),
        "200 prompts of 50, 8 answers of 12": answers(rng, 200, 8, 50, 12),
    }
    return {name: Documents(_shrunk(lengths, shrink), parents) for name, (lengths, parents) in drawn.items()}


def _shrunk(lengths: list[int], shrink: int) -> list[int]:
    """Divide lengths; those of batches of tiny documents stay as they are."""
    return lengths if np.median(lengths) < SHORT else [max(1, length // shrink) for length in lengths]


def answers(rng: np.random.Generator, prompts: int, each: int, prompt: int, answer: int) -> tuple[list[int], list[int]]:
    """Draw lengths and parents of prompts, half to twice `prompt` tokens, and log-normal answers to each."""
    lengths: list[int] = []
    parents: list[int] = []
    for _ in range(prompts):
        root = len(lengths)
        lengths.append(int(rng.integers(prompt // 2, prompt * 2)))
        lengths += [int(min(answer * 4, max(1, rng.lognormal(np.log(answer), 0.8)))) for _ in range(each)]
        parents += [-1, *[root] * each]
    return lengths, parents


def traces(rng: np.random.Generator, agents: int, levels: int) -> tuple[list[int], list[int]]:
    """Draw lengths and parents of agents' traces: turns of 200 to 3,000 tokens, each continued by one to three."""
    lengths: list[int] = []
    parents: list[int] = []

    def grow(parent: int, level: int) -> None:
        turn = len(lengths)
        lengths.append(int(rng.integers(200, 3000)))
        parents.append(parent)
        for _ in range(int(rng.choice([1, 2, 3], p=[0.4, 0.4, 0.2])) if level < levels else 0):
            grow(turn, level + 1)

    for _ in range(agents):
        grow(-1, 1)
    return lengths, parents


def flattened(documents: Documents) -> Documents:
    """Return every trajectory, from the root to a leaf, as a document of its own."""
    trees = documents.trees
    assert trees is not None
    return Documents([int(documents.lengths[trees.path(leaf)].sum()) for leaf in trees.leaves.tolist()])


def measure(name: str, documents: Documents, small: Documents, options: argparse.Namespace) -> Row:
    """Measure one batch; `small` is its shrunk form."""
    flat = flattened(documents)
    needed, of_flat = (float(document_pairs(x, x, ATTENTION).sum()) for x in (documents, flat))
    modelled = {}
    for cluster in options.clusters:
        topology = Topology(options.nodes, options.ranks // options.nodes, cluster)
        tree = build_plan(documents, topology, ATTENTION, "hierarchical")
        gathered = build_plan(documents, topology, ATTENTION, "all_gather")
        seconds = [layer_seconds(plan, cluster, options) for plan in (tree, gathered)]
        seconds.append(layer_seconds(build_plan(flat, topology, ATTENTION, "hierarchical"), cluster, options))
        modelled[cluster] = seconds[0] / seconds[1], seconds[2] / seconds[0]
    plan = build_plan(documents, Topology(options.nodes, options.ranks // options.nodes), ATTENTION, "hierarchical")
    verify_plan(plan)
    work, rows = plan.work().sum(1), plan.layout.token_counts
    return Row(
        batch=name,
        documents=len(documents),
        tokens=documents.tokens,
        flat_tokens=flat.tokens,
        pairs=needed / of_flat,
        computed=float(work.sum()) / ATTENTION.heads / needed,
        busiest_tokens=float(rows.max() / rows.mean()),
        busiest_pairs=float(work.max() / work.mean()),
        modelled=modelled,
        host=host_seconds(small, options) if options.heads else (0.0, 0.0, 0.0),
    )


def layer_seconds(plan: Plan, cluster: str, options: argparse.Namespace) -> float:
    """Return the modelled seconds of a layer, forward and backward."""
    return simulate_plan(plan, load_cluster(cluster).with_ranks(options.ranks // options.nodes)).total


def host_seconds(documents: Documents, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return the seconds of attention of the tree and flat, and the saving in time over that in pairs."""
    attention = AttentionConfig(options.heads, options.heads, 64)
    topology, flat = Topology(options.nodes, options.ranks // options.nodes), flattened(documents)
    runs = []
    for batch in (documents, flat):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(batch.tokens, options.heads, 64, generator=generator) for _ in range(4)]
        runs.append((build_plan(batch, topology, attention, "hierarchical"), inputs))
    seconds: list[list[float]] = [[], []]
    for _ in range(1 + options.repeat):  # the first warms up
        for times, (plan, inputs) in zip(seconds, runs, strict=True):
            begin = perf_counter()
            attend_in_process(plan, *inputs)
            times.append(perf_counter() - begin)
    tree, of_flat = (float(np.median(times[1:])) for times in seconds)
    pairs = [float(document_pairs(x, x, attention).sum()) for x in (documents, flat)]
    return tree, of_flat, (of_flat / tree) / (pairs[1] / pairs[0])


def print_row(row: Row) -> None:
    """Print one line of the table."""
    print(
        f"{row.batch:36}{row.documents:6}{row.tokens:9,}{row.tokens / row.flat_tokens:8.2f}{row.pairs:14.3f}"
        f"{row.computed:9.3f}{row.busiest_tokens:15.3f}{row.busiest_pairs:7.3f}"
        + "".join(f"{ratio:17.3f}" for ratios in row.modelled.values() for ratio in ratios)
        + f"{row.host[0]:13.2f}{row.host[1]:8.2f}{row.host[2]:9.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
