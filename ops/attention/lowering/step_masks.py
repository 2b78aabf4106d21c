"""One call for each (step, slot), with a mask made for it: for layouts without packed sequences.

The mask has the rows and keys of that step only. Here it is not a matrix: for each row of queries the runs of keys that
it sees, which is what document numbers and positions say. A backend makes the matrix on the device, once::

    runs    0-3         mask   . . . # # #        # is hidden, as the operator has it
            0-3                . . . # # #
            3-4                # # # . # #
            3-5                # # # . . #

Rows that see nothing, and keys that nobody sees, are not handed over: no row of the mask hides everything.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.layout import expand
from mindspeed_cp.ops.attention.npu_calls import NO_LIMIT, Back, FusedCall, compact, identity_of
from mindspeed_cp.ops.attention.npu_lowering import Lowering, touch
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig
from mindspeed_cp.plan.tiles import visible_keys


def lower_to_masks(tiles: np.ndarray, rows: int, attention: AttentionConfig) -> Lowering:
    """One call for every (step, slot).

    Args:
        tiles: records of dtype TILE in the order they run.
        rows: the rank's queries, which no tile exceeds.
        attention: what is computed; without ALiBi.
    """
    new = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    touched = np.zeros(rows, bool)
    out: Lowering = {}
    for some in np.split(tiles, np.flatnonzero(new) + 1) if len(tiles) else ():
        out[int(some["step"][0]), int(some["slot"][0])] = [_call(some, attention, touched)]
    return out


def _call(tiles: np.ndarray, attention: AttentionConfig, touched: np.ndarray) -> FusedCall:
    row = expand(tiles["q_row"], tiles["q_rows"])
    first, last = _seen(tiles, attention)
    order = np.argsort(row, kind="stable")
    row, first, last = row[order], first[order], last[order]
    new = np.append(True, row[1:] != row[:-1])
    begins = np.flatnonzero(new)
    which = np.cumsum(new) - 1
    turn = np.arange(len(row)) - begins[which]  # several tiles may have the same row
    used = np.zeros(int(last.max()) + 1, np.int64)
    np.add.at(used, tiles["k_row"], 1)
    np.add.at(used, tiles["k_row"] + tiles["k_rows"], -1)
    used = (np.cumsum(used) > 0).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(used)])  # keys handed over before each row of the slot
    visible = np.zeros((int(turn.max()) + 1, 2, len(begins)), np.int64)
    visible[turn, 0, which], visible[turn, 1, which] = before[first], before[last]
    q, k = compact(row[begins]), compact(np.flatnonzero(used))
    n, m = len(begins), int(before[-1])
    everything = bool(((visible[:, 1] - visible[:, 0]).sum(0) == m).all())  # runs of a row do not overlap
    names = ("q_row", "q_rows", "doc", "q_pos", "k_pos", "k_rows", "mask")
    return FusedCall(
        layout="BSND",
        q=q,
        k=k,
        cu_q=[n],
        cu_k=[m],
        sparse_mode=0 if everything else 1,
        pre=NO_LIMIT,
        next=NO_LIMIT,
        compressed=False,
        visible=None if everything else visible,
        starts=None,
        shift=None,
        padding=None,
        q_back=Back((), slice(0, n), q),
        k_back=Back((), slice(0, m), k),
        fresh=touch(touched, q),
        identity=identity_of(tiles, names) if attention.dropout > 0 else b"",
    )


def _seen(tiles: np.ndarray, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """First and last-plus-one row of the slot that each row of queries of each tile sees, tile after tile."""
    n = tiles["q_rows"]
    within = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n)
    first = np.repeat(tiles["k_row"], n)
    mask = np.repeat(tiles["mask"], n)
    seen = np.repeat(tiles["k_rows"], n)
    seen = np.where(mask == CAUSAL, seen - np.repeat(n, n) + within + 1, seen)
    last = first + seen
    band = tiles["mask"] == BAND
    if band.any():
        where = mask == BAND
        low, high = visible_keys(tiles[band], attention)
        first[where], last[where] = first[where] + low, first[where] + high
    return first, last
