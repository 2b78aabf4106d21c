"""Flash attention over the tiles of a plan: causal, full, window, ALiBi by positions, grouped queries; takes and
returns lse. For devices whose own operator has no variable-length ALiBi, and for masks that no operator has.
Tables tell the kernels which tiles each block of rows visits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import (
    check_memory,
    device_guard,
    implementation_for,
    launch_grid,
    next_power_of_2,
)
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig

#: Value of `low` (negated) and `high` where no diagonal cuts: larger than any context, no overflow in int32 sums.
NO_DIAGONAL = 2**30

#: (rows of a program's own block, rows of a block that it visits), by device type, bytes per element and kernel. The
#: own block has queries, in "dkdv" keys. GPUs: with LAUNCH_OPTIONS, the fastest or near it of those timed on an H200 at
#: 128 channels (benchmarks/results/kernels.md) that fit the 99 KiB of shared memory of compute
#: capability 8.6 and 8.9 there. NPUs: what fits their buffers by size; CANN's compiler has not seen them.
BLOCK_ROWS = {
    "cuda": {
        2: {"forward": (64, 64), "dq": (64, 64), "dkdv": (64, 64)},
        4: {"forward": (32, 32), "dq": (32, 32), "dkdv": (32, 32)},
    },
    "npu": {
        2: {"forward": (64, 64), "dq": (64, 32), "dkdv": (32, 64)},
        4: {"forward": (32, 32), "dq": (32, 32), "dkdv": (32, 32)},
    },
}

#: (warps, stages) of launches on GPUs, by bytes per element and kernel, for heads of up to 128 channels; of up to 256
#: channels in two bytes; and of others, which were not timed. triton-ascend reads neither.
LAUNCH_OPTIONS = {
    2: {"forward": (4, 3), "dq": (4, 2), "dkdv": (4, 2)},
    4: {"forward": (4, 2), "dq": (4, 2), "dkdv": (4, 2)},
}
WIDE_LAUNCH_OPTIONS, OTHER_LAUNCH_OPTIONS = (4, 2), (8, 2)

#: Maximum bytes of a block of heads wider than 128 channels, and the maximum number of channels: with twice as many
#: bytes "dkdv" spills up to three kilobytes.
BLOCK_BYTES, TILE_MAX_HEAD_DIM = 1 << 14, 512


def block_rows(kernel: str, dtype: torch.dtype, width: int = 128, device: str = "cuda") -> tuple[int, int]:
    """Return the rows of a program's own block and of a block that it visits.

    Args:
        kernel: "forward", "dq" or "dkdv".
        dtype: type of q, k and v.
        width: channels of a head.
        device: device type; types without an entry in BLOCK_ROWS use that of "cuda".
    """
    own, visited = BLOCK_ROWS.get(device, BLOCK_ROWS["cuda"])[dtype.itemsize][kernel]
    if width <= 128:
        return own, visited
    most_rows = max(16, BLOCK_BYTES // (next_power_of_2(width) * dtype.itemsize))
    return min(own, most_rows), min(visited, most_rows)


def launch_options(kernel: str, dtype: torch.dtype, width: int = 128) -> tuple[int, int]:
    """Return the warps and the stages of a launch; arguments as for :func:`block_rows`."""
    if width <= 128:
        return LAUNCH_OPTIONS[dtype.itemsize][kernel]
    return WIDE_LAUNCH_OPTIONS if width <= 256 and dtype.itemsize == 2 else OTHER_LAUNCH_OPTIONS


def schedule_block_rows(dtype: torch.dtype, backward: bool, width: int = 128, device: str = "cuda") -> tuple[int, int]:
    """Return the rows of a block of queries and of a block of keys for which schedules are made; arguments as for
    :func:`block_rows`. The forward uses the first number only."""
    kernels = ("dq", "dkdv") if backward else ("forward", "forward")
    rows, keys = (block_rows(kernel, dtype, width, device)[0] for kernel in kernels)
    return rows, keys


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Tiles that each block of queries, or of keys, visits.

    Attributes:
        visits: int32 [visits, 8], grouped by block; columns in `device/tile_attention.py`.
        blocks: int32 [blocks, 4]: first row, first and last-plus-one visit, 0; longest block first.
        rows: rows of a block.
        tiles: int64 [tiles, 8], the tiles themselves, for the torch implementation.
    """

    visits: Tensor
    blocks: Tensor
    rows: int
    tiles: np.ndarray

    @staticmethod
    def of(
        tiles: np.ndarray, attention: AttentionConfig, rows: int, side: str = "q", device: torch.device | str = "cpu"
    ) -> TileSchedule:
        """Build the schedule for the tiles of one (step, slot).

        Args:
            tiles: records of dtype TILE.
            attention: its window applies to tiles with mask BAND.
            rows: rows of a block.
            side: "q" or "k": blocks of queries or of keys.
            device: device of the tables.
        """
        table = _tile_table(tiles, attention)
        column = 0 if side == "q" else 2
        first, count = table[:, column], table[:, column + 1]
        begin, end = first // rows, (first + count - 1) // rows + 1
        block = ragged_arange(begin, end - begin)
        tile = np.repeat(np.arange(len(table)), end - begin)
        order = np.argsort(block, kind="stable")
        block, tile = block[order], tile[order]
        starts = np.flatnonzero(np.diff(block, prepend=-1))
        stops = np.append(starts[1:], len(block))[: len(starts)]
        work = np.add.reduceat(_visited_rows(table[tile], block * rows, rows, side), starts) if len(starts) else starts
        longest = np.argsort(-work, kind="stable")
        blocks = np.stack([block[starts] * rows, starts, stops, np.zeros_like(starts)], 1)[longest]
        visits, on_device = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (table[tile], blocks))
        return TileSchedule(visits, on_device, rows, table)


def _visited_rows(table: np.ndarray, start: np.ndarray, rows: int, side: str) -> np.ndarray:
    """Return, for each visit, how many rows of the other side the block from row `start` on meets."""
    q_row, q_rows, k_row, k_rows, low, high = table[:, :6].T
    own_row, own_rows, other_rows = (q_row, q_rows, k_rows) if side == "q" else (k_row, k_rows, q_rows)
    first, last = np.maximum(start - own_row, 0), np.minimum(start - own_row + rows, own_rows) - 1
    begin, end = (first + low, last + high) if side == "q" else (first - high, last - low)
    return np.maximum(np.minimum(end + 1, other_rows) - np.maximum(begin, 0), 0)


def _tile_table(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Return int64 [tiles, 8]: q_row, q_rows, k_row, k_rows, low, high, distance, document."""
    left, right = attention.visible_range
    distance = tiles["q_pos"] - tiles["k_pos"]
    band, causal = tiles["mask"] == BAND, tiles["mask"] == CAUSAL
    low = np.where(band, distance - left, -NO_DIAGONAL).clip(-NO_DIAGONAL, NO_DIAGONAL)
    high = np.where(band, distance + right, np.where(causal, tiles["k_rows"] - tiles["q_rows"], NO_DIAGONAL))
    rows = [tiles[name] for name in ("q_row", "q_rows", "k_row", "k_rows")]
    return np.stack([*rows, low, high.clip(-NO_DIAGONAL, NO_DIAGONAL), distance, tiles["doc"]], 1)


#: Elements of `out` that one program of delta_kernel holds.
DELTA_ELEMENTS = 4096

TILE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tile_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: TileSchedule,
    scale: float,
    slopes: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """Add the attention of the tiles to the accumulators by online softmax (Dao, arXiv 2307.08691).

    Args:
        q: [t, heads, dim].
        k: [s, kv heads, dim]. kv heads divide heads; query heads that share a kv head are adjacent.
        v: [s, kv heads, dim_v]. q, k and v are contiguous and of one type: fp32, fp16 or bf16.
        out: fp32 [t, heads, dim_v], updated. Ignored where lse is -inf. Rows outside all tiles do not change.
        lse: fp32 [t, heads], updated.
        schedule: the tiles by blocks of queries, of `schedule_block_rows` rows.
        scale: factor of q.k.
        slopes: fp32 [heads], ALiBi: -slope * |query position - key position| is added to the scaled scores; positions
            rise by one from row to row of a tile.
        implementation: see `mindspeed_cp.ascend_kernels.launch.implementation_for`.
    """
    check_memory(q=q, k=k, v=v, out=out, lse=lse, slopes=slopes, schedule=schedule.visits)
    if implementation_for(q, implementation) == "triton":
        _launch("forward_kernel", schedule, q, k, v, (out, lse), scale, slopes, len(q))
        return
    for tile in schedule.tiles.tolist():
        rows, keys = slice(tile[0], tile[0] + tile[1]), slice(tile[2], tile[2] + tile[3])
        scores, _, vs = _dense_scores(q[rows], k[keys], v[keys], tile, scale, slopes)
        part_lse = scores.logsumexp(-1)
        p = (scores - part_lse.masked_fill(part_lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
        old = lse[rows].T
        new = torch.logaddexp(old, part_lse)
        safe = new.masked_fill(new == float("-inf"), 0.0)
        kept, added = (old - safe).exp().unsqueeze(-1), (part_lse - safe).exp().unsqueeze(-1)
        was = out[rows].transpose(0, 1).masked_fill((old == float("-inf")).unsqueeze(-1), 0.0)
        out[rows] = (was * kept + (p @ vs) * added).transpose(0, 1)
        lse[rows] = new.T


def tile_attention_backward_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    by_queries: TileSchedule,
    by_keys: TileSchedule,
    scale: float,
    slopes: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """Add the gradients of the tiles, computed from the complete out and lse, so that the gradients of parts add up.

    Args:
        q, k, v, scale, slopes, implementation: as for :func:`tile_attention_`.
        out: [t, heads, dim_v], complete output over all keys.
        lse: fp32 [t, heads], complete.
        dout: [t, heads, dim_v], gradient of out, of q's type.
        dq, dk, dv: fp32, of the shapes of q, k and v, updated.
        by_queries, by_keys: the same tiles, by blocks of queries and of keys.
    """
    check_memory(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, slopes=slopes)
    if implementation_for(q, implementation) == "triton":
        delta = _delta(out, dout)
        arguments = (dout, lse, delta)
        _launch("dq_kernel", by_queries, q, k, v, (*arguments, dq), scale, slopes, len(q))
        _launch("dkdv_kernel", by_keys, q, k, v, (*arguments, dk, dv), scale, slopes, len(k))
        return
    group = q.shape[1] // k.shape[1]
    for tile in by_queries.tiles.tolist():
        rows, keys = slice(tile[0], tile[0] + tile[1]), slice(tile[2], tile[2] + tile[3])
        scores, ks, vs = _dense_scores(q[rows], k[keys], v[keys], tile, scale, slopes)
        p = torch.where(scores == float("-inf"), 0.0, (scores - lse[rows].T.unsqueeze(-1)).exp())
        g, o = (t[rows].float().transpose(0, 1) for t in (dout, out))
        ds = p * (g @ vs.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        dq[rows] += (ds @ ks).transpose(0, 1)
        for total, part in ((dk, ds.transpose(1, 2) @ q[rows].float().transpose(0, 1)), (dv, p.transpose(1, 2) @ g)):
            total[keys] += part.view(-1, group, *part.shape[1:]).sum(1).transpose(0, 1)


def _dense_scores(
    q: Tensor, k: Tensor, v: Tensor, tile: list[int], scale: float, slopes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores fp32 [heads, rows, keys], -inf where masked, and keys and values fp32 [heads, keys, dim]."""
    group = q.shape[1] // k.shape[1]
    ks, vs = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    ahead = torch.arange(len(k), device=q.device)[None, :] - torch.arange(len(q), device=q.device)[:, None]
    scores = (q.float().transpose(0, 1) @ ks.transpose(1, 2)) * scale
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (tile[6] - ahead).abs()
    return scores.masked_fill((ahead < tile[4]) | (ahead > tile[5]), float("-inf")), ks, vs


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    from mindspeed_cp.ascend_kernels.device.tile_attention import delta_kernel

    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    if delta.numel():
        width = next_power_of_2(out.shape[-1])
        block = max(1, DELTA_ELEMENTS // width)
        blocks = -(-delta.numel() // block)
        with device_guard(out):
            delta_kernel[launch_grid(blocks)](
                out, dout, delta, delta.numel(), blocks, DIM_V=out.shape[-1], WIDTH_V=width, BLOCK=block
            )
    return delta


def _launch(
    name: str, schedule: TileSchedule, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Tensor, ...], scale: float,
    slopes: Tensor | None, rows: int, blocks: tuple[int, int] | None = None, options: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Launch a kernel on the blocks of a schedule; blocks and options: of `block_rows` and `launch_options`, or what a
    benchmark times instead."""
    from mindspeed_cp.ascend_kernels.device import tile_attention

    if not len(schedule.blocks):
        return
    heads, kv_heads, count = q.shape[1], k.shape[1], len(schedule.blocks)
    kind = name.removesuffix("_kernel")
    width = max(q.shape[-1], v.shape[-1])
    own, visited = blocks or block_rows(kind, q.dtype, width, q.device.type)
    warps, stages = options or launch_options(kind, q.dtype, width)
    bm, bn = (visited, own) if kind == "dkdv" else (own, visited)
    kernel = getattr(tile_attention, name)
    with device_guard(q):
        kernel[launch_grid(count * (kv_heads if kind == "dkdv" else heads))](
            q, k, v, *rest, schedule.visits, schedule.blocks, q if slopes is None else slopes, rows, count,
            SCALE=scale, HEADS=heads, GROUP=heads // kv_heads, DIM=q.shape[-1], DIM_V=v.shape[-1],
            WIDTH=max(16, next_power_of_2(q.shape[-1])), WIDTH_V=max(16, next_power_of_2(v.shape[-1])), BM=bm, BN=bn,
            ALIBI=slopes is not None, DOT="ieee", num_warps=warps, num_stages=stages,
        )  # fmt: skip
