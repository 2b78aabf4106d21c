"""Links over which every message between nodes takes all NICs of both: Zeppelin's routing layer, as a model.

The paper (arXiv 2509.21841, section on routing) sends the n bytes of such a message in three hops: to the x ranks of
its node, over all their NICs, and together again::

    T = b_intra * n * (x - 1) / x  +  b_inter * n / x  +  b_intra * n * (x - 1) / x

Here each part of each hop is a message of its own in the queues of the links, so that several routed messages share
what they pass. The relays' kernels do not wait for them.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cluster import Cluster
from mindspeed_cp.simulate.link_queues import LinkQueues


def routing_pays(cluster: Cluster) -> bool:
    """Return True if one message alone takes less time routed than over its own NIC, by the formula above, latencies
    left out. In a mesh the parts of a hop travel side by side, each over its own link."""
    ranks = cluster.ranks_per_node
    inside = (ranks - 1) / cluster.effective_rank
    if cluster.fabric == "mesh":
        inside = max(inside, 1 / cluster.effective_pair)
    routed = (2 * inside + max(1, ranks // cluster.nics_per_node) / cluster.effective_nic) / ranks
    return routed < 1 / cluster.effective_nic


class RoutedLinkQueues(LinkQueues):
    """Links of some nodes, over which messages between nodes are dispatched, cross, and are combined."""

    def serve(
        self, src: np.ndarray, dst: np.ndarray, size: np.ndarray, posted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return, as :class:`LinkQueues` does, when each message begins to travel and has arrived."""
        per = self.ranks_per_node
        across = np.flatnonzero(src // per != dst // per)
        if not len(across) or per == 1:
            return super().serve(src, dst, size, posted)
        begin, end = np.zeros(len(src)), np.zeros(len(src))
        seat = np.tile(np.arange(per), len(across))
        source = np.repeat(across, per)
        helper, relay = src[source] // per * per + seat, dst[source] // per * per + seat
        part = size[source] / per

        near = np.flatnonzero(src // per == dst // per)
        away, joins = np.flatnonzero(helper != src[source]), np.flatnonzero(relay != dst[source])
        first = super().serve(
            np.concatenate([src[near], src[source][away]]),
            np.concatenate([dst[near], helper[away]]),
            np.concatenate([size[near], part[away]]),
            np.concatenate([posted[near], posted[source][away]]),
        )
        begin[near], end[near] = first[0][: len(near)], first[1][: len(near)]
        ready = posted[source].copy()
        ready[away] = first[1][len(near) :]
        begun, arrived = super().serve(helper, relay, part, ready)
        begun[away] = first[0][len(near) :]
        arrived[joins] = super().serve(relay[joins], dst[source][joins], part[joins], arrived[joins])[1]
        begin[across] = begun.reshape(-1, per).min(1)
        end[across] = arrived.reshape(-1, per).max(1)
        return begin, end
