"""From tiles to as few calls of the fused operator as can be: one for each kind of block, whatever the documents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import expand
from mindspeed_cp.ops.attention.npu_alibi import alibi_blocks
from mindspeed_cp.ops.attention.npu_blocks import plain_blocks
from mindspeed_cp.ops.attention.npu_calls import (
    NO_LIMIT,
    Choice,
    FusedCall,
    Kind,
    Rows,
    compact,
    identity_of,
    ramps,
)
from mindspeed_cp.ops.attention.npu_fold import back_of
from mindspeed_cp.plan import CAUSAL, FULL, TILE, UNLIMITED, AttentionConfig

Lowering = dict[tuple[int, int], list[FusedCall]]


def lower(tiles: np.ndarray, rows: int, attention: AttentionConfig, choice: Choice) -> Lowering:
    """Calls for every (step, slot).

    Args:
        tiles: records of dtype TILE in the order they run.
        rows: the rank's queries, which no tile exceeds.
        attention: what is computed.
        choice: see there.

    Raises:
        ConfigError: a tile is larger than the operator can be called with.
    """
    if not len(tiles):
        return {}
    tiles = _within(tiles, choice.rows)
    new = (tiles["step"][1:] != tiles["step"][:-1]) | (tiles["slot"][1:] != tiles["slot"][:-1])
    place = np.concatenate([[0], np.cumsum(new)])
    with_bias = attention.slopes is not None
    blocks = alibi_blocks(tiles, place, attention, choice) if with_bias else plain_blocks(tiles, place, attention)
    out: Lowering = {}
    places = tiles[np.append(True, new)][["step", "slot"]].tolist()
    touched = np.zeros(rows, bool)
    for group in _groups(blocks, attention, choice):
        for a, b in _chunks(group, choice):
            call = _call(group[a:b], attention, choice, touched)
            out.setdefault(places[int(group["place"][0])], []).append(call)
    return out


def _within(tiles: np.ndarray, limit: int) -> np.ndarray:
    """Tiles of more keys than a call may have, cut: a full one into several, a causal one into a full one and its
    square."""
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
        own = int(tile["q_rows"]) if tile["mask"] == CAUSAL and tile["k_rows"] > limit else 0
        edges = [*range(k_row, end - own, limit), end - own] if tile["k_rows"] > limit else [k_row, end]
        for a, b in pairwise([*edges, end] if own else edges):
            piece = np.array([tile], TILE)
            piece["k_row"], piece["k_rows"], piece["k_pos"] = a, b - a, tile["k_pos"] + a - k_row
            piece["mask"] = FULL if own and b < end else tile["mask"]
            out.append(piece)
    return np.concatenate(out)


def _groups(blocks: np.ndarray, attention: AttentionConfig, choice: Choice) -> list[np.ndarray]:
    """Blocks that one call can take, limits aside."""
    group = blocks["place"] * len(Kind) + blocks["kind"]
    side = (blocks["kind"] == Kind.SIDE) | (blocks["kind"] == Kind.SIDE_UPPER)
    if (blocks["kind"] == Kind.PAIR).any():
        limits = np.where(blocks["kind"] == Kind.PAIR, np.stack([blocks["pre"], blocks["next"]]), 0)
        group = np.unique(np.stack([group, *limits]), axis=1, return_inverse=True)[1].reshape(-1)
    elif attention.slopes is not None and not choice.share:
        group = np.arange(len(blocks))
    elif side.any():
        turn = _rounds(blocks, side, group, attention, choice)
        group = group * (int(turn.max()) + 1) + turn
    order = np.argsort(group, kind="stable")
    group = group[order]
    return np.split(blocks[order], np.flatnonzero(group[1:] != group[:-1]) + 1)


def _rounds(
    blocks: np.ndarray, side: np.ndarray, group: np.ndarray, attention: AttentionConfig, choice: Choice
) -> np.ndarray:
    """Number of the call, out of those of one group (place and kind), that each block beside the diagonal joins.

    A call's start is as large as its largest square wants it. What is much nearer to its keys than that waits for
    another call, so that its bias is not rounded by more than its true value would be.
    """
    out = np.zeros(len(blocks), np.int64)
    slack = choice.excess / max(float(np.abs(attention.slopes).max()), 1e-300)  # type: ignore[arg-type]  # there are slopes
    wait = np.flatnonzero(side & (_ahead(blocks) + slack < blocks["k_rows"][side].max() - 1))
    turn = 0
    while len(wait):  # against the largest square of the same turn, place and kind
        most = np.zeros(int(group.max()) + 1, np.int64)
        same = side & (out == turn)
        np.maximum.at(most, group[same], blocks["k_rows"][same] - 1)
        wait = wait[_ahead(blocks[wait]) + slack < most[group[wait]]]
        turn += 1
        out[wait] = turn
    return out


def _ahead(blocks: np.ndarray) -> np.ndarray:
    """True distance between the first query and the first key of a block's sequence."""
    before = blocks["q_pos"] - blocks["k_pos"]
    return np.where(blocks["behind"] == 1, blocks["k_rows"] - blocks["q_rows"] - before, before)


def _chunks(blocks: np.ndarray, choice: Choice) -> list[tuple[int, int]]:
    """The blocks in as many calls as the operator's limits want."""
    if len(blocks) <= choice.sequences and max(blocks["size"].sum(), blocks["k_rows"].sum()) <= choice.rows:
        return [(0, len(blocks))]
    ends = np.cumsum(np.stack([np.ones(len(blocks), np.int64), blocks["size"], blocks["k_rows"]]), axis=1)
    limits, start, out = (choice.sequences, choice.rows, choice.rows), 0, []
    while start < len(blocks):
        done = ends[:, start - 1] if start else np.zeros(3, np.int64)
        stop = min(
            int(np.searchsorted(end, at + most, "right")) for end, at, most in zip(ends, done, limits, strict=True)
        )
        out.append((start, stop))
        start = stop
    return out


def _call(blocks: np.ndarray, attention: AttentionConfig, choice: Choice, touched: np.ndarray) -> FusedCall:
    """The call for blocks of one kind; notes in `touched` the rows of queries that it computes."""
    kind, with_bias = Kind(int(blocks["kind"][0])), attention.slopes is not None
    size, k_rows, behind = blocks["size"], blocks["k_rows"], blocks["behind"]
    q_at, k_at = np.cumsum(size) - size, np.cumsum(k_rows) - k_rows
    q_row = np.where(behind == 1, blocks["q_row"] + blocks["q_rows"] - 1, blocks["q_row"])
    k_row = np.where(behind == 1, blocks["k_row"] + k_rows - 1, blocks["k_row"])
    q: Rows = compact(ramps(q_row, size, 1 - 2 * behind, blocks["q_rows"]))
    spread = None if with_bias or attention.dropout > 0 else _with_gaps(blocks, choice)
    k: Rows = compact(ramps(k_row, k_rows, 1 - 2 * behind)) if spread is None else spread[0]
    cu_q, cu_k = (np.cumsum(size), np.cumsum(k_rows)) if spread is None else spread[1:]
    at = k_at if spread is None else blocks["k_row"] - spread[0].start
    q_back = back_of(blocks["q_row"], blocks["q_rows"], q_at, size, behind)
    k_back = back_of(blocks["k_row"], k_rows, at, k_rows, behind)
    starts, shift = _starts(kind, blocks, with_bias)
    mode, pre, next_, compressed = _mode(kind, blocks, attention)
    filled = size > blocks["q_rows"]
    padding = compact(expand((q_at + blocks["q_rows"])[filled], (size - blocks["q_rows"])[filled]))
    names = ("kind", "q_row", "q_rows", "k_rows", "doc", "q_pos", "k_pos")
    return FusedCall(
        layout="TND",
        q=q,
        k=k,
        cu_q=cu_q.tolist(),
        cu_k=cu_k.tolist(),
        sparse_mode=mode,
        pre=pre,
        next=next_,
        compressed=compressed,
        visible=None,
        starts=starts,
        shift=shift,
        padding=padding if filled.any() else None,
        q_back=q_back,
        k_back=k_back,
        fresh=touch(touched, q_back.target),
        identity=identity_of(blocks, names) if attention.dropout > 0 else b"",
    )


def touch(touched: np.ndarray, rows: Rows) -> bool | np.ndarray:
    """Which rows no call before has touched (True: all), noting that one has now."""
    seen = touched[rows]
    fresh = ~seen
    touched[rows] = True
    if fresh.all():
        return True
    return (np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows)[fresh]


def _with_gaps(blocks: np.ndarray, choice: Choice) -> tuple[slice, np.ndarray, np.ndarray] | None:
    """Keys as one run of the slot, in which what lies between two blocks is a sequence without queries, so that nothing
    is copied: that run, and the ends of all sequences. None where it does not do: blocks out of order, or limits."""
    start, stop = blocks["k_row"], blocks["k_row"] + blocks["k_rows"]
    gaps = start[1:] - stop[:-1]
    if not len(gaps) or (gaps < 0).any():
        return None
    there = np.flatnonzero(gaps > 0)
    keys = int(stop[-1] - start[0])
    enough = keys <= 3 * int(blocks["k_rows"].sum()) and keys <= choice.rows
    if not len(there) or not enough or len(blocks) + len(there) > choice.sequences:
        return None
    cu_q, cu_k = np.cumsum(blocks["size"]), stop - start[0]
    return (
        slice(int(start[0]), int(stop[-1])),
        np.insert(cu_q, there + 1, cu_q[there]),
        np.insert(cu_k, there + 1, cu_k[there] + gaps[there]),
    )


def _mode(kind: Kind, blocks: np.ndarray, attention: AttentionConfig) -> tuple[int, int, int, bool]:
    """sparse_mode, pre_tokens, next_tokens, and whether the compressed mask is given."""
    if kind in (Kind.ALL, Kind.SIDE):
        return 0, NO_LIMIT, NO_LIMIT, False
    largest = int(max(blocks["k_rows"].max(), blocks["size"].max()))
    left, right = attention.reach
    if kind == Kind.DIAGONAL:
        pre, next_ = left, right
    elif kind == Kind.PAIR:
        pre, next_ = int(blocks["pre"][0]), int(blocks["next"][0])
    else:
        pre, next_ = (min(left + right, UNLIMITED), 0) if kind == Kind.EDGE else (0, largest)
    pre, next_ = min(pre, largest), min(next_, largest)  # as far as the longest sequence: the same as no limit
    if pre >= largest and next_ >= largest:
        return 0, NO_LIMIT, NO_LIMIT, False
    if pre >= largest and next_ == 0:
        return 3, NO_LIMIT, NO_LIMIT, True
    return 4, pre, next_, True


def _starts(kind: Kind, blocks: np.ndarray, with_bias: bool) -> tuple[tuple[int, int] | None, np.ndarray | None]:
    """q_start_idx and kv_start_idx, and the rows' shift."""
    if not with_bias:
        return None, None
    if kind == Kind.DIAGONAL:
        return (0, 0), None
    ahead = _ahead(blocks)
    start = int(ahead[0]) if len(blocks) == 1 else int(blocks["k_rows"].max()) - 1
    shift = ahead - start
    return (start, 0), np.repeat(shift, blocks["size"]) if shift.any() else None
