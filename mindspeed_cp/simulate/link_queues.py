"""Queues of a cluster's links: in-node links or ports, and NICs, which ranks may share.

A link serves messages in the order of steps, and within a step in the order in which both ends have posted them. The
`sharing` mode says how the sender's and the receiver's link of a message depend on each other:

* "fair": they are independent. A message has arrived when both links have served it, and a message of a later step may
  use a gap in which a link was idle. This models links on which messages advance together in small packets (NVLink,
  HCCS, RDMA): a sender whose receiver is busy continues with other receivers. Every link finishes all of its bytes
  when it would with fair shares; a single message may be early.
* "fifo": the receiver's link may begin with a message when the sender's link has begun. A message that has left the
  sender waits at a busy receiver, so that senders that start with the same receiver delay each other. This models
  large TCP windows, as in the emulated cluster of `benchmarks/cluster`.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.runs import group_starts

#: Valid sharing modes.
LINK_SHARING = ("fair", "fifo")


class LinkQueues:
    """Links of some nodes and the times at which they are in use.

    Args:
        cluster: speeds and latencies.
        nodes: number of nodes, of `cluster.ranks_per_node` ranks each.
        sharing: "fair" or "fifo".

    Attributes:
        kind_of_link: "out", "in", "nic out", "nic in" or "pair" for each link, [links].
        first_of_kind: index of the first link of each kind.
        free_at: seconds from which each link is free, fp64 [links].
        idle_gap: (begin, end) of the last gap in which each link was idle, fp64 [links, 2].
        busy_seconds: seconds that each link has served, fp64 [links].

    Raises:
        ConfigError: `sharing` is invalid.
    """

    def __init__(self, cluster: Cluster, nodes: int, sharing: str = "fair") -> None:
        if sharing not in LINK_SHARING:
            raise ConfigError(f"sharing is {sharing!r}; valid: {', '.join(LINK_SHARING)}")
        self.sharing = sharing
        self.cluster, self.nodes, self.ranks_per_node = cluster, nodes, cluster.ranks_per_node
        ranks, nics = nodes * self.ranks_per_node, nodes * cluster.nics_per_node
        pairs = ranks * self.ranks_per_node if cluster.fabric == "mesh" else 0
        counts = {"out": ranks, "in": ranks, "nic out": nics, "nic in": nics, "pair": pairs}
        rates = [cluster.effective_rank] * 2 + [cluster.effective_nic] * 2 + [cluster.effective_pair]
        ends = np.cumsum(list(counts.values()))
        self.first_of_kind = dict(zip(counts, [0, *ends[:-1].tolist()], strict=True))
        self.kind_of_link = np.repeat(list(counts), list(counts.values()))
        self.rate = np.repeat(np.array(rates), list(counts.values()))
        self.free_at = np.zeros(len(self.rate))
        self.idle_gap = np.zeros((len(self.rate), 2))
        self.busy_seconds = np.zeros(len(self.rate))

    def serve(
        self, src: np.ndarray, dst: np.ndarray, size: np.ndarray, posted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return when each message begins to travel and when it has arrived, fp64 [messages] each.

        Args:
            src, dst: ranks.
            size: bytes.
            posted: seconds; messages with the same link and time are served in the order given.
        """
        cluster, first = self.cluster, self.first_of_kind
        in_node = src // self.ranks_per_node == dst // self.ranks_per_node
        src_link = np.where(in_node, first["out"] + src, first["nic out"] + cluster.nic_of(src))
        dst_link = np.where(in_node, first["in"] + dst, first["nic in"] + cluster.nic_of(dst))
        begin, sent = self._pass(src_link, size, posted)
        ready = begin if self.sharing == "fifo" else posted
        if cluster.fabric == "mesh":  # the pair's own link, beside the limit on the sum of a rank's links
            local = np.flatnonzero(in_node)
            pair_link = first["pair"] + src[local] * self.ranks_per_node + dst[local] % self.ranks_per_node
            begin[local], passed = self._pass(pair_link, size[local], posted[local])
            sent[local] = np.maximum(sent[local], passed)
            ready = np.where(in_node, posted, ready)
        _, received = self._pass(dst_link, size, ready)
        latency = np.where(in_node, cluster.in_node_latency, cluster.network_latency)
        return begin, np.maximum(sent, received) + latency

    def _pass(self, link: np.ndarray, size: np.ndarray, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when each message begins to pass its link and when it has passed."""
        order = np.lexsort((ready, link))  # stable
        link, ready = link[order], ready[order]
        seconds = size[order] / self.rate[link]
        self.busy_seconds += np.bincount(link, seconds, len(self.busy_seconds))
        first = group_starts(link)
        count = np.diff(np.append(first, len(link)))
        most_first = np.argsort(-count, kind="stable")
        first, count = first[most_first], count[most_first]
        begun, ended = np.empty(len(link)), np.empty(len(link))
        used = link[first]
        free, gap = self.free_at[used], self.idle_gap[used]
        # Serve the k-th message of all links at once: of the first `active` links, which have more than k messages.
        active_links = np.searchsorted(-count, -np.arange(count.max(initial=0)), "left")
        for k, active in enumerate(active_links.tolist()):
            message = first[:active] + k
            free_before = free[:active]
            begin = np.maximum(free_before, ready[message])
            begin_in_gap = np.maximum(gap[:active, 0], ready[message])
            fits = begin_in_gap + seconds[message] <= gap[:active, 1]
            new_gap = begin > free_before
            begun[message] = np.where(fits, begin_in_gap, begin)
            ended[message] = begun[message] + seconds[message]
            if self.sharing == "fair":
                gap[:active, 0] = np.where(fits, ended[message], np.where(new_gap, free_before, gap[:active, 0]))
                gap[:active, 1] = np.where(~fits & new_gap, begin, gap[:active, 1])
            free[:active] = np.where(fits, free_before, ended[message])
        self.free_at[used], self.idle_gap[used] = free, gap
        begin, end = np.empty(len(link)), np.empty(len(link))
        begin[order], end[order] = begun, ended
        return begin, end
