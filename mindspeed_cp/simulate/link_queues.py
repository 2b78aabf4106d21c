"""Queues of a cluster's links: in-node links or ports, and NICs, which ranks may share.

A link serves messages in the order of steps, and within a step in the order in which both ends have posted them. The
sender's and the receiver's link of a message are independent: it has arrived when both links have served it, and a
message of a later step may use a gap in which a link was idle. This models links on which messages advance together in
small packets (NVLink, HCCS, RDMA): a sender whose receiver is busy continues with other receivers. Every link finishes
all of its bytes when it would with fair shares. On NICs that ranks share, messages of a step advance together (see
below); elsewhere a single message may be early.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.layout.runs import group_starts


class LinkQueues:
    """Links of some nodes and the times at which they are in use.

    Args:
        cluster: speeds and latencies.
        nodes: number of nodes, of `cluster.ranks_per_node` ranks each.

    Attributes:
        first_of_kind: index of the first link of each kind: "out", "in", "nic out", "nic in", "pair".
        free_at: seconds from which each link is free, fp64 [links].
        idle_gap: (begin, end) of the last gap in which each link was idle, fp64 [links, 2].
    """

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self.cluster, self.nodes, self.ranks_per_node = cluster, nodes, cluster.ranks_per_node
        ranks, nics = nodes * self.ranks_per_node, nodes * cluster.nics_per_node
        pairs = ranks * self.ranks_per_node if cluster.fabric == "mesh" else 0
        counts = {"out": ranks, "in": ranks, "nic out": nics, "nic in": nics, "pair": pairs}
        rates = [cluster.effective_rank] * 2 + [cluster.effective_nic] * 2 + [cluster.effective_pair]
        ends = np.cumsum(list(counts.values()))
        self.first_of_kind = dict(zip(counts, [0, *ends[:-1].tolist()], strict=True))
        self.rate = np.repeat(np.array(rates), list(counts.values()))
        self.free_at = np.zeros(len(self.rate))
        self.idle_gap = np.zeros((len(self.rate), 2))
        self._ranks_share_nics = nics < ranks

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
        if cluster.fabric == "mesh":  # the pair's own link, beside the limit on the sum of a rank's links
            local = np.flatnonzero(in_node)
            pair_link = first["pair"] + src[local] * self.ranks_per_node + dst[local] % self.ranks_per_node
            begin[local], passed = self._pass(pair_link, size[local], posted[local])
            sent[local] = np.maximum(sent[local], passed)
        _, received = self._pass(dst_link, size, posted)
        latency = np.where(in_node, cluster.in_node_latency, cluster.network_latency)
        return begin, np.maximum(sent, received) + latency

    def _pass(self, link: np.ndarray, size: np.ndarray, ready: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when each message begins to pass its link and when it has passed."""
        order = np.lexsort((ready, link))  # stable
        link, ready = link[order], ready[order]
        seconds = size[order] / self.rate[link]
        first = group_starts(link)
        used = link[first]
        free, gap = self.free_at[used], self.idle_gap[used]
        begun, ended = _serve_in_turns(first, ready, seconds, free, gap)
        self.free_at[used], self.idle_gap[used] = free, gap
        if self._ranks_share_nics:  # messages on NICs advance together
            nics = slice(*np.searchsorted(link, [self.first_of_kind["nic out"], self.first_of_kind["pair"]]))
            begun[nics], ended[nics] = share_busy_periods(link[nics], ready[nics], begun[nics], ended[nics])
        begin, end = np.empty(len(link)), np.empty(len(link))
        begin[order], end[order] = begun, ended
        return begin, end


def _serve_in_turns(
    first: np.ndarray, ready: np.ndarray, seconds: np.ndarray, free: np.ndarray, gap: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Serve each message after those before it on its link, or in the last gap in which its link was idle if it fits
    there.

    The k-th message of each link is served in turn k, of the links with the most messages first, so that the links of a
    turn are the first ones of the turn before.

    Args:
        first: index of the first message of each link; messages are sorted by link.
        ready, seconds: when each message may begin, and how long it takes.
        free: when each link is free, fp64 [links]; written.
        gap: (begin, end) of that gap of each link, fp64 [links, 2]; written.

    Returns:
        When each message begins to pass and when it has passed, fp64 [messages].
    """
    count = np.diff(np.append(first, len(ready)))
    most_first = np.argsort(-count, kind="stable")
    active = np.searchsorted(-count[most_first], -np.arange(count.max(initial=0)), "left")
    turn_ends = np.cumsum(active)
    rank = np.empty(len(first), np.int64)
    rank[most_first] = np.arange(len(first))
    turn_of_message = np.arange(len(ready)) - np.repeat(first, count)
    place = (turn_ends - active)[turn_of_message] + np.repeat(rank, count)  # of each message in the order of turns
    in_turns = np.empty((2, len(ready)))
    in_turns[:, place] = ready, seconds
    ready, seconds = in_turns
    begun, ended, begin = np.empty_like(ready), np.empty_like(ready), 0
    free_of, gap_begin, gap_end = free[most_first], *gap[most_first].T.copy()
    for end in turn_ends.tolist():
        turn, links = slice(begin, end), slice(0, end - begin)
        free_before, gap_begin_before = free_of[links], gap_begin[links]
        after = np.maximum(free_before, ready[turn])
        in_gap = np.maximum(gap_begin_before, ready[turn])
        fits = in_gap + seconds[turn] <= gap_end[links]
        begun[turn] = np.where(fits, in_gap, after)
        ended[turn] = begun[turn] + seconds[turn]
        new_gap = after > free_before
        gap_begin[links] = np.where(fits, ended[turn], np.where(new_gap, free_before, gap_begin_before))
        gap_end[links] = np.where(~fits & new_gap, after, gap_end[links])
        free_of[links] = np.where(fits, free_before, ended[turn])
        begin = end
    free[most_first] = free_of
    gap[most_first, 0], gap[most_first, 1] = gap_begin, gap_end
    return begun[place], ended[place]


# Messages that advance together on a link, instead of one after the other.
#
# A link that serves its messages in turns is busy for as long as one on which they share, but the first of two equal
# messages ends after half of the time. On a NIC the other half belongs to another rank, which would go on too late, and
# the first one too early. Here messages of a busy period share the link evenly from when they are ready: processor
# sharing. The busy period as a whole remains as it is.


ROUNDING = 1e-12  # relative, of times in a busy period
ARRIVALS = 16  # of a busy period of a link; where messages arrive at more times, some arrive with those before them


def share_busy_periods(
    link: np.ndarray, ready: np.ndarray, begun: np.ndarray, ended: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return when messages begin to pass and when they have passed if they share their link, fp64 [messages] each.

    Args:
        link: int64 [messages].
        ready: seconds from which each message may pass, fp64 [messages].
        begun, ended: when they would pass one after the other; fp64 [messages].
    """
    order = np.lexsort((begun, link))
    follows = (link[order[1:]] == link[order[:-1]]) & (begun[order[1:]] == ended[order[:-1]])
    if not follows.any():
        return begun, ended
    first = np.flatnonzero(np.append(True, ~follows))
    count = np.diff(np.append(first, len(order)))
    several = count > 1
    first, count = first[several], count[several]
    column = np.arange(int(count.max()))
    used = column < count[:, None]
    messages = order[np.minimum(first[:, None] + column, len(order) - 1)]
    start = begun[messages[:, :1]]
    work = np.where(used, (ended - begun)[messages], 0)
    arrival = np.where(used, np.maximum(ready[messages] - start, 0), work.sum(1, keepdims=True))
    through = _even_shares(arrival, work)
    begun, ended = begun.copy(), ended.copy()
    begun[messages[used]], ended[messages[used]] = np.maximum(ready[messages], start)[used], (start + through)[used]
    return begun, ended


def _even_shares(arrival: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return when each message of some links is through, if a link's messages share it evenly, fp64 [links, messages].

    Between two arrivals the message with the least work left is through first, after it has got as much as all others.

    Args:
        arrival: seconds from which a message may pass, ascending, the first of each link 0; for none the sum of `work`.
        work: seconds that each message takes alone; 0 for none.
    """
    messages = work.shape[1]
    first = np.append(0, 1 + np.flatnonzero((arrival[:, 1:] > arrival[:, :-1]).any(0)))  # of those that arrive together
    if len(first) > ARRIVALS:
        first = first[np.linspace(0, len(first), ARRIVALS, endpoint=False).astype(int)]
    now, through, left = np.zeros((len(work), 1)), np.zeros_like(work), np.zeros_like(work)
    for begin, end in zip(first, np.append(first[1:], messages), strict=True):
        left[:, begin:end] = work[:, begin:end]
        until = arrival[:, end : end + 1] if end < messages else np.full_like(now, np.inf)
        order = np.argsort(left[:, :end], 1)
        least_first = np.take_along_axis(left[:, :end], order, 1)
        got = np.cumsum(least_first, 1)
        ends = now + got + least_first * np.arange(end - 1, -1, -1)
        done = ends <= until * (1 + ROUNDING)
        passed = np.where(done & (least_first > 0), ends, 0)
        others = end - done.sum(1, keepdims=True)
        rest = until - now - np.where(done, least_first, 0).sum(1, keepdims=True)
        least_first -= np.where(done, least_first, rest / np.maximum(others, 1))
        through_before = np.take_along_axis(through[:, :end], order, 1)
        np.put_along_axis(through[:, :end], order, np.maximum(passed, through_before), 1)
        np.put_along_axis(left[:, :end], order, least_first, 1)
        now = until
    return np.maximum(through, arrival + work)
