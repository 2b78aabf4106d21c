"""The backward of a plan whose fetches form a forest, derived from its forward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages

Place = tuple[int, int]  # rank, slot
Intervals = tuple[np.ndarray, np.ndarray]  # first and last-plus-one row of runs


def adjoint(forward: Program) -> Program:
    """The same fetches and tiles, and every fetch mirrored into a reduce.

    The gradient of rows that a message brought goes back to where they came from in the step after its last addend: the
    last step in which the slot is computed before these rows are received again, and the last gradient that comes back
    from ranks to which they were passed on. Relays therefore sum what they served before they send.

    Args:
        forward: a program whose every received row has one source (fetches form a forest, its roots in slots 0).

    Returns:
        The backward program; its steps follow the forward's, as many more as the last gradients need.

    Raises:
        PlanError: rows are received again before the gradient of what was in them can be complete.
    """
    items = forward.fetch.items
    arrivals: dict[Place, list[int]] = defaultdict(list)  # messages into a slot, by done
    departures: dict[Place, list[int]] = defaultdict(list)  # messages out of a slot
    by_done = np.argsort(items["done"], kind="stable").tolist()
    for index in by_done:
        arrivals[int(items["dst"][index]), int(items["dst_slot"][index])].append(index)
        departures[int(items["src"][index]), int(items["src_slot"][index])].append(index)
    reads: dict[Place, list[int]] = defaultdict(list)  # steps in which a slot is computed
    for content in forward.contents:
        reads[int(content["rank"]), int(content["slot"])].append(int(content["step"]))

    start = np.zeros(len(items), np.int64)
    for index in reversed(by_done):  # children before parents: they start after their parent is done
        place, done = (int(items["dst"][index]), int(items["dst_slot"][index])), int(items["done"][index])
        rows = _rows(forward.fetch, index, "dst")
        again = next(
            (
                int(items["done"][i])
                for i in arrivals[place]
                if items["done"][i] > done and _meet(rows, _rows(forward.fetch, i, "dst"))
            ),
            None,
        )
        end = forward.steps if again is None else again
        computed = [step for step in reads[place] if done < step <= end]
        returned = [
            int(start[i])
            for i in departures[place]
            if done < items["start"][i] <= end and _meet(rows, _rows(forward.fetch, i, "src"))
        ]
        start[index] = 1 + max([done, *computed, *returned])
        if again is not None and start[index] > again:
            raise PlanError(
                f"adjoint: rank {place[0]}: rows of slot {place[1]}, received in step {done}, are received again "
                f"in step {again}, "
                f"but their gradient is complete only in step {start[index]}; the plan needs another slot"
            )

    mirrored = forward.fetch.reversed()
    mirrored.items["start"] = mirrored.items["done"] = start
    steps = max(forward.steps, int(start.max()) + 1 if len(start) else 0)
    return replace(forward, steps=steps, reduce=Messages(mirrored.items, mirrored.runs).sorted())


def _rows(messages: Messages, index: int, side: str) -> Intervals:
    runs = messages.runs_of(index)
    first = np.sort(runs[side + "_row"])
    return first, np.sort(runs[side + "_row"] + runs["rows"])


def _meet(a: Intervals, b: Intervals) -> bool:
    """True when two sets of runs, each without overlaps of its own, have a row in common."""
    return bool((np.searchsorted(a[0], b[1], "left") > np.searchsorted(a[1], b[0], "right")).any())
