"""What ranks of a timeline wait for: the message that is there last, and between whom it goes."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cost.timeline import Timeline
from mindspeed_cp.report.messages import is_far

#: Rank `rank` has computed turn `turn` and waits from `begin` to `end` (seconds) for messages that are due; the one
#: that is there last is number `message` of the direction's transfers.
WAIT = np.dtype(
    [
        *((name, np.int64) for name in ("rank", "turn", "message")),
        *((name, np.float64) for name in ("begin", "end")),
    ]
)

#: What a message carries, by its kind (:data:`mindspeed_cp.cost.transfers.KINDS`), in full and for tables.
NAMES = ("keys and values", "gradients of keys and values", "q, k, v and outputs", "hidden states")
SHORT = ("keys", "gradients", "q, k, v, out", "hidden states")


def waits(timeline: Timeline, direction: str) -> np.ndarray:
    """Waits of all ranks in one direction: records of dtype WAIT, by rank and turn."""
    forward = direction == "forward"
    turns = timeline.forward if forward else timeline.backward
    sent = timeline.transfers if forward else timeline.transfers_backward
    rank, turn = np.nonzero(turns[:, :, 2] > turns[:, :, 1])
    out = np.zeros(len(rank), WAIT)
    out["rank"], out["turn"] = rank, turn
    out["begin"], out["end"] = turns[rank, turn, 1], turns[rank, turn, 2]
    # For each rank and turn the message that ends last; a rank waits for those that it sends too.
    count = turns.shape[1]
    number = np.tile(np.arange(len(sent)), 2)
    place = np.concatenate([sent["src"], sent["dst"]]) * count + sent["done"][number]
    order = np.lexsort((sent["end"][number], place))
    number, place = number[order], place[order]
    out["message"] = number[np.searchsorted(place, rank * count + turn, "right") - 1]
    return out


def causes(timeline: Timeline) -> list[tuple[str, float]]:
    """Why ranks do not compute: (what for, mean seconds of a rank), the largest first; together the mean of
    `timeline.waiting`. What for is a kind of message, inside nodes or between nodes, or the other ranks at the end."""
    found: dict[str, float] = {}
    for direction, sent in (("forward", timeline.transfers), ("backward", timeline.transfers_backward)):
        some = waits(timeline, direction)
        messages = sent[some["message"]]
        far = is_far(messages, timeline.cluster)
        for kind, name in enumerate(SHORT):
            for place, where in enumerate(("inside nodes", "between nodes")):
                chosen = some[(messages["kind"] == kind) & (far == place)]
                seconds = float((chosen["end"] - chosen["begin"]).sum()) / timeline.ranks
                if seconds > 0:
                    key = f"{name} {where}"
                    found[key] = found.get(key, 0.0) + seconds
    late = float((timeline.waiting - timeline.exposed).mean())
    if late > 1e-12 + 1e-9 * timeline.total:
        found["the slowest rank at the end"] = late
    return sorted(found.items(), key=lambda entry: -entry[1])
