"""Lowering to one call for each (step, slot), with a mask of its own: for operators without packed sequences.

The mask has the rows and keys of that step only. On the host it is stored as ranges of visible keys for each row of
queries; the backend builds the matrix on the device::

    ranges  0-3         mask   . . . # # #        # is hidden, as the operator has it
            0-3                . . . # # #
            3-4                # # # . # #
            3-5                # # # . . #

HostRows without a visible key, and keys that no row sees, are left out: every row of the mask has a visible key.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.lowering.fused_call import (
    MAX_CALL_ROWS,
    NO_LIMIT,
    FusedCall,
    ScatterRows,
    as_host_rows,
    content_key,
    mark_written,
)
from mindspeed_cp.ops.attention.lowering.fused_lowering import FusedCalls
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig
from mindspeed_cp.plan.tiles import visible_keys


def lower_to_masks(tiles: np.ndarray, rows: int, attention: AttentionConfig) -> FusedCalls:
    """Return one call for every (step, slot).

    Args:
        tiles: records of dtype TILE in execution order.
        rows: number of the rank's queries.
        attention: configuration of the layer; without ALiBi.

    Raises:
        ConfigError: a (step, slot) has more rows than the operator takes.
    """
    new = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    written = np.zeros(rows, bool)
    out: FusedCalls = {}
    for step_tiles in np.split(tiles, np.flatnonzero(new) + 1) if len(tiles) else ():
        out[int(step_tiles["step"][0]), int(step_tiles["slot"][0])] = [_call(step_tiles, attention, written)]
    return out


def _call(tiles: np.ndarray, attention: AttentionConfig, written: np.ndarray) -> FusedCall:
    row = ragged_arange(tiles["q_row"], tiles["q_rows"])
    first, last = _visible_slot_rows(tiles, attention)
    order = np.argsort(row, kind="stable")
    row, first, last = row[order], first[order], last[order]
    new = np.append(True, row[1:] != row[:-1])
    begins = np.flatnonzero(new)
    row_index = np.cumsum(new) - 1
    range_index = np.arange(len(row)) - begins[row_index]  # several tiles may have the same row
    used = np.zeros(int(last.max()) + 1, np.int64)
    np.add.at(used, tiles["k_row"], 1)
    np.add.at(used, tiles["k_row"] + tiles["k_rows"], -1)
    used = (np.cumsum(used) > 0).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(used)])  # used keys before each row of the slot
    visible = np.zeros((int(range_index.max()) + 1, 2, len(begins)), np.int64)
    visible[range_index, 0, row_index], visible[range_index, 1, row_index] = before[first], before[last]
    q, k = as_host_rows(row[begins]), as_host_rows(np.flatnonzero(used))
    n, m = len(begins), int(before[-1])
    if max(n, m) > MAX_CALL_ROWS:
        raise ConfigError(
            f"a step of a rank's attention has {n} queries and {m} keys; valid for npu_lowering 'masks': "
            f"{MAX_CALL_ROWS} of each at most; use npu_lowering 'tnd', or use more context-parallel ranks"
        )
    all_visible = bool(((visible[:, 1] - visible[:, 0]).sum(0) == m).all())  # ranges of a row do not overlap
    names = ("q_row", "q_rows", "doc", "q_pos", "k_pos", "k_rows", "mask")
    return FusedCall(
        layout="BSND",
        q=q,
        k=k,
        actual_seq_qlen=[n],
        actual_seq_kvlen=[m],
        sparse_mode=0 if all_visible else 1,
        pre_tokens=NO_LIMIT,
        next_tokens=NO_LIMIT,
        uses_compressed_mask=False,
        visible_ranges=None if all_visible else visible,
        start_idx=None,
        bias_shift=None,
        padding=None,
        q_scatter=ScatterRows((), slice(0, n), q),
        k_scatter=ScatterRows((), slice(0, m), k),
        unwritten=mark_written(written, q),
        content_key=content_key(tiles, names) if attention.dropout > 0 else b"",
    )


def _visible_slot_rows(tiles: np.ndarray, attention: AttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last-plus-one visible row of the slot for each row of queries, tile after tile."""
    n = tiles["q_rows"]
    within = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n)
    first = np.repeat(tiles["k_row"], n)
    mask = np.repeat(tiles["mask"], n)
    count = np.repeat(tiles["k_rows"], n)
    count = np.where(mask == CAUSAL, count - np.repeat(n, n) + within + 1, count)
    last = first + count
    band = tiles["mask"] == BAND
    if band.any():
        in_band = mask == BAND
        low, high = visible_keys(tiles[band], attention)
        first[in_band], last[in_band] = first[in_band] + low, first[in_band] + high
    return first, last
