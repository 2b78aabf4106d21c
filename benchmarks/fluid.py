"""The simulator's times against a fluid simulation, in which messages share links max-min fairly.

    python -m benchmarks.fluid [--clusters a2 a800 h800 a3 atlas350] [--ranks 16 32] [--kv-heads 8 32]
                               [--lengths wikipedia prolong] [--algorithms ring direct ...] [--seeds 0]
                               [--tokens 4096]

Prints time of a layer by the simulator over that of the fluid simulation: below 1 the simulator is early. The fluid
simulation is event-driven: between two events every message that is under way has a constant rate, and the rates are
max-min fair over all links (progressive filling): in-node ports or pair links, limits of a rank's sum, and NICs, which
ranks may share. All else is as in :mod:`mindspeed_cp.simulate.simulator`: kernels, steps, launches in order, latencies.
Posting takes no time in both. 32 heads of 128 channels, and so many tokens for each rank.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.arguments import Arguments, positive
from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, simulate_plan
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.transfers import PAIR_STREAMS, launch_numbers
from mindspeed_cp.simulate.timeline import Timeline

ALGORITHMS = (*("ring", "direct", "direct:prefetch=2", "hybrid", "ulysses", "double_ring", "hierarchical"),)
TOLERANCE = 1e-9  # relative: shares that are equal, and bytes that are through


def fair_rates(links: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Return max-min fair rates of flows, bytes/second, fp64 [flows].

    Progressive filling. A link whose share (capacity that is left, over its flows without a rate) is the least on the
    way of each of its flows fills first, whatever happens on links that those flows do not use.

    Args:
        links: links on the way of each flow, int64 [flows, 3].
        capacity: bytes/second of each link, fp64 [links].
    """
    rates, left = np.zeros(len(links)), capacity.copy()
    waiting = np.arange(len(links))
    while len(waiting):
        used = links[waiting]
        flat = used.ravel()
        count = np.bincount(flat, minlength=len(left))
        share = (left / np.maximum(count, 1))[used]
        least = share.min(1)
        narrowest = np.bincount(flat, (share <= least[:, None] * (1 + TOLERANCE)).ravel(), len(left))
        full = (narrowest == count) & (count > 0)
        fixed = full[used].any(1)
        rates[waiting[fixed]] = least[fixed]
        left -= np.bincount(used[fixed].ravel(), np.repeat(least[fixed], used.shape[1]), len(left))
        np.maximum(left, 0, out=left)
        waiting = waiting[~fixed]
    return rates


class FluidLinks:
    """Capacities of a cluster's links, and the links on the way of messages.

    Args:
        cluster: speeds; its `ranks_per_node` are in use.
        nodes: number of nodes.

    Attributes:
        capacity: bytes/second, fp64 [links]: ports out and in (mesh: limits of a rank's sum), NICs out and in, pair
            links, and one link without a limit.
    """

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self.cluster = cluster
        self.ranks = nodes * cluster.ranks_per_node
        self.nics = nodes * cluster.nics_per_node
        pairs = self.ranks**2 if cluster.fabric == "mesh" else 0
        rates = [cluster.effective_rank, cluster.effective_nic, cluster.effective_pair, np.inf]
        self.capacity = np.repeat(rates, [2 * self.ranks, 2 * self.nics, pairs, 1])

    def way(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return the links that messages take, int64 [messages, 3]."""
        cluster, ranks = self.cluster, self.ranks
        in_node = src // cluster.ranks_per_node == dst // cluster.ranks_per_node
        nics = 2 * ranks + cluster.nic_of(np.stack([src, dst]))
        out = np.where(in_node, src, nics[0])
        into = np.where(in_node, ranks + dst, nics[1] + self.nics)
        free = len(self.capacity) - 1
        pair = 2 * (ranks + self.nics) + src * ranks + dst
        return np.stack([out, into, np.where(in_node & (cluster.fabric == "mesh"), pair, free)], 1)

    def latency(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Return the latencies of messages, seconds, fp64 [messages]."""
        in_node = src // self.cluster.ranks_per_node == dst // self.cluster.ranks_per_node
        return np.where(in_node, self.cluster.in_node_latency, self.cluster.network_latency)


class FluidDirection:
    """One direction of a program: ranks that begin steps, and messages under way.

    Args:
        kernels: seconds that each rank computes in each step, fp64 [ranks, steps].
        table: records of dtype TRANSFER, sorted by `start`.
        links: links of the cluster.
        begin: seconds at which each rank begins, fp64 [ranks].
        in_order: a rank's launches are in order, as in :func:`mindspeed_cp.simulate.simulator.simulate_direction`.

    Attributes:
        end: seconds at which each rank's steps end, fp64 [ranks, steps].
        message_end: seconds at which each message has arrived, fp64 [messages].
    """

    def __init__(
        self, kernels: np.ndarray, table: np.ndarray, links: FluidLinks, begin: np.ndarray, in_order: bool = True
    ) -> None:
        ranks, steps = kernels.shape
        self.kernels, self.links = kernels, links
        self.src, self.dst, self.done = (table[name].copy() for name in ("src", "dst", "done"))
        self.left = table["bytes"].copy()  # of each message
        self.tolerance = TOLERANCE * np.maximum(self.left, 1)
        self.way = links.way(self.src, self.dst)
        self.latency = links.latency(self.src, self.dst)
        self.start = table["start"].copy()
        self.launch = launch_numbers(table) if in_order else np.zeros(len(table), np.int64)
        self.unfinished = np.zeros((ranks, int(self.launch.max(initial=0)) + 1), np.int64)  # messages of launches
        self._count(self.unfinished, self.launch, np.arange(len(table)), 1)
        self.arrivals: list[tuple[float, int]] = []  # and message
        self.end, self.message_end = np.full((ranks, steps), np.nan), np.full(len(table), np.nan)
        self.earliest = np.zeros((ranks, steps))  # at which a step may end, by what is known so far
        self.due = np.zeros((ranks, steps), np.int64)  # messages that have not arrived
        self._count(self.due, self.done, np.arange(len(table)), 1)
        self.begun = np.zeros((ranks, steps), bool)
        self.unposted = np.arange(len(table))
        self.under_way = np.zeros(0, np.int64)
        self.begins = [(float(seconds), rank, 0) for rank, seconds in enumerate(begin)]  # and step
        heapq.heapify(self.begins)

    def run(self) -> FluidDirection:
        """Simulate all steps."""
        now, rates = 0.0, np.zeros(0)
        while len(self.under_way) or self.begins or self.arrivals:
            span = (self.left[self.under_way] / rates).min() if len(self.under_way) else np.inf
            until = min(now + span, *(events[0][0] for events in (self.begins, self.arrivals) if events), np.inf)
            self.left[self.under_way] -= rates * (until - now)
            now = until
            while self.begins and self.begins[0][0] <= now:
                self._begin_steps(now)
            while self.arrivals and self.arrivals[0][0] <= now:
                self._count(self.unfinished, self.launch, np.array([heapq.heappop(self.arrivals)[1]]), -1)
            self._post()
            through = self.left[self.under_way] <= self.tolerance[self.under_way]
            if through.any():
                self._arrive(self.under_way[through], now)
                self.under_way = self.under_way[~through]
            rates = fair_rates(self.way[self.under_way], self.links.capacity)
        return self

    def _count(self, counts: np.ndarray, column: np.ndarray, messages: np.ndarray, change: int) -> None:
        """Add messages to, or take them from, those that both ends have in each column."""
        for rank in (self.src, self.dst):
            np.add.at(counts, (rank[messages], column[messages]), change)

    def _begin_steps(self, now: float) -> None:
        """Begin the steps that begin now, and post their messages."""
        steps: dict[int, list[int]] = {}
        while self.begins and self.begins[0][0] <= now:
            _, rank, step = heapq.heappop(self.begins)
            steps.setdefault(step, []).append(rank)
        for step, ranks in steps.items():
            self.begun[ranks, step] = True
            self.earliest[ranks, step] = np.maximum(self.earliest[ranks, step], now + self.kernels[ranks, step])
            self._end_steps(np.array(ranks), step)

    def _post(self) -> None:
        """Send the messages that may begin."""
        messages, head = self.unposted, (self.unfinished > 0).argmax(1)  # the launch that a rank is at
        may_begin = np.ones(len(messages), bool)
        for rank in (self.src[messages], self.dst[messages]):
            may_begin &= self.begun[rank, self.start[messages]] & (head[rank] == self.launch[messages])
        self.unposted = messages[~may_begin]
        self.under_way = np.concatenate([self.under_way, messages[may_begin]])

    def _arrive(self, messages: np.ndarray, now: float) -> None:
        self.message_end[messages] = arrived = now + self.latency[messages]
        done = self.done[messages]
        for rank in (self.src, self.dst):
            np.maximum.at(self.earliest, (rank[messages], done), arrived)
        self._count(self.due, self.done, messages, -1)
        for event in zip(arrived.tolist(), messages.tolist(), strict=True):
            heapq.heappush(self.arrivals, event)
        for step in np.unique(done).tolist():
            self._end_steps(np.flatnonzero(self.begun[:, step]), step)

    def _end_steps(self, ranks: np.ndarray, step: int) -> None:
        """Note when the step of ranks ends for which all is known: kernels run, and no message is due any more."""
        for rank in ranks[(self.due[ranks, step] == 0) & np.isnan(self.end[ranks, step])].tolist():
            self.end[rank, step] = end = float(self.earliest[rank, step])
            if step + 1 < self.end.shape[1]:
                heapq.heappush(self.begins, (end, rank, step + 1))


def fluid_ends(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Return when each rank's steps end, forward and backward, fp64 [ranks, steps] each, by the fluid simulation.

    Args:
        timeline: as simulated: kernels, linear layers and messages are taken from it, and no times of messages.
    """
    links = FluidLinks(timeline.cluster, timeline.plan.topology.nodes)
    out, begin = [], np.zeros(timeline.ranks)
    rest = timeline.steps_backward[:, 0, 0] - timeline.steps_forward[:, -1, 2]  # linear layers between the directions
    for direction in ("forward", "backward"):
        steps = timeline.steps(direction)
        kernels, in_order = steps[:, :, 1] - steps[:, :, 0], timeline.plan.algorithm not in PAIR_STREAMS
        made = FluidDirection(kernels, timeline.transfers(direction), links, begin, in_order).run()
        out.append(made.end)
        begin = made.end[:, -1] + rest
    return out[0], out[1]


def ratio(timeline: Timeline) -> float:
    """Return time of a layer by the simulator over that of the fluid simulation."""
    return timeline.total / float(fluid_ends(timeline)[1][:, -1].max())


def build(label: str, documents: Documents, topology: Topology, attention: AttentionConfig) -> Timeline:
    """Plan and simulate an algorithm with options, such as "direct:prefetch=2"."""
    name, *options = label.split(":")
    values: dict[str, object] = dict(option.split("=") for option in options)
    values |= {key: int(value) for key, value in values.items() if str(value).isdigit()}
    plan = build_plan(documents, topology, attention, name, **values)
    return simulate_plan(plan, load_cluster(str(topology.cluster)).with_values(posting=0.0))


def cases(options: argparse.Namespace, cluster: str) -> Iterator[tuple[Documents, Topology, AttentionConfig]]:
    """Yield the problems of a cluster."""
    ranks_per_node = load_cluster(cluster).ranks_per_node
    for ranks in options.ranks:
        topology = Topology(max(1, ranks // ranks_per_node), min(ranks, ranks_per_node), cluster)
        for kv_heads in options.kv_heads:
            for name in options.lengths:
                for seed in options.seeds:
                    documents = Documents(sample_batch(name, ranks * options.tokens, seed))
                    yield documents, topology, AttentionConfig(32, kv_heads, 128)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--clusters", nargs="+", default=["a2", "a800", "h800", "a3", "atlas350"])
    parser.add_argument("--ranks", type=positive, nargs="+", default=[16, 32])
    parser.add_argument("--kv-heads", type=positive, nargs="+", default=[8, 32])
    parser.add_argument("--lengths", nargs="+", default=["wikipedia", "prolong"])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of each rank")
    options = parser.parse_args()
    print(f"{'cluster':10}{'algorithm':40}{'mean':>8}{'least':>8}{'most':>8}{'cases':>7}{'host s':>8}")
    for cluster in options.clusters:
        for label in options.algorithms:
            begin, ratios = time.perf_counter(), []
            for problem in cases(options, cluster):
                try:
                    ratios.append(ratio(build(label, *problem)))
                except ConfigError:  # an algorithm that these ranks or heads do not allow
                    continue
            if ratios:
                figures = "".join(f"{value:8.3f}" for value in (np.mean(ratios), min(ratios), max(ratios)))
                seconds = time.perf_counter() - begin
                print(f"{cluster:10}{label:40}{figures}{len(ratios):7}{seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
