"""Seconds in which ranks post messages: :attr:`mindspeed_cp.cluster.Cluster.posting` for each."""

from __future__ import annotations

import numpy as np


def posting_seconds(table: np.ndarray, ranks: int, steps: int, seconds: float) -> np.ndarray:
    """Return the seconds that each rank spends on posting in each step, fp64 [ranks, steps].

    A message is posted by both of its ends; an exchange is posted once by every rank, whatever it carries.

    Args:
        table: records of dtype :data:`mindspeed_cp.plan.transfers.TRANSFER`.
        ranks, steps: numbers of ranks and of timeline steps.
        seconds: of one post.
    """
    out = np.zeros((ranks, steps))
    if seconds == 0 or not len(table):
        return out
    whole = table["exchange"] > 0
    messages = table[~whole] if whole.any() else table
    for end in ("src", "dst"):
        step_of_rank = messages[end] * steps + messages["start"]
        out += np.bincount(step_of_rank, minlength=ranks * steps).reshape(ranks, steps)
    if whole.any():
        exchanges = np.unique(table[whole][["start", "done", "part"]])
        out += np.bincount(exchanges["start"], minlength=steps)
    return out * seconds
