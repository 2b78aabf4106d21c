"""Queues of links, against one that serves message after message, and messages that share a link."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.simulate.link_queues import ARRIVALS, LinkQueues, share_busy_periods


class OneByOne:
    """A link that serves one message after the other, and notes the last gap in which it was idle."""

    def __init__(self) -> None:
        self.free, self.gap = 0.0, (0.0, 0.0)

    def serve(self, seconds: float, ready: float) -> tuple[float, float]:
        """Return when a message begins to pass and when it has passed."""
        in_gap = max(self.gap[0], ready)
        if in_gap + seconds <= self.gap[1]:
            self.gap = in_gap + seconds, self.gap[1]
            return in_gap, in_gap + seconds
        begin = max(self.free, ready)
        if begin > self.free:
            self.gap = self.free, begin
        self.free = begin + seconds
        return begin, self.free


@pytest.mark.parametrize("seed", range(12))
def test_links_serve_as_one_message_after_the_other_would(seed: int) -> None:
    """Several passes, so that later messages meet the gaps of earlier ones; some messages have no bytes."""
    random = np.random.default_rng(seed)
    queues = LinkQueues(load_cluster("a800").with_ranks(4), 2)
    links: dict[int, OneByOne] = {}
    filled = 0
    for _ in range(6):
        count = int(random.integers(0, 60))
        link = random.integers(0, 6, count)
        size = random.choice([0.0, 1e5, 1e6, 3e7], count)
        ready = 1e-6 + np.round(random.random(count) * 2e-3, 5)  # some at the same time
        begin, end = queues._pass(link, size, ready)
        for message in np.lexsort((ready, link)).tolist():
            single = links.setdefault(int(link[message]), OneByOne())
            free = single.free
            expected = single.serve(float(size[message] / queues.rate[link[message]]), float(ready[message]))
            assert (begin[message], end[message]) == expected
            filled += expected[0] < free
    assert filled, "messages fill gaps"
    for number, single in links.items():
        assert queues.free_at[number] == single.free and tuple(queues.idle_gap[number]) == single.gap


# Messages that share a link: cases by hand, and a link that is followed from event to event.


def in_turns(link: np.ndarray, ready: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when messages, sorted by link and time, begin to pass one after the other, and when they have passed."""
    begun, ended, free = np.zeros(len(link)), np.zeros(len(link)), {}
    for message, number in enumerate(link.tolist()):
        begun[message] = max(free.get(number, 0.0), ready[message])
        free[number] = ended[message] = begun[message] + seconds[message]
    return begun, ended


def from_event_to_event(ready: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return when messages of one link are through that share it evenly."""
    left, end, now = seconds.copy(), ready.copy(), 0.0
    while (left > 0).any():
        under_way = (left > 0) & (ready <= now)
        later = ready[ready > now].min(initial=np.inf)
        span = min(later - now, left[under_way].min(initial=np.inf) * under_way.sum() if under_way.any() else np.inf)
        left[under_way] -= span / max(under_way.sum(), 1)
        through = under_way & (left <= 1e-12)
        now = later if span == later - now else now + span
        left[through], end[through] = 0, now
    return end


@pytest.mark.parametrize(("ready", "seconds", "begun", "ended"), [
    ([0, 0], [1, 1], [0, 0], [2, 2]),  # equal messages end together
    ([0, 0], [1, 3], [0, 0], [2, 4]),  # the shorter one has half of the link until it is through
    ([0, 1], [2, 2], [0, 1], [3, 4]),  # one that is ready later
    ([0, 1], [1, 1], [0, 1], [1, 2]),  # nothing to share
    ([0, 5], [1, 1], [0, 5], [1, 6]),  # two busy periods
    ([0, 0, 0], [0, 1, 1], [0, 0, 0], [0, 2, 2]),  # no bytes
])  # fmt: skip
def test_messages_of_one_link(ready: list[float], seconds: list[float], begun: list[float], ended: list[float]) -> None:
    link, at_once = np.zeros(len(ready), int), np.array(ready, float)
    made = share_busy_periods(link, at_once, *in_turns(link, at_once, np.array(seconds, float)))
    assert made[0] == pytest.approx(begun) and made[1] == pytest.approx(ended)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [ARRIVALS, 4 * ARRIVALS])
def test_links_as_followed_from_event_to_event(seed: int, most: int) -> None:
    """Exact up to a number of times of arrival; beyond, no message is early, and busy periods end as they did."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, most))
    link = np.sort(random.integers(0, 3, count))
    ready = random.random(count) * random.choice([0, 1, 10])
    order = np.lexsort((ready, link))
    link, ready, seconds = link[order], ready[order], random.choice([0, 0.5, 1, 2.0, 3.7], count)
    turns = in_turns(link, ready, seconds)
    begun, ended = share_busy_periods(link, ready, *turns)
    assert (begun >= ready).all() and (ended >= ready + seconds - 1e-9).all()
    for number in np.unique(link):
        on_link = link == number
        assert ended[on_link].max() == pytest.approx(turns[1][on_link].max())
        if most == ARRIVALS:
            assert ended[on_link] == pytest.approx(from_event_to_event(ready[on_link], seconds[on_link]))


def test_two_ranks_that_share_a_nic_advance_together() -> None:
    """Ranks 0 and 1 of a node of a800 share a NIC; to ranks of two nodes, so that only the senders share."""
    cluster = load_cluster("a800").with_values(posting=0.0)
    links = LinkQueues(cluster, 3)
    size = np.full(2, cluster.effective_nic)  # a second each
    begin, end = links.serve(np.array([0, 1]), np.array([8, 16]), size, np.zeros(2))
    assert begin == pytest.approx([0, 0]) and end - cluster.network_latency == pytest.approx([2, 2])
    _, end = links.serve(np.array([0]), np.array([8]), size[:1], np.zeros(1))
    assert end - cluster.network_latency == pytest.approx([3])  # the link is free when it was before


def test_messages_inside_nodes_and_of_a_rank_with_a_nic_of_its_own_take_turns() -> None:
    for name, dst in (("a800", [1, 2]), ("a2", [8, 16])):
        cluster = load_cluster(name).with_values(posting=0.0)
        rate = cluster.effective_rank if name == "a800" else cluster.effective_nic
        _, end = LinkQueues(cluster, 3).serve(np.zeros(2, int), np.array(dst), np.full(2, rate), np.zeros(2))
        assert end == pytest.approx([1, 2], rel=1e-4)
