"""The backward of a plan whose fetches form a forest, derived from its forward."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import replace

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages

Place = tuple[int, int]  # rank, slot


def adjoint(forward: Program) -> Program:
    """The same fetches and tiles, and every fetch mirrored into a reduce.

    The gradient of rows that a message brought goes back to where they came from in the step after its last addend: the
    last step in which the slot is computed before it is filled again, and the last gradient that comes back from ranks
    to which the rows were passed on. Relays therefore sum what they served before they send.

    Args:
        forward: a program whose every received row has one source (fetches form a forest, its roots in slots 0).

    Returns:
        The backward program; its steps follow the forward's, as many more as the last gradients need.

    Raises:
        PlanError: a slot is filled again before the gradient of what it held can be complete.
    """
    items = forward.fetch.items
    fills: dict[Place, list[int]] = defaultdict(list)  # steps in which something lands, ascending
    for rank, slot, done in np.unique(np.stack([items["dst"], items["dst_slot"], items["done"]], 1), axis=0).tolist():
        fills[rank, slot].append(done)
    reads: dict[Place, list[int]] = defaultdict(list)  # steps in which a slot is computed, ascending
    contents = forward.contents[np.argsort(forward.contents["step"], kind="stable")]
    for step, rank, slot in zip(*(contents[name].tolist() for name in ("step", "rank", "slot")), strict=True):
        reads[rank, slot].append(step)

    returned: dict[tuple[int, int, int], int] = {}  # (rank, slot, fill) -> last step in which a gradient comes back to it
    start = np.zeros(len(items), np.int64)
    for index in np.argsort(-items["done"], kind="stable").tolist():  # children first: they start after their parent is done
        item = items[index]
        place, done = (int(item["dst"]), int(item["dst_slot"])), int(item["done"])
        later = fills[place][bisect_right(fills[place], done) :]
        expiry = later[0] if later else None
        used = reads[place]
        last_read = bisect_right(used, expiry if expiry is not None else forward.steps)
        computed = used[last_read - 1] if last_read and used[last_read - 1] > done else done
        start[index] = 1 + max(computed, returned.get((*place, done), done))
        if expiry is not None and start[index] > expiry:
            raise PlanError(
                f"adjoint: rank {place[0]}: slot {place[1]}, filled in step {done}, is filled again in step {expiry}, but its "
                f"gradient is complete only in step {start[index]}; the plan needs another slot"
            )
        source = int(item["src"]), int(item["src_slot"])
        parent = bisect_left(fills[source], int(item["start"]))
        if parent:
            key = (*source, fills[source][parent - 1])
            returned[key] = max(returned.get(key, 0), int(start[index]))

    mirrored = forward.fetch.reversed()
    mirrored.items["start"] = mirrored.items["done"] = start
    steps = max(forward.steps, int(start.max()) + 1 if len(start) else 0)
    return replace(forward, steps=steps, reduce=Messages(mirrored.items, mirrored.runs).sorted(forward.ranks))
