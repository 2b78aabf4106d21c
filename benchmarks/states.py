"""States of linear attention: borders and bytes by placement, by schedule and by heads, and a layer on this host.

    python -m benchmarks.states [--clusters a2 a3 h200] [--host] [--json FILE]

Layers have 32 heads of 128 x 128 (gated delta). One document: bytes of the busiest rank by every schedule, forward and
backward together, over those by heads.

Placements: packed rows of log-normal documents, median 4K and 32K, on 32 and 128 ranks of 8 a node. Borders are
segments that a state of another rank enters, of all ranks and of the one that has most; rows are those of a segment on
average. MiB: received by the busiest rank, forward and backward together, by the schedule that is chosen for the first
cluster, and by heads. Modelled: milliseconds of a layer's linear attention, forward and backward, by both
(`mindspeed_cp.simulate.states`).

--host: a contiguous row of 8K tokens and 4 heads on two ranks, in this process, one thread; CPU seconds of the busier
rank, and half of those of one rank with all rows over them, medians of three. Nothing is sent over wires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

import numpy as np
import torch
from torch.nn import functional

from benchmarks.arguments import Arguments, new_file
from mindspeed_cp import AttentionConfig, Documents, Layout, StateConfig, Topology, build_plan, build_state_plan
from mindspeed_cp.algorithms.states import SCHEDULES
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.engine import Stepping, linear_attention_in_process
from mindspeed_cp.layout import TOKEN_SPAN, contiguous, row_zigzag, zigzag
from mindspeed_cp.plan.states import StatePlan
from mindspeed_cp.simulate.states import simulate_states

LAYER = StateConfig("gated_delta", 32, 128)
ROWS = ((2**18, 32), (2**20, 32), (2**20, 128))  # tokens and ranks
MIB = 2**20


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--clusters", nargs="+", default=["a2", "a3", "h200"])
    parser.add_argument("--host", action="store_true", help="time a layer on this host")
    parser.add_argument("--json", type=new_file, help="write all figures to this file")
    options = parser.parse_args()
    rows = [*one_document(), *placements(options.clusters)]
    if options.host:
        rows += host()
    if options.json:
        options.json.write_text(json.dumps(rows))


def one_document() -> Iterator[dict[str, object]]:
    """Print and yield the bytes of one document by every schedule, over those by heads."""
    print(
        f"{'one document':14}{'ranks':>6}{'tokens':>9}{'heads MiB':>10}" + "".join(f"{name:>9}" for name in SCHEDULES)
    )
    for ranks in (8, 32):
        for tokens in (2**16, 2**17, 2**20):
            for name, make in (("contiguous", contiguous), ("zig-zag", zigzag)):
                layout = make(Documents([tokens]), ranks)
                received = {
                    schedule: float(simulate_states(plan_of(layout, "a2", schedule), "a2").received.max())
                    for schedule in SCHEDULES
                }
                shares = {schedule: size / received["heads"] for schedule, size in received.items()}
                print(f"{name:14}{ranks:6}{tokens:9}{received['heads'] / MIB:10.0f}"
                      + "".join(f"{share:9.3f}" for share in shares.values()))  # fmt: skip
                yield {"layout": name, "ranks": ranks, "tokens": tokens, "heads bytes": received["heads"], **shares}


def plan_of(layout: Layout, cluster: str, schedule: str = "auto") -> StatePlan:
    """Return the plan of a layer on nodes of 8 ranks."""
    nodes = max(1, layout.ranks // 8)
    return build_state_plan(layout, LAYER, Topology(nodes, layout.ranks // nodes, cluster), schedule)


def documents_of(tokens: int, median: int, seed: int = 0) -> Documents:
    """Draw a packed row of log-normal documents, the last one cut."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(int(rng.lognormal(np.log(median), 1.0)) + 1, tokens - sum(lengths)))
    return Documents(lengths)


def layouts_of(documents: Documents, ranks: int) -> dict[str, Layout]:
    """Return the placements that are compared."""
    topology, attention = Topology(ranks // 8, 8), AttentionConfig(32, 8, 128)
    return {
        "row in order": row_in_order(documents, ranks),
        "row zig-zag": row_zigzag(documents, ranks),
        "zig-zag": zigzag(documents, ranks),
        "hierarchical": build_plan(documents, topology, attention, "hierarchical").layout,
    }


def row_in_order(documents: Documents, ranks: int) -> Layout:
    """Cut the packed row into equal shares, across documents."""
    cuts = np.arange(ranks + 1) * documents.tokens // ranks
    edges = np.unique(np.concatenate([cuts, documents.offsets]))
    spans = np.empty(len(edges) - 1, TOKEN_SPAN)
    spans["start"], spans["stop"] = edges[:-1], edges[1:]
    spans["rank"] = np.searchsorted(cuts, edges[:-1], "right") - 1
    spans["doc"] = documents.document_of(edges[:-1])
    return Layout(documents, ranks, spans)


def placements(clusters: list[str]) -> Iterator[dict[str, object]]:
    """Print and yield borders, bytes and modelled times of packed rows by placement."""
    print(
        f"\n{'placement':14}{'tokens':>9}{'ranks':>6}{'median':>8}{'documents':>10}{'borders':>9}{'of rank':>8}"
        f"{'rows':>8}{'MiB':>8}{'heads':>8}" + "".join(f"{name + ' ms':>12}{'heads':>8}" for name in clusters)
    )
    for tokens, ranks in ROWS:
        for median in (2**12, 2**15):
            documents = documents_of(tokens, median)
            for name, layout in layouts_of(documents, ranks).items():
                plan, heads = plan_of(layout, clusters[0]), plan_of(layout, clusters[0], "heads")
                segments = plan.segments
                relay = plan if plan.schedule != "heads" else plan_of(layout, clusters[0], "relay")
                before = relay.segments["before"]
                enters = (before >= 0) & (relay.segments["rank"][before] != relay.segments["rank"])
                most = int(np.bincount(relay.segments["rank"][enters], minlength=ranks).max())
                received = [simulate_states(x, clusters[0]).received.max() / MIB for x in (plan, heads)]
                times = {}
                for cluster in clusters:
                    chosen = plan_of(layout, cluster)
                    times[cluster] = [simulate_states(x, load_cluster(cluster)).total * 1e3 for x in (chosen, heads)]
                print(f"{name:14}{tokens:9}{ranks:6}{median:8}{len(documents):10}{relay.borders:9}{most:8}"
                      f"{documents.tokens / len(segments):8.0f}{received[0]:8.0f}{received[1]:8.0f}"
                      + "".join(f"{a:12.2f}{b:8.2f}" for a, b in times.values()), plan.schedule)  # fmt: skip
                yield {"placement": name, "tokens": tokens, "ranks": ranks, "median": median, "borders": relay.borders,
                       "of rank": most, "received": received, "ms": times, "schedule": plan.schedule}  # fmt: skip


def host(tokens: int = 8192) -> Iterator[dict[str, object]]:
    """Print and yield the share of ideal that two ranks reach on this host."""
    torch.set_num_threads(1)
    print(f"\n{'host':14}{'one rank s':>11}{'busier of two':>14}{'of ideal':>9}")
    for kind in ("gated_delta", "kda", "mamba2"):
        state = StateConfig(kind, 4, 128)
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(tokens, 4, 128, generator=generator) for _ in range(4))
        gate = functional.logsigmoid(
            torch.randn(tokens, 4, *([128] if state.has_channel_gates else []), generator=generator) + 3
        )
        beta = torch.rand(tokens, 4, generator=generator)
        seconds = {}
        for ranks in (1, 2):
            plan = build_state_plan(contiguous(Documents([tokens]), ranks), state, schedule="relay")
            runs = []
            for _ in range(3):
                spent = np.zeros(ranks)

                @contextmanager
                def around(rank: int, spent: np.ndarray = spent) -> Iterator[None]:
                    begin = thread_time()
                    try:
                        yield
                    finally:
                        spent[rank] += thread_time() - begin

                rows = q, functional.normalize(k, dim=-1), v, gate, beta
                linear_attention_in_process(plan, *rows, dout, stepping=Stepping(around=around))
                runs.append(spent.max())
            seconds[ranks] = float(np.median(runs))
        share = seconds[1] / 2 / seconds[2]
        print(f"{kind:14}{seconds[1]:11.2f}{seconds[2]:14.2f}{share:9.2f}")
        yield {"kind": kind, "one rank": seconds[1], "busier of two": seconds[2], "of ideal": share}


if __name__ == "__main__":
    main()
