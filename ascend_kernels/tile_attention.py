"""Flash attention over a plan's tiles by positions: causal, full, window, ALiBi from positions, grouped queries, lse in
and out. For devices whose own operator has no variable-length ALiBi, and for masks that none has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import check_tensor, current, grid, implementation_for, need, power_of_two
from mindspeed_cp.layout import expand
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig

#: No diagonal cuts: more than any context, small enough to be added to in 32 bits.
FAR = 2**30

#: Rows of a program's own block, of queries or in "keys" of keys, and of a block that it meets, by kind of device,
#: bytes of an element and kernel. Nothing was measured on a device. For GPUs: the largest that at 128 channels spill at
#: most 64 bytes by ptxas on sm_80 and sm_90 (docs/kernels.md has the table; in "keys", bf16 (64, 64) spills 280 on
#: sm_90, fp32 (64, 32) kilobytes), since then fewer programs read each key and value; in shared memory of 99 KiB, which
#: compute capability 8.6 and 8.9 have (an A100 163, an H100 227). With 8 warps and more than 128 registers one program
#: runs on an SM at a time: fewer than 255 buy nothing. For NPUs: what fits their buffers as far as sizes tell; CANN's
#: compiler has not seen them.
BLOCKS = {
    "cuda": {
        2: {"forward": (128, 64), "queries": (64, 64), "keys": (64, 32)},
        4: {"forward": (32, 32), "queries": (32, 32), "keys": (32, 32)},
    },
    "npu": {
        2: {"forward": (64, 64), "queries": (64, 32), "keys": (32, 64)},
        4: {"forward": (32, 32), "queries": (32, 32), "keys": (32, 32)},
    },
}

#: A block of wider heads has so many bytes at most, and WIDEST channels at most: of twice as many, "keys" spills up to
#: three kilobytes.
BLOCK_BYTES, WIDEST = 1 << 14, 512
WARPS, STAGES = 8, 2

#: Elements of `out` that a program of delta_kernel holds.
DELTA_ELEMENTS = 4096

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Which tiles each block of queries, or of keys, visits.

    Attributes:
        visits: int32 [visits, 8], see `device/tile_attention.py`; grouped by block.
        blocks: int32 [blocks, 4]: first row, first and last-plus-one visit, 0; the longest first.
        rows: of a block.
        tiles: int64 [tiles, 8], the tiles themselves, for the torch implementation.
    """

    visits: Tensor
    blocks: Tensor
    rows: int
    tiles: np.ndarray

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Rows of queries and of keys that there are at least."""
        q_row, q_rows, k_row, k_rows = self.tiles[:, :4].T
        return int((q_row + q_rows).max(initial=0)), int((k_row + k_rows).max(initial=0))

    @staticmethod
    def of(
        tiles: np.ndarray, attention: AttentionConfig, rows: int, side: str = "q", device: torch.device | str = "cpu"
    ) -> TileSchedule:
        """Of the tiles of one (step, slot).

        Args:
            tiles: records of dtype TILE.
            attention: its window counts for tiles of mask BAND.
            rows: of a block.
            side: "q" or "k": whose blocks.
            device: where the tables lie.
        """
        need(side in ("q", "k"), "side", repr(side), "'q' or 'k'")
        need(rows >= 1, "rows", rows, "1 or more")
        table = _table(tiles, attention)
        at = 0 if side == "q" else 2
        first, count = table[:, at], table[:, at + 1]
        begin, end = first // rows, (first + count - 1) // rows + 1
        block = expand(begin, end - begin)
        of = np.repeat(np.arange(len(table)), end - begin)
        order = np.argsort(block, kind="stable")
        block, of = block[order], of[order]
        starts = np.flatnonzero(np.diff(block, prepend=-1))
        stops = np.append(starts[1:], len(block))[: len(starts)]
        work = np.add.reduceat(_visible(table[of], block * rows, rows, side), starts) if len(starts) else starts
        longest = np.argsort(-work, kind="stable")
        blocks = np.stack([block[starts] * rows, starts, stops, np.zeros_like(starts)], 1)[longest]
        visits, found = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (table[of], blocks))
        return TileSchedule(visits, found, rows, table)


def _visible(table: np.ndarray, start: np.ndarray, rows: int, side: str) -> np.ndarray:
    """Rows of the other side that a block, from row `start` on, meets in each tile that it visits."""
    q_row, q_rows, k_row, k_rows, low, high = table[:, :6].T
    own, count, others = (q_row, q_rows, k_rows) if side == "q" else (k_row, k_rows, q_rows)
    first, last = np.maximum(start - own, 0), np.minimum(start - own + rows, count) - 1
    begin, end = (first + low, last + high) if side == "q" else (first - high, last - low)
    return np.maximum(np.minimum(end + 1, others) - np.maximum(begin, 0), 0)


def _table(tiles: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """int64 [tiles, 8]: q_row, q_rows, k_row, k_rows, low, high, distance, document."""
    left, right = attention.reach
    ahead = tiles["q_pos"] - tiles["k_pos"]
    band, causal = tiles["mask"] == BAND, tiles["mask"] == CAUSAL
    low = np.where(band, ahead - left, -FAR)
    high = np.where(band, ahead + right, np.where(causal, tiles["k_rows"] - tiles["q_rows"], FAR))
    names = ("q_row", "q_rows", "k_row", "k_rows")
    return np.stack(
        [*(tiles[name] for name in names), low.clip(-FAR, FAR), high.clip(-FAR, FAR), ahead, tiles["doc"]], 1
    )


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
    """Add what the tiles' queries see to the accumulators, as an online softmax does (Dao, arXiv 2307.08691).

    Args:
        q: [t, heads, dim]. k: [s, kv heads, dim]; kv heads divide heads, and those that share one follow each other.
            v: [s, kv heads, dim_v]. Contiguous, of one type: fp32, fp16 or bf16.
        out: fp32 [t, heads, dim_v], lse: fp32 [t, heads], updated. Rows of lse -inf may have anything in out. Rows of
            no tile keep what they have.
        schedule: of the tiles, by blocks of queries.
        scale: factor of q.k.
        slopes: fp32 [heads], ALiBi: -slope * |query position - key position| is added to the scaled scores; positions
            rise by one from row to row of a tile.
        implementation: see `mindspeed_cp.ascend_kernels.launch.implementation_for`.
    """
    _check(q, k, v, slopes, out, lse)
    _check_schedule(schedule, q, k, blocks_for(q.dtype, False, max(q.shape[2], v.shape[2]), q.device.type)[0])
    if implementation_for(q, implementation) == "triton":
        _launch("forward_kernel", schedule, q, k, v, (out, lse), scale, slopes, len(q))
        return
    for tile in schedule.tiles.tolist():
        rows, keys = slice(tile[0], tile[0] + tile[1]), slice(tile[2], tile[2] + tile[3])
        x, _, vs = _dense(q[rows], k[keys], v[keys], tile, scale, slopes)
        part_lse = x.logsumexp(-1)
        p = (x - part_lse.masked_fill(part_lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
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
    """Add the tiles' gradients, by the statistics of the whole attention: parts add up to it exactly.

    Args:
        q, k, v, scale, slopes, implementation: as in the forward.
        out: [t, heads, dim_v], lse: fp32 [t, heads]: complete. dout: [t, heads, dim_v], of q's type.
        dq, dk, dv: fp32, of the shapes of q, k and v, updated.
        by_queries, by_keys: the same tiles, by blocks of queries and of keys.
    """
    _check(q, k, v, slopes, out, lse, dout, (dq, dk, dv))
    blocks = blocks_for(q.dtype, True, max(q.shape[2], v.shape[2]), q.device.type)
    for schedule, own in zip((by_queries, by_keys), blocks, strict=True):
        _check_schedule(schedule, q, k, own)
    if implementation_for(q, implementation) == "triton":
        delta = _delta(out, dout)
        arguments = (dout, lse, delta)
        _launch("queries_kernel", by_queries, q, k, v, (*arguments, dq), scale, slopes, len(q))
        _launch("keys_kernel", by_keys, q, k, v, (*arguments, dk, dv), scale, slopes, len(k))
        return
    group = q.shape[1] // k.shape[1]
    for tile in by_queries.tiles.tolist():
        rows, keys = slice(tile[0], tile[0] + tile[1]), slice(tile[2], tile[2] + tile[3])
        x, ks, vs = _dense(q[rows], k[keys], v[keys], tile, scale, slopes)
        p = torch.where(x == float("-inf"), 0.0, (x - lse[rows].T.unsqueeze(-1)).exp())
        g, o = (t[rows].float().transpose(0, 1) for t in (dout, out))
        ds = p * (g @ vs.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        dq[rows] += (ds @ ks).transpose(0, 1)
        for total, part in ((dk, ds.transpose(1, 2) @ q[rows].float().transpose(0, 1)), (dv, p.transpose(1, 2) @ g)):
            total[keys] += part.view(-1, group, *part.shape[1:]).sum(1).transpose(0, 1)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, tile: list[int], scale: float, slopes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores fp32 [heads, rows, keys], -inf where nothing is seen; keys and values fp32 [heads, keys, dim]."""
    group = q.shape[1] // k.shape[1]
    ks, vs = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    ahead = torch.arange(len(k), device=q.device)[None, :] - torch.arange(len(q), device=q.device)[:, None]
    x = (q.float().transpose(0, 1) @ ks.transpose(1, 2)) * scale
    if slopes is not None:
        x = x - slopes[:, None, None] * (tile[6] - ahead).abs()
    return x.masked_fill((ahead < tile[4]) | (ahead > tile[5]), float("-inf")), ks, vs


def _check(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor | None = None,
    grads: tuple[Tensor, ...] = (),
) -> None:  # fmt: skip
    need(q.dtype == k.dtype == v.dtype, "q, k and v", f"{q.dtype}, {k.dtype}, {v.dtype}", "of one type")
    need(q.dtype in DTYPES, "q's type", q.dtype, "torch.float32, torch.bfloat16, torch.float16")
    for name, x in (("q", q), ("k", k), ("v", v)):
        need(x.dim() == 3 and min(x.shape[1:]) >= 1, f"{name}'s shape", list(x.shape), "[rows, heads, channels]")
    need(
        k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0,
        "the number of kv heads",
        k.shape[1],
        f"a divisor of {q.shape[1]}",
    )
    width = max(q.shape[2], v.shape[2])
    need(width <= WIDEST, "head_dim", width, f"up to {WIDEST}")
    rows = [*q.shape[:2], v.shape[2]]
    check_tensor("q", q, q.shape, q.dtype, q)
    check_tensor("k", k, [*k.shape[:2], q.shape[2]], q.dtype, q)
    check_tensor("v", v, [*k.shape[:2], v.shape[2]], q.dtype, q)
    check_tensor("out", out, rows, torch.float32 if dout is None else None, q)
    check_tensor("lse", lse, rows[:2], torch.float32, q)
    if slopes is not None:
        check_tensor("slopes", slopes, [q.shape[1]], torch.float32, q)
    if dout is not None:
        check_tensor("dout", dout, rows, q.dtype, q)
    for name, x, y in zip(("dq", "dk", "dv"), grads, (q, k, v), strict=False):
        check_tensor(name, x, y.shape, torch.float32, q)


def _check_schedule(schedule: TileSchedule, q: Tensor, k: Tensor, rows: int) -> None:
    need(schedule.rows == rows, "rows of the schedule's blocks", schedule.rows, f"{rows}, see blocks_for")
    need(schedule.visits.device == q.device, "the schedule", f"on {schedule.visits.device}", f"on {q.device}")
    for name, x, least in (("q", q, schedule.reach[0]), ("k", k, schedule.reach[1])):
        need(len(x) >= least, f"{name}'s number of rows", len(x), f"{least} or more, as the tiles name")


def block_of(kernel: str, dtype: torch.dtype, width: int = 128, device: str = "cuda") -> tuple[int, int]:
    """Rows of a program's own block and of a block that it meets.

    Args:
        kernel: "forward", "queries" or "keys".
        dtype: of the tensors.
        width: channels of a head.
        device: its kind; those that are not in BLOCKS take what "cuda" has.
    """
    own, other = BLOCKS.get(device, BLOCKS["cuda"])[dtype.itemsize][kernel]
    if width <= 128:
        return own, other
    most = max(16, BLOCK_BYTES // (power_of_two(width) * dtype.itemsize))
    return min(own, most), min(other, most)


def blocks_for(dtype: torch.dtype, backward: bool, width: int = 128, device: str = "cuda") -> tuple[int, int]:
    """Rows of a block of queries and of one of keys, for which schedules are made (:func:`block_of` says what the
    arguments are); the forward's are by queries alone."""
    kernels = ("queries", "keys") if backward else ("forward", "forward")
    rows, keys = (block_of(kernel, dtype, width, device)[0] for kernel in kernels)
    return rows, keys


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    from mindspeed_cp.ascend_kernels.device.tile_attention import delta_kernel

    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    if delta.numel():
        width = power_of_two(out.shape[-1])
        block = max(1, DELTA_ELEMENTS // width)
        blocks = -(-delta.numel() // block)
        with current(out):
            delta_kernel[grid(blocks)](
                out, dout, delta, delta.numel(), blocks, DIM_V=out.shape[-1], WIDTH_V=width, BLOCK=block
            )
    return delta


def _launch(
    name: str, schedule: TileSchedule, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Tensor, ...], scale: float,
    slopes: Tensor | None, rows: int,
) -> None:  # fmt: skip
    from mindspeed_cp.ascend_kernels.device import tile_attention

    if not len(schedule.blocks):
        return
    heads, kv_heads, count = q.shape[1], k.shape[1], len(schedule.blocks)
    own, other = block_of(name.removesuffix("_kernel"), q.dtype, max(q.shape[-1], v.shape[-1]), q.device.type)
    bm, bn = (other, own) if name == "keys_kernel" else (own, other)
    kernel = getattr(tile_attention, name)
    with current(q):
        kernel[grid(count * (kv_heads if name == "keys_kernel" else heads))](
            q, k, v, *rest, schedule.visits, schedule.blocks, q if slopes is None else slopes, rows, count,
            SCALE=scale, HEADS=heads, GROUP=heads // kv_heads, DIM=q.shape[-1], DIM_V=v.shape[-1],
            WIDTH=max(16, power_of_two(q.shape[-1])), WIDTH_V=max(16, power_of_two(v.shape[-1])), BM=bm, BN=bn,
            ALIBI=slopes is not None, DOT="ieee", num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
