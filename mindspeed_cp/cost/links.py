"""Links of a cluster as queues: in-node links or ports, and NICs, which ranks may share.

Each link serves messages one after the other, in the order of turns, within a turn in the order in which both ends have
posted them. A message goes through the sender's link and the receiver's at once (cut-through): the receiver's may begin
with it when the sender's has, and neither is done before the other. What has left a sender waits at a receiver that
others keep busy, and the sender goes on: so many senders that begin with the same receiver hold each other up, as they
do on real networks. Fair shares of links would give the same busy times, and other times to single messages.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.cluster import Cluster


class Links:
    """The links of some nodes, and how long each is taken.

    Args:
        cluster: what they can do.
        nodes: of `cluster.ranks_per_node` ranks.
    """

    def __init__(self, cluster: Cluster, nodes: int) -> None:
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
        ready = begin
        if cluster.fabric == "mesh":  # a link of its own; what its ranks' links carry together is limited beside it
            own = np.flatnonzero(near)
            pair = first["pair"] + src[own] * per + dst[own] % per
            begin[own], passed = self._pass(pair, size[own], posted[own])
            left[own] = np.maximum(left[own], passed)
            ready = np.where(near, posted, begin)
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
        free = self.free[link[first]]
        waiting = np.searchsorted(-count, -np.arange(count.max(initial=0)), "left")  # links with more than k messages
        for k, some in enumerate(waiting.tolist()):
            at = first[:some] + k
            begun[at] = np.maximum(free[:some], ready[at])
            ended[at] = free[:some] = begun[at] + takes[at]
        self.free[link[first]] = free
        begin, end = np.empty(len(link)), np.empty(len(link))
        begin[order], end[order] = begun, ended
        return begin, end
