"""Queues of links, against one that serves message after message."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.simulate.link_queues import LinkQueues


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
