"""Queues: no dead-lock, even if every send waits for its receiver."""

from __future__ import annotations

from collections import deque

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.verify.structure import describe_message


def check_queues(program: Program, direction: str) -> None:
    """Simulate all ranks, each with one queue of sends and one queue of receives that are served in order.

    A rank posts the messages of a step (reduces, then fetches, in the plan's order) and enters the next step when the
    messages due in this step are finished. A message moves when it is at the head of its sender's queue of sends and of
    its receiver's queue of receives. This is synchronous sending with one stream for each direction, the strictest
    transport.

    Raises:
        PlanError: a rank never finishes; names rank, step and the message for which it waits.
    """
    table = [("reduce", item) for item in program.reduce.items] + [("fetch", item) for item in program.fetch.items]
    table.sort(key=lambda entry: int(entry[1]["start"]))  # stable: in a step reduces first, then the plan's order
    items = [item for _, item in table]
    src, dst = [int(item["src"]) for item in items], [int(item["dst"]) for item in items]
    sends: list[deque[int]] = [deque() for _ in range(program.ranks)]
    receives: list[deque[int]] = [deque() for _ in range(program.ranks)]
    due: list[dict[int, set[int]]] = [{} for _ in range(program.ranks)]  # rank -> step -> unfinished messages
    to_post: list[deque[int]] = [deque() for _ in range(program.ranks)]
    for number, item in enumerate(items):
        for rank in (src[number], dst[number]):
            to_post[rank].append(number)
            due[rank].setdefault(int(item["done"]), set()).add(number)
    step = [0] * program.ranks
    active = deque(range(program.ranks))
    while active:
        rank = active.popleft()
        if step[rank] >= program.steps:
            continue
        while to_post[rank] and items[to_post[rank][0]]["start"] <= step[rank]:
            number = to_post[rank].popleft()
            (sends[rank] if src[number] == rank else receives[rank]).append(number)
        for head in [queue[0] for queue in (sends[rank], receives[rank]) if queue]:
            sender, receiver = src[head], dst[head]
            if sends[sender] and receives[receiver] and sends[sender][0] == receives[receiver][0] == head:
                sends[sender].popleft()
                receives[receiver].popleft()
                for end in (sender, receiver):
                    due[end][int(items[head]["done"])].discard(head)
                    active.append(end)
        if not due[rank].get(step[rank]):
            step[rank] += 1
            active.append(rank)
    stuck = [rank for rank in range(program.ranks) if step[rank] < program.steps]
    if stuck:
        rank = min(stuck, key=lambda r: step[r])
        kind, waiting = table[min(due[rank][step[rank]])]
        raise PlanError(
            f"{direction}: rank {rank}, step {step[rank]}: dead-lock if sends wait for their receivers: it waits for "
            f"{describe_message(kind, waiting)}; {len(stuck)} ranks never finish"
        )
