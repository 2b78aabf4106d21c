"""Speeds of links: one pair of ranks in each direction and in both, all at once, and messages that are forwarded inside
nodes to use all NICs. Runs in the workers; every function is called by all of them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.calibrate.links import measure_links
from mindspeed_cp.cluster_check.measuring_rank import MeasuringRank
from mindspeed_cp.comm import Transfer

PROBE_BYTES = 1 << 16
ROUND_TRIPS, PROBES = 8, 3
TIMED_ROUNDS = 5  # other programs only add time
PIECES = 4


def time_pair(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any] | None:
    """Time the link of a pair of ranks: there alone, back alone, both at once.

    Args:
        context: this rank.
        item: {"kind", "pairs": [[rank, rank]], "seconds" of a message, "most": bytes of the largest}.

    Returns:
        On the first rank of a pair {"pair", "kind", "bytes", "latency" in seconds, "there", "back", "both": bytes a
        second, each way}; None on others.
    """
    rank = context.launch.rank
    pair = next((pair for pair in item["pairs"] if rank in pair), None)
    context.meet()
    if pair is None:
        return None
    with context.pair(pair) as peer:
        ends = _PairEnds(context, peer, f"the link {pair[0]} - {pair[1]}", item["most"])
        if rank == pair[0]:
            return {"pair": pair, "kind": item["kind"], **ends.measure(item["seconds"])}
        ends.answer()
    return None


class _PairEnds:
    """One end of a pair. The first rank asks by (what, bytes), the second answers; the first one has the clock."""

    STOP, PING, THERE, BACK, BOTH = range(5)

    def __init__(self, context: MeasuringRank, peer: int, label: str, most: int) -> None:
        self._context, self._peer, self._label = context, peer, label
        self._order = torch.zeros(2, dtype=torch.int64, device=context.device)
        self._sent = torch.zeros(most, dtype=torch.uint8, device=context.device)
        self._received = torch.empty_like(self._sent)

    def measure(self, seconds: float) -> dict[str, Any]:
        """Ask for all measurements; messages take about so many seconds."""
        latency = min(self._ask(self.PING, 0) for _ in range(ROUND_TRIPS)) / 2
        self._ask(self.THERE, PROBE_BYTES)  # connects whatever large messages need
        probe = max(min(self._ask(self.THERE, PROBE_BYTES) for _ in range(PROBES)) - 2 * latency, 1e-7)
        size = int(min(max(PROBE_BYTES, PROBE_BYTES * seconds / probe), len(self._sent)))
        rates = {}
        for name, order in (("there", self.THERE), ("back", self.BACK), ("both", self.BOTH)):
            best = min(self._ask(order, size) for _ in range(TIMED_ROUNDS))
            extra = 2 * latency if order != self.BOTH else latency
            rates[name] = size / max(best - extra, best / 2)
            self._context.sign()
        self._ask(self.STOP, 0)
        return {"bytes": size, "latency": latency, **rates}

    def answer(self) -> None:
        """Do what the other end asks for, until it stops."""
        while True:
            self._context.receive(self._order, self._peer, self._label)
            order, size = self._order.tolist()
            if order == self.STOP:
                return
            self._context.sign()
            if order in (self.PING, self.THERE):
                if size:
                    self._context.receive(self._received[:size], self._peer, self._label)
                    self._context.synchronize()
                self._context.send(self._order, self._peer, self._label)
            elif order == self.BACK:
                self._context.send(self._sent[:size], self._peer, self._label)
            else:
                self._exchange(size)

    def _ask(self, order: int, size: int) -> float:
        """Return the seconds from the order until this end has what it asked for."""
        context, peer, label = self._context, self._peer, self._label
        self._order[0], self._order[1] = order, size
        context.synchronize()
        start = time.perf_counter()
        context.send(self._order, peer, label)
        if order in (self.PING, self.THERE):
            if size:
                context.send(self._sent[:size], peer, label)
            context.receive(self._order, peer, label)
        elif order == self.BACK:
            context.receive(self._received[:size], peer, label)
        elif order == self.BOTH:
            self._exchange(size)
        context.synchronize()
        return time.perf_counter() - start

    def _exchange(self, size: int) -> None:
        self._context.transfer(
            [
                Transfer(self._sent[:size], self._peer, True, 0, self._label),
                Transfer(self._received[:size], self._peer, False, 0, self._label),
            ]
        )


def join_all(context: MeasuringRank, item: dict[str, Any]) -> None:
    """Form the group of all ranks, which all later measurements need."""
    context.barrier()


def time_together(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any] | None:
    """Time an exchange in which all ranks send and receive at the same time.

    Args:
        context: this rank.
        item: {"kind": "in_node_all": with every rank of the node, "network_all": to the like of the next node, from
            that of the previous one; "bytes": of a message}.

    Returns:
        {"kind", "sent" bytes, "rate": bytes a second that this rank sends, and receives as many}.
    """
    launch, size = context.launch, item["bytes"]
    if item["kind"] == "in_node_all":
        first = launch.node * launch.ranks_per_node
        targets = sources = [r for r in range(first, first + launch.ranks_per_node) if r != launch.rank]
    else:
        targets = [(launch.rank + launch.ranks_per_node) % launch.ranks]
        sources = [(launch.rank - launch.ranks_per_node) % launch.ranks]
    label = item["kind"].replace("_", " ")
    sent = torch.zeros(size, dtype=torch.uint8, device=context.device)
    received = [torch.empty_like(sent) for _ in sources]

    def exchange() -> None:
        receives = [Transfer(data, peer, False, 0, label) for peer, data in zip(sources, received, strict=True)]
        context.transfer([*(Transfer(sent, peer, True, 0, label) for peer in targets), *receives])

    context.seconds(exchange)  # connects
    seconds = context.least_seconds(exchange, TIMED_ROUNDS)
    return {"kind": item["kind"], "sent": size * len(targets), "rate": size * len(targets) / seconds}


def time_forwarding(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any] | None:
    """Time one message between two nodes: over the NIC of its ends, or in parts that are forwarded inside both nodes so
    that each takes another NIC::

        source -- in node -> i -- NIC --> i of the other node -- in node -> target

    Args:
        context: this rank.
        item: {"source", "target": ranks, "bytes": of the message, "forwarded": bool}.

    Returns:
        On the source {"source", "target", "forwarded", "bytes", "seconds", "rate"}; None on others.

    Raises:
        RuntimeError: the target got other bytes than were sent.
    """
    rank, source, target = context.launch.rank, item["source"], item["target"]
    data = torch.zeros(item["bytes"], dtype=torch.uint8, device=context.device)
    if rank == source:
        data.copy_((torch.arange(item["bytes"], device=context.device) % 251).to(torch.uint8))
    rounds = _hops(context, item)
    acknowledgement = torch.zeros(1, dtype=torch.int64, device=context.device)
    label = f"a message from {source} to {target}"

    def message() -> None:
        for step in rounds:
            transfers = []
            for start, stop, src, dst in step:
                if rank in (src, dst):
                    transfers.append(Transfer(data[start:stop], dst if rank == src else src, rank == src, 0, label))
            if transfers:
                context.transfer(transfers)
        if rank == target:
            context.synchronize()
            context.send(acknowledgement, source, label)
        elif rank == source:
            context.receive(acknowledgement, target, label)

    context.seconds(message)  # connects
    seconds = context.least_seconds(message, TIMED_ROUNDS)
    if rank == target and not _is_pattern(data):
        raise RuntimeError(f"{label}: other bytes arrived than were sent")
    if rank != source:
        return None
    return {**item, "seconds": seconds, "rate": item["bytes"] / seconds}


def _is_pattern(data: Tensor) -> bool:
    return bool((data == (torch.arange(len(data), device=data.device) % 251).to(torch.uint8)).all())


def _hops(context: MeasuringRank, item: dict[str, Any]) -> list[list[tuple[int, int, int, int]]]:
    """Return for each step the transfers (first byte, end, from, to). A piece of a part takes a hop in each step, so
    that a rank forwards a piece while it gets the next one."""
    per_node, size = context.launch.ranks_per_node, item["bytes"]
    source, target = item["source"], item["target"]
    if not item["forwarded"]:
        return [[(0, size, source, target)]]
    first, second = (rank // per_node * per_node for rank in (source, target))
    bounds = [size * number // (per_node * PIECES) for number in range(per_node * PIECES + 1)]
    steps: list[list[tuple[int, int, int, int]]] = [[] for _ in range(PIECES + 2)]
    for part in range(per_node):
        chain = (source, first + part, second + part, target)
        for piece in range(PIECES):
            start, stop = bounds[part * PIECES + piece], bounds[part * PIECES + piece + 1]
            for hop in range(3):
                if chain[hop] != chain[hop + 1] and stop > start:
                    steps[piece + hop].append((start, stop, chain[hop], chain[hop + 1]))
    return steps


def time_for_fit(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any] | None:
    """Time messages of many sizes as `calibrate` does; return {"measurements"} on rank 0.

    Args:
        context: this rank.
        item: {"most": bytes of the largest message by kind}.
    """
    _ = context.transport
    measurements = measure_links(context.device, context.launch.ranks_per_node, item["most"], context.sign)
    rows = [vars(measurement) for measurement in measurements]
    return {"measurements": rows} if context.launch.rank == 0 else None
