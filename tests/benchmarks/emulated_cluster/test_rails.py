"""Every way of a message from one node to the next, with the messages of all ranks matched by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import get_ident
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.cluster import rails
from tests.limits import HANG


class Links:
    """Point-to-point messages between threads, in place of torch.distributed."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {}
        self.sent: deque[tuple[int, int, int]] = deque()

    def of(self, rank: int) -> Any:
        links = self

        class Work:
            def __init__(self, wait: Callable[[], None]) -> None:
                self.wait = wait

        class Distributed:
            @staticmethod
            def isend(data: torch.Tensor, to: int) -> Work:
                links.sent.append((rank, to, len(data)))
                links.queue(rank, to).put(data.clone())
                return Work(lambda: None)

            @staticmethod
            def irecv(data: torch.Tensor, by: int) -> Work:
                def wait() -> None:
                    data.copy_(links.queue(by, rank).get(timeout=HANG))

                return Work(wait)

            @staticmethod
            def send(data: torch.Tensor, to: int) -> None:
                Distributed.isend(data, to).wait()

            @staticmethod
            def recv(data: torch.Tensor, by: int) -> None:
                Distributed.irecv(data, by).wait()

        return Distributed

    def queue(self, source: int, target: int) -> SimpleQueue[torch.Tensor]:
        return self.queues.setdefault((source, target), SimpleQueue())


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("way", rails.MESSAGES)
def test_the_message_arrives_whole_and_each_nic_carries_its_part(way, per_node):
    links, size = Links(), 64
    data = [
        torch.arange(size) if rank == per_node - 1 else torch.zeros(size, dtype=torch.int64)
        for rank in range(2 * per_node)
    ]

    class Router:
        """torch.distributed, by thread."""

        def __getattr__(self, name: str) -> Any:
            return getattr(links.of(numbers[get_ident()]), name)

    numbers: dict[int, int] = {}

    def one(rank: int) -> None:
        numbers[get_ident()] = rank
        rails.MESSAGES[way](rank, per_node, data[rank])

    with patch.object(rails, "dist", Router()), ThreadPoolExecutor(2 * per_node) as pool:
        for done in [pool.submit(one, rank) for rank in range(2 * per_node)]:
            done.result(20)
    assert data[per_node].tolist() == list(range(size))
    crossing = [(a, n) for a, b, n in links.sent if a // per_node != b // per_node]
    parts = 1 if way == "one NIC" else per_node
    assert len({a for a, _ in crossing}) == parts and sum(n for _, n in crossing) == size
    assert all(sum(n for b, n in crossing if b == a) == size // parts for a, _ in crossing)
