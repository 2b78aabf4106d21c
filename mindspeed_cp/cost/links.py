"""Links of a cluster as queues: in-node links or ports, and NICs, which ranks may share.

Each link serves messages one after the other, in the order of turns, within a turn in the order in which both ends have
posted them. A message passes all its links at once (cut-through) and has arrived when the slowest of them has served
it; another link does not wait for it meanwhile, which is what links that share fairly come to. All bytes of a link are
served by the same time as in fair shares; a single message of several at once may be earlier or later.
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
        message, link = self._links(src, dst)
        order = np.lexsort((posted[message], link))
        message, link = message[order], link[order]
        takes = size[message] / self.rate[link]
        self.busy += np.bincount(link, takes, len(self.busy))
        first = np.flatnonzero(np.append(True, link[1:] != link[:-1])[: len(link)])
        count = np.diff(np.append(first, len(link)))
        longest = np.argsort(-count, kind="stable")
        first, count = first[longest], count[longest]
        begun, ended = np.empty(len(link)), np.empty(len(link))
        free, ready = self.free[link[first]], posted[message]
        waiting = np.searchsorted(-count, -np.arange(count.max(initial=0)), "left")  # links with more than k messages
        for k, some in enumerate(waiting.tolist()):
            at = first[:some] + k
            begun[at] = np.maximum(free[:some], ready[at])
            ended[at] = free[:some] = begun[at] + takes[at]
        self.free[link[first]] = free
        begin, end = np.zeros(len(src)), np.zeros(len(src))
        np.maximum.at(begin, message, begun)
        np.maximum.at(end, message, ended)
        near = src // self.per == dst // self.per
        return begin, end + np.where(near, self.cluster.in_node_latency, self.cluster.network_latency)

    def _links(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(message, link) of every link that a message passes: in a mesh the pair's, and both ranks' sums of links."""
        cluster, per, first = self.cluster, self.per, self.first
        near = src // per == dst // per
        inside, across = np.flatnonzero(near), np.flatnonzero(~near)
        a, b = src[across], dst[across]
        nics = cluster.nics_per_node
        out = a // per * nics + a % per * nics // per
        into = b // per * nics + b % per * nics // per
        messages = [inside, inside, across, across]
        links = [
            first["out"] + src[inside],
            first["in"] + dst[inside],
            first["nic out"] + out,
            first["nic in"] + into,
        ]
        if cluster.fabric == "mesh":
            messages.append(inside)
            links.append(first["pair"] + src[inside] * per + dst[inside] % per)
        return np.concatenate(messages), np.concatenate(links)
