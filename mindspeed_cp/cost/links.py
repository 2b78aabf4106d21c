"""Links of a cluster as queues: in-node links or ports, and NICs, which ranks may share.

Each link serves messages in the order of turns, within a turn in the order in which both ends have posted them. How a
message's two links, the sender's and the receiver's, depend on each other is chosen:

* "fair": they do not. A message has arrived when both have served it, and one of a later turn may pass while the link
  was idle. That is what links come to whose messages travel side by side in small packets, as with NVLink, HCCS and
  RDMA: a sender with one busy receiver goes on with others. Every link is done with all its bytes when it would be with
  fair shares; a single message of several may be early.
* "fifo": the receiver's link may begin with a message when the sender's has. What has left the sender waits at a busy
  receiver: so many senders that begin with the same receiver hold each other up. That is what large TCP windows do, in
  the emulated cluster of `benchmarks/cluster` for instance.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.errors import ConfigError

#: How the links of a message depend on each other.
SHARING = ("fair", "fifo")


class Links:
    """The links of some nodes, and how long each is taken.

    Args:
        cluster: what they can do.
        nodes: of `cluster.ranks_per_node` ranks.
        sharing: "fair" or "fifo".

    Raises:
        ConfigError: `sharing` is neither.
    """

    def __init__(self, cluster: Cluster, nodes: int, sharing: str = "fair") -> None:
        if sharing not in SHARING:
            raise ConfigError(f"sharing is {sharing!r}; valid: {', '.join(SHARING)}")
        self.sharing = sharing
        self.cluster, self.nodes, self.per = cluster, nodes, cluster.ranks_per_node
        ranks, nics = nodes * self.per, nodes * cluster.nics_per_node
        pairs = ranks * self.per if cluster.fabric == "mesh" else 0
        sizes = {"out": ranks, "in": ranks, "nic out": nics, "nic in": nics, "pair": pairs}
        rates = [cluster.effective_rank] * 2 + [cluster.effective_nic] * 2 + [cluster.effective_pair]
        ends = np.cumsum(list(sizes.values()))
        self.first = dict(zip(sizes, [0, *ends[:-1].tolist()], strict=True))
        self.names = np.repeat(list(sizes), list(sizes.values()))
        self.rate = np.repeat(np.array(rates), list(sizes.values()))
        self.free = np.zeros(len(self.rate))
        self.gap = np.zeros((len(self.rate), 2))  # when each link was idle last
        self.busy = np.zeros(len(self.rate))  # seconds that each link has served

    def serve(
        self, src: np.ndarray, dst: np.ndarray, size: np.ndarray, posted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """When each message begins to travel and has arrived, fp64 [messages] each.

        Args:
            src, dst: ranks.
            size: bytes.
            posted: seconds; messages of one link and time are served in the order given.
        """
        cluster, per, first = self.cluster, self.per, self.first
        near, nics = src // per == dst // per, cluster.nics_per_node
        leaves = np.where(near, first["out"] + src, first["nic out"] + src // per * nics + src % per * nics // per)
        enters = np.where(near, first["in"] + dst, first["nic in"] + dst // per * nics + dst % per * nics // per)
        begin, left = self._pass(leaves, size, posted)
        ready = begin if self.sharing == "fifo" else posted
        if cluster.fabric == "mesh":  # a link of its own; what its ranks' links carry together is limited beside it
            own = np.flatnonzero(near)
            pair = first["pair"] + src[own] * per + dst[own] % per
            begin[own], passed = self._pass(pair, size[own], posted[own])
            left[own] = np.maximum(left[own], passed)
            ready = np.where(near, posted, ready)
        _, entered = self._pass(enters, size, ready)
        latency = np.where(near, cluster.in_node_latency, cluster.network_latency)
        return begin, np.maximum(left, entered) + latency

    def _pass(self, link: np.ndarray, size: np.ndarray, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """When each message begins to pass its link, and has passed it."""
        order = np.lexsort((ready, link))  # stable
        link, ready = link[order], ready[order]
        takes = size[order] / self.rate[link]
        self.busy += np.bincount(link, takes, len(self.busy))
        first = np.flatnonzero(np.append(True, link[1:] != link[:-1])[: len(link)])
        count = np.diff(np.append(first, len(link)))
        longest = np.argsort(-count, kind="stable")
        first, count = first[longest], count[longest]
        begun, ended = np.empty(len(link)), np.empty(len(link))
        of = link[first]
        free, gap = self.free[of], self.gap[of]
        waiting = np.searchsorted(-count, -np.arange(count.max(initial=0)), "left")  # links with more than k messages
        for k, some in enumerate(waiting.tolist()):
            at = first[:some] + k
            was = free[:some]
            begin = np.maximum(was, ready[at])
            early = np.maximum(gap[:some, 0], ready[at])  # in the time that the link was idle, if it fits in there
            fits = early + takes[at] <= gap[:some, 1]
            idle = begin > was
            begun[at] = np.where(fits, early, begin)
            ended[at] = begun[at] + takes[at]
            if self.sharing == "fair":
                gap[:some, 0] = np.where(fits, ended[at], np.where(idle, was, gap[:some, 0]))
                gap[:some, 1] = np.where(~fits & idle, begin, gap[:some, 1])
            free[:some] = np.where(fits, was, ended[at])
        self.free[of], self.gap[of] = free, gap
        begin, end = np.empty(len(link)), np.empty(len(link))
        begin[order], end[order] = begun, ended
        return begin, end
