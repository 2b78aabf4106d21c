"""Derive the backward of a plan whose fetches form a forest from its forward, for algorithms from outside.

The built-in algorithms state their backward as arrays: this is a Python loop over all messages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages

RankSlot = tuple[int, int]  # rank, slot


def derive_backward(forward: Program) -> Program:
    """Return a backward program with the same fetches and tiles, and for each fetch a reduce in the opposite direction.

    The gradient of received rows is sent back in the step after its last addend. Addends come from steps in which the
    slot is computed before these rows are received again, and from ranks to which the rows were passed on. Relays
    therefore sum before they send.

    Args:
        forward: program in which every received row has one source (fetches form a forest with roots in slots 0).

    Returns:
        The backward program; it has the steps of the forward, and more if the last gradients need them.

    Raises:
        PlanError: rows are received again before their gradient can be complete.
    """
    items = forward.fetch.items
    arrivals: dict[RankSlot, list[int]] = defaultdict(list)  # messages into a slot, by done
    departures: dict[RankSlot, list[int]] = defaultdict(list)  # messages out of a slot
    by_done = np.argsort(items["done"], kind="stable").tolist()
    for index in by_done:
        arrivals[int(items["dst"][index]), int(items["dst_slot"][index])].append(index)
        departures[int(items["src"][index]), int(items["src_slot"][index])].append(index)
    reads: dict[RankSlot, list[int]] = defaultdict(list)  # steps in which a slot is computed
    for content in forward.contents:
        reads[int(content["rank"]), int(content["slot"])].append(int(content["step"]))

    rows = [forward.fetch.rows_of(index) for index in range(len(items))]  # in the source slot, and in the target slot
    start = np.zeros(len(items), np.int64)
    for index in reversed(by_done):  # children before parents: they start after their parent is done
        rank_slot, done = (int(items["dst"][index]), int(items["dst_slot"][index])), int(items["done"][index])
        received = rows[index][1]
        later = [i for i in arrivals[rank_slot] if items["done"][i] > done and np.isin(received, rows[i][1]).any()]
        replaced = int(items["done"][later[0]]) if later else None
        end = forward.steps if replaced is None else replaced
        computed = [step for step in reads[rank_slot] if done < step <= end]
        returned = [
            int(start[i])
            for i in departures[rank_slot]
            if done < items["start"][i] <= end and np.isin(received, rows[i][0]).any()
        ]
        start[index] = 1 + max([done, *computed, *returned])
        if replaced is not None and start[index] > replaced:
            raise PlanError(
                f"derive_backward: rank {rank_slot[0]}: rows of slot {rank_slot[1]}, received in step {done}, are "
                f"received again in step {replaced}, but their gradient is complete only in step {start[index]}; the "
                "plan needs another slot"
            )

    mirrored = forward.fetch.reversed()
    mirrored.items["start"] = mirrored.items["done"] = start
    steps = max(forward.steps, int(start.max()) + 1 if len(start) else 0)
    return replace(forward, steps=steps, reduce=Messages(mirrored.items, mirrored.runs).in_global_order())
