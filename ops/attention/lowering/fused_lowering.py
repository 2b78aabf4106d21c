"""Lowering of tiles to as few calls of the fused operator as possible: one for each kind of block, whatever the number
of documents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.lowering.blocks import alibi_blocks, plain_blocks
from mindspeed_cp.ops.attention.lowering.fused_call import (
    MAX_CALL_ROWS,
    NO_LIMIT,
    BlockKind,
    CallLimits,
    FusedCall,
    HostRows,
    ScatterRows,
    as_host_rows,
    content_key,
    mark_written,
    ramps,
    scatter_rows,
)
from mindspeed_cp.plan import BAND, CAUSAL, FULL, TILE, UNLIMITED, AttentionConfig
from mindspeed_cp.plan.tiles import visible_keys

FusedCalls = dict[tuple[int, int], list[FusedCall]]

#: Maximum number of calls that blocks with shared keys are split into.
MAX_LAYERS = 4


def lower_to_fused_calls(tiles: np.ndarray, rows: int, attention: AttentionConfig, limits: CallLimits) -> FusedCalls:
    """Return the calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in execution order.
        rows: number of the rank's queries.
        attention: configuration of the layer.
        limits: limits of one call.

    Raises:
        ConfigError: a tile exceeds the operator's limits and cannot be split.
    """
    if not len(tiles):
        return {}
    tiles = _split_tall_tiles(tiles, limits.max_rows)
    new = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    step_slot = np.concatenate([[0], np.cumsum(new)])
    with_bias = attention.slopes is not None
    blocks = (
        alibi_blocks(tiles, step_slot, attention, limits) if with_bias else plain_blocks(tiles, step_slot, attention)
    )
    calls: FusedCalls = {}
    step_slots = tiles[np.append(True, new)][["step", "slot"]].tolist()
    written = np.zeros(rows, bool)
    for group in _call_groups(blocks, attention, limits):
        for layer in [group] if with_bias else _split_by_shared_keys(group, attention, limits):
            for start, stop in _split_by_limits(layer, limits):
                call = _call(layer[start:stop], attention, limits, written)
                calls.setdefault(step_slots[int(group["step_slot"][0])], []).append(call)
    return calls


def _split_by_shared_keys(blocks: np.ndarray, attention: AttentionConfig, limits: CallLimits) -> list[np.ndarray]:
    """Return the blocks of one call, or of a few in each of which no key is in two blocks.

    Blocks that share keys, as the two chunks of a document that a zigzag rank holds share those before the first one,
    cost a call a copy of the keys, and the gradients of the copies a sum. The keys of other calls are views.
    """
    first, stop = blocks["k_row"], blocks["k_row"] + blocks["k_rows"]
    order = np.lexsort((stop, first))
    first, stop = first[order], stop[order]
    if (first[1:] >= np.maximum.accumulate(stop)[:-1]).all():
        return [blocks]
    elements_of_row = attention.kv_heads * (attention.head_dim + attention.head_dim_v)
    if int(blocks["k_rows"].sum()) * elements_of_row < limits.min_copies:
        return [blocks]
    ends: list[int] = []  # of the last block of each layer
    layer_of = np.empty(len(blocks), np.int64)
    for index, a, b in zip(order.tolist(), first.tolist(), stop.tolist(), strict=True):
        layer = next((i for i, end in enumerate(ends) if end <= a), len(ends))
        if layer == MAX_LAYERS:
            return [blocks]
        ends[layer : layer + 1] = [b]
        layer_of[index] = layer
    layers = [blocks[layer_of == layer] for layer in range(len(ends))]
    return layers if limits.key_gaps or all(isinstance(_keys(layer), slice) for layer in layers) else [blocks]


def _keys(blocks: np.ndarray) -> HostRows:
    """Return the rows of a call's keys, those of one block after the other."""
    k_row = np.where(blocks["reversed"] == 1, blocks["k_row"] + blocks["k_rows"] - 1, blocks["k_row"])
    return as_host_rows(ramps(k_row, blocks["k_rows"], 1 - 2 * blocks["reversed"]))


def _split_tall_tiles(tiles: np.ndarray, limit: int) -> np.ndarray:
    """Split tiles with more keys than a call may have: a full tile into several, a causal one into full tiles and its
    causal square."""
    tall = tiles["q_rows"] > limit
    long = tiles["k_rows"] > limit
    if (tall | (long & (tiles["mask"] != FULL) & (tiles["mask"] != CAUSAL))).any():
        raise ConfigError(
            f"a rank's attention has a tile of {tiles['q_rows'].max()} queries and {tiles['k_rows'].max()} keys of one "
            f"document; valid for the npu backend: {limit} of each at most; use more context-parallel ranks"
        )
    if not long.any():
        return tiles
    out = []
    for tile in tiles:
        k_row, end = int(tile["k_row"]), int(tile["k_row"] + tile["k_rows"])
        square = int(tile["q_rows"]) if tile["mask"] == CAUSAL and tile["k_rows"] > limit else 0
        edges = [*range(k_row, end - square, limit), end - square] if tile["k_rows"] > limit else [k_row, end]
        for a, b in pairwise([*edges, end] if square else edges):
            sub_tile = np.array([tile], TILE)
            sub_tile["k_row"], sub_tile["k_rows"], sub_tile["k_pos"] = a, b - a, tile["k_pos"] + a - k_row
            sub_tile["mask"] = FULL if square and b < end else tile["mask"]
            out.append(sub_tile)
    return np.concatenate(out)


def _call_groups(blocks: np.ndarray, attention: AttentionConfig, limits: CallLimits) -> list[np.ndarray]:
    """Return groups of blocks that can share a call, apart from the limits."""
    group = blocks["step_slot"] * len(BlockKind) + blocks["kind"]
    side = (blocks["kind"] == BlockKind.SIDE) | (blocks["kind"] == BlockKind.SIDE_UPPER)
    if (blocks["kind"] == BlockKind.PAIR).any():
        window = np.where(blocks["kind"] == BlockKind.PAIR, np.stack([blocks["pre_tokens"], blocks["next_tokens"]]), 0)
        group = np.unique(np.stack([group, *window]), axis=1, return_inverse=True)[1].reshape(-1)
    elif attention.slopes is not None and not limits.share_calls:
        group = np.arange(len(blocks))
    elif side.any():
        number = _call_numbers(blocks, side, group, attention, limits)
        group = group * (int(number.max()) + 1) + number
    order = np.argsort(group, kind="stable")
    group = group[order]
    return np.split(blocks[order], np.flatnonzero(group[1:] != group[:-1]) + 1)


def _call_numbers(
    blocks: np.ndarray, side: np.ndarray, group: np.ndarray, attention: AttentionConfig, limits: CallLimits
) -> np.ndarray:
    """Return the number of the call, within its group (step, slot and kind), of each block beside the diagonal.

    The largest square of a call determines its shared start. Squares that are much nearer to their keys go to a later
    call, because a larger start increases the rounding error of their bias (limits.max_bias_excess).
    """
    out = np.zeros(len(blocks), np.int64)
    slack = limits.max_bias_excess / max(float(np.abs(attention.slopes).max()), 1e-300)  # type: ignore[arg-type]  # gap_index are slopes
    wait = np.flatnonzero(side & (_first_distance(blocks) + slack < blocks["k_rows"][side].max() - 1))
    number = 0
    while len(wait):  # compare with the largest square of the same call
        largest = np.zeros(int(group.max()) + 1, np.int64)
        same = side & (out == number)
        np.maximum.at(largest, group[same], blocks["k_rows"][same] - 1)
        wait = wait[_first_distance(blocks[wait]) + slack < largest[group[wait]]]
        number += 1
        out[wait] = number
    return out


def _first_distance(blocks: np.ndarray) -> np.ndarray:
    """Return the true distance from the first key to the first query of each sequence."""
    before = blocks["q_pos"] - blocks["k_pos"]
    return np.where(blocks["reversed"] == 1, blocks["k_rows"] - blocks["q_rows"] - before, before)


def _split_by_limits(blocks: np.ndarray, limits: CallLimits) -> list[tuple[int, int]]:
    """Return (start, stop) of the blocks of each call, as few calls as the limits allow."""
    if len(blocks) <= limits.max_sequences and max(blocks["size"].sum(), blocks["k_rows"].sum()) <= limits.max_rows:
        return [(0, len(blocks))]
    ends = np.cumsum(np.stack([np.ones(len(blocks), np.int64), blocks["size"], blocks["k_rows"]]), axis=1)
    maxima, start, out = (limits.max_sequences, limits.max_rows, limits.max_rows), 0, []
    while start < len(blocks):
        done = ends[:, start - 1] if start else np.zeros(3, np.int64)
        stop = min(
            int(np.searchsorted(end, first + maximum, "right"))
            for end, first, maximum in zip(ends, done, maxima, strict=True)
        )
        out.append((start, stop))
        start = stop
    return out


def _call(blocks: np.ndarray, attention: AttentionConfig, limits: CallLimits, written: np.ndarray) -> FusedCall:
    """Return the call for blocks of one kind, and set `written` for its rows of queries."""
    kind, with_bias = BlockKind(int(blocks["kind"][0])), attention.slopes is not None
    size, k_rows, is_reversed = blocks["size"], blocks["k_rows"], blocks["reversed"]
    q_start, k_start = np.cumsum(size) - size, np.cumsum(k_rows) - k_rows
    q_row = np.where(is_reversed == 1, blocks["q_row"] + blocks["q_rows"] - 1, blocks["q_row"])
    q: HostRows = as_host_rows(ramps(q_row, size, 1 - 2 * is_reversed, blocks["q_rows"]))
    spreads = limits.key_gaps and not with_bias and attention.dropout == 0
    spread = _keys_with_gaps(blocks, limits) if spreads else None
    k = _keys(blocks) if spread is None else spread[0]
    actual_seq_qlen, actual_seq_kvlen = (np.cumsum(size), np.cumsum(k_rows)) if spread is None else spread[1:]
    k_start = k_start if spread is None else blocks["k_row"] - spread[0].start
    q_scatter = scatter_rows(blocks["q_row"], blocks["q_rows"], q_start, is_reversed)
    k_scatter = scatter_rows(blocks["k_row"], k_rows, k_start, is_reversed)
    start_idx, bias_shift = _start_indices(kind, blocks, with_bias)
    mode, pre_tokens, next_tokens, compressed = _sparse_mode(kind, blocks, attention)
    filled = size > blocks["q_rows"]
    padding = as_host_rows(ragged_arange((q_start + blocks["q_rows"])[filled], (size - blocks["q_rows"])[filled]))
    names = ("kind", "q_row", "q_rows", "k_rows", "doc", "q_pos", "k_pos")
    return FusedCall(
        layout="TND",
        q=q,
        k=k,
        actual_seq_qlen=actual_seq_qlen.tolist(),
        actual_seq_kvlen=actual_seq_kvlen.tolist(),
        sparse_mode=mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        uses_compressed_mask=compressed,
        visible_ranges=None,
        start_idx=start_idx,
        bias_shift=bias_shift,
        padding=padding if filled.any() else None,
        q_scatter=q_scatter,
        k_scatter=k_scatter,
        unwritten=mark_written(written, q_scatter.target),
        content_key=content_key(blocks, names) if attention.dropout > 0 else b"",
    )


def _keys_with_gaps(blocks: np.ndarray, limits: CallLimits) -> tuple[slice, np.ndarray, np.ndarray] | None:
    """Return the keys as one run of the slot, so that they need no copy, and the ends of all sequences; a gap between
    two blocks becomes a sequence without queries. None if the blocks are out of order, the gaps too large, or the
    limits exceeded."""
    start, stop = blocks["k_row"], blocks["k_row"] + blocks["k_rows"]
    gaps = start[1:] - stop[:-1]
    if not len(gaps) or (gaps < 0).any():
        return None
    gap_index = np.flatnonzero(gaps > 0)
    keys = int(stop[-1] - start[0])
    enough = keys <= 3 * int(blocks["k_rows"].sum()) and keys <= limits.max_rows
    if not len(gap_index) or not enough or len(blocks) + len(gap_index) > limits.max_sequences:
        return None
    actual_seq_qlen, actual_seq_kvlen = np.cumsum(blocks["size"]), stop - start[0]
    return (
        slice(int(start[0]), int(stop[-1])),
        np.insert(actual_seq_qlen, gap_index + 1, actual_seq_qlen[gap_index]),
        np.insert(actual_seq_kvlen, gap_index + 1, actual_seq_kvlen[gap_index] + gaps[gap_index]),
    )


def _sparse_mode(kind: BlockKind, blocks: np.ndarray, attention: AttentionConfig) -> tuple[int, int, int, bool]:
    """Return sparse_mode, pre_tokens, next_tokens, and True if the call needs the compressed mask."""
    if kind in (BlockKind.ALL, BlockKind.SIDE):
        return 0, NO_LIMIT, NO_LIMIT, False
    largest = int(max(blocks["k_rows"].max(), blocks["size"].max()))
    left, right = attention.visible_range
    if kind == BlockKind.DIAGONAL:
        left_tokens, right_tokens = left, right
    elif kind == BlockKind.PAIR:
        left_tokens, right_tokens = int(blocks["pre_tokens"][0]), int(blocks["next_tokens"][0])
    else:
        left_tokens, right_tokens = (min(left + right, UNLIMITED), 0) if kind == BlockKind.EDGE else (0, largest)
    left_tokens, right_tokens = (
        min(left_tokens, largest),
        min(right_tokens, largest),
    )  # a limit that no sequence reaches
    if left_tokens >= largest and right_tokens >= largest:
        return 0, NO_LIMIT, NO_LIMIT, False
    if left_tokens >= largest and right_tokens == 0:
        return 3, NO_LIMIT, NO_LIMIT, True
    return 4, left_tokens, right_tokens, True


def _start_indices(
    kind: BlockKind, blocks: np.ndarray, with_bias: bool
) -> tuple[tuple[int, int] | None, np.ndarray | None]:
    """Return (q_start_idx, kv_start_idx) and the bias_shift of each row."""
    if not with_bias:
        return None, None
    if kind == BlockKind.DIAGONAL:
        return (0, 0), None
    distance = _first_distance(blocks)
    start = int(distance[0]) if len(blocks) == 1 else int(blocks["k_rows"].max()) - 1
    shift = distance - start
    return (start, 0), np.repeat(shift, blocks["size"]) if shift.any() else None


# Lowering to one call for each (step, slot), with a mask of its own: for operators without packed sequences.
#
# The mask has the rows and keys of that step only. On the host it is stored as ranges of visible keys for each row of
# queries; the backend builds the matrix on the device:
#
#     ranges  0-3         mask   . . . # # #        # is hidden, as the operator has it
#             0-3                . . . # # #
#             3-4                # # # . # #
#             3-5                # # # . . #
#
# HostRows without a visible key, and keys that no row sees, are left out: every row of the mask has a visible key.


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
        out[int(step_tiles["step"][0]), int(step_tiles["slot"][0])] = [_masked_call(step_tiles, attention, written)]
    return out


def _masked_call(tiles: np.ndarray, attention: AttentionConfig, written: np.ndarray) -> FusedCall:
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
