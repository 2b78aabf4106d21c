"""Lowering where every query sees one key, its own position: a window of (0, 0).

Ascend's operator has bands for that in sparse mode 4, but the gradient refuses pre_tokens + next_tokens = 0 in packed
sequences. So rows become the entries of a batch, in layout BSND with Sq = Skv = 1, no mask and no bias (the ALiBi
distance is 0): nothing is computed beside the visible pairs, whatever the documents are, in one call::

    queries   0 1 2 3        batch    0  1  2  3
    keys      0 1 2 3        query    0  1  2  3
    visible   0 1 2 3        key      0  1  2  3
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.ops.attention.lowering.fused_call import (
    NO_LIMIT,
    CallLimits,
    FusedCall,
    ScatterRows,
    as_host_rows,
    content_key,
    mark_written,
    ramps,
)
from mindspeed_cp.plan import AttentionConfig


def lower_single_keys(
    tiles: np.ndarray, rows: int, attention: AttentionConfig, limits: CallLimits
) -> dict[tuple[int, int], list[FusedCall]]:
    """Return the calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in execution order.
        rows: number of the rank's queries.
        attention: configuration of the layer, with reach (0, 0).
        limits: limits of one call.
    """
    new = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    written = np.zeros(rows, bool)
    calls: dict[tuple[int, int], list[FusedCall]] = {}
    for part in np.split(tiles, np.flatnonzero(new) + 1) if len(tiles) else ():
        start = np.maximum(part["q_pos"], part["k_pos"])
        stop = np.minimum(part["q_pos"] + part["q_rows"], part["k_pos"] + part["k_rows"])
        count = np.maximum(stop - start, 0)
        q_row, k_row = (
            ramps(part[side + "_row"] + start - part[side + "_pos"], count, np.ones_like(count)) for side in ("q", "k")
        )
        names = ("q_row", "q_rows", "k_row", "k_rows", "doc", "q_pos", "k_pos")
        key = content_key(part, names) if attention.dropout > 0 else b""
        for first in range(0, len(q_row), limits.max_rows):
            chunk = slice(first, first + limits.max_rows)
            call = _call(q_row[chunk], k_row[chunk], written, key and key + first.to_bytes(8, "little"))
            calls.setdefault((int(part["step"][0]), int(part["slot"][0])), []).append(call)
    return calls


def _call(q_row: np.ndarray, k_row: np.ndarray, written: np.ndarray, key: bytes) -> FusedCall:
    n, q, k = len(q_row), as_host_rows(q_row), as_host_rows(k_row)
    return FusedCall(
        layout="BSND",
        q=q,
        k=k,
        actual_seq_qlen=range(1, n + 1),
        actual_seq_kvlen=range(1, n + 1),
        sparse_mode=0,
        pre_tokens=NO_LIMIT,
        next_tokens=NO_LIMIT,
        uses_compressed_mask=False,
        visible_ranges=None,
        start_idx=None,
        bias_shift=None,
        padding=None,
        q_scatter=ScatterRows((), slice(0, n), q),
        k_scatter=ScatterRows((), slice(0, n), k),
        unwritten=mark_written(written, q),
        content_key=key,
    )
