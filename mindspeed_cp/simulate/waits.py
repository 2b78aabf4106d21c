"""Waits of the ranks in a timeline: the message that arrives last, and its two ends."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.cluster import Cluster
from mindspeed_cp.plan.transfers import GRADIENTS, KEYS
from mindspeed_cp.simulate.timeline import Timeline

#: After the kernels of step `step`, rank `rank` waits from `begin` to `end` (seconds) for messages that are due; the
#: message that arrives last has index `message` in the transfers of the direction.
WAIT_RECORD = np.dtype(
    [
        *((name, np.int64) for name in ("rank", "step", "message")),
        *((name, np.float64) for name in ("begin", "end")),
    ]
)

#: Content of a message by its kind (:data:`mindspeed_cp.plan.transfers.KINDS`), in full and for tables.
MESSAGE_KIND_NAMES = ("keys and values", "gradients of keys and values", "q, k, v and outputs", "hidden states")
MESSAGE_KIND_SHORT = ("keys", "gradients", "q, k, v, out", "hidden states")


def wait_records(timeline: Timeline, direction: str) -> np.ndarray:
    """Return the waits of all ranks in one direction: records of dtype WAIT_RECORD, by rank and step."""
    times, sent = timeline.steps(direction), timeline.transfers(direction)
    rank, step = np.nonzero(times[:, :, 2] > times[:, :, 1])
    out = np.zeros(len(rank), WAIT_RECORD)
    out["rank"], out["step"] = rank, step
    out["begin"], out["end"] = times[rank, step, 1], times[rank, step, 2]
    # The message of each rank and step that ends last; a rank also waits for the messages that it sends.
    count = times.shape[1]
    message = np.tile(np.arange(len(sent)), 2)
    step_of_rank = np.concatenate([sent["src"], sent["dst"]]) * count + sent["done"][message]
    order = np.lexsort((sent["end"][message], step_of_rank))
    message, step_of_rank = message[order], step_of_rank[order]
    out["message"] = message[np.searchsorted(step_of_rank, rank * count + step, "right") - 1]
    return out


def waiting_causes(timeline: Timeline) -> list[tuple[str, float]]:
    """Return why ranks do not compute: (cause, mean seconds of a rank), the largest first.

    The sum is the mean of `timeline.waiting`. A cause is a kind of message, inside nodes or between nodes, or the
    slowest rank.
    """
    seconds_by_cause: dict[str, float] = {}
    for direction, sent in (("forward", timeline.transfers_forward), ("backward", timeline.transfers_backward)):
        waits = wait_records(timeline, direction)
        messages = sent[waits["message"]]
        far = is_internode(messages, timeline.cluster)
        for kind, name in enumerate(MESSAGE_KIND_SHORT):
            for is_between, location in enumerate(("inside nodes", "between nodes")):
                selected = waits[(messages["kind"] == kind) & (far == is_between)]
                seconds = float((selected["end"] - selected["begin"]).sum()) / timeline.ranks
                if seconds > 0:
                    key = f"{name} {location}"
                    seconds_by_cause[key] = seconds_by_cause.get(key, 0.0) + seconds
    late = float((timeline.waiting - timeline.exposed).mean())
    if late > 1e-12 + 1e-9 * timeline.total:
        seconds_by_cause["the slowest rank at the end"] = late
    return sorted(seconds_by_cause.items(), key=lambda entry: -entry[1])


def fetch_waits(timeline: Timeline) -> float:
    """Return the mean seconds in which a rank waits for keys and values, or their gradients, between steps."""
    seconds = 0.0
    for direction, sent in (("forward", timeline.transfers_forward), ("backward", timeline.transfers_backward)):
        if np.isin(sent["kind"], (KEYS, GRADIENTS)).any():
            waits = wait_records(timeline, direction)
            waits = waits[np.isin(sent["kind"][waits["message"]], (KEYS, GRADIENTS))]
            seconds += float((waits["end"] - waits["begin"]).sum())
    return seconds / timeline.ranks


def is_internode(sent: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Return which transfers go between nodes, int64, 0 or 1."""
    return (sent["src"] // cluster.ranks_per_node != sent["dst"] // cluster.ranks_per_node).astype(np.int64)
