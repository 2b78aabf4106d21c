"""Flash attention over a plan's tiles by positions: causal, full, window, ALiBi from positions, grouped queries, lse in
and out. For devices whose own operator has no variable-length ALiBi, and for masks that none has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.ascend_kernels.launch import current, implementation_for, need, power_of_two
from mindspeed_cp.layout import expand
from mindspeed_cp.plan import BAND, CAUSAL, AttentionConfig

#: No diagonal cuts: more than any context, small enough to be added to in 32 bits.
FAR = 2**30

#: Rows of a block of queries and of one of keys, by bytes of an element: the largest that spill few registers on sm_80
#: and sm_90 at 128 channels (tests/ascend_kernels/compile_cuda.py). Not measured on a device.
BLOCKS = {2: (64, 64), 4: (32, 32)}
BACKWARD_BLOCKS = {2: (64, 32), 4: (32, 32)}

#: A block of wider heads has so many bytes at most, and WIDEST channels at most: what then fits into the shared memory
#: of an A100 (compiled, not run).
BLOCK_BYTES, WIDEST = 1 << 14, 512
WARPS, STAGES = 8, 2


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
    every = [q, k, v, out, lse, *grads, *(x for x in (slopes, dout) if x is not None)]
    need(q.dtype == k.dtype == v.dtype, "q, k and v", f"{q.dtype}, {k.dtype}, {v.dtype}", "of one type")
    need(
        k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0,
        "the number of kv heads",
        k.shape[1],
        f"a divisor of {q.shape[1]}",
    )
    need(slopes is None or list(slopes.shape) == [q.shape[1]], "slopes", "of another shape", f"[{q.shape[1]}]")
    rows = [*q.shape[:2], v.shape[2]]
    for name, x, shape in (("out", out, rows), ("lse", lse, rows[:2]), ("dout", dout, rows)):
        need(x is None or list(x.shape) == shape, name, "of another shape", str(shape))
    summed = (lse, *grads, *([out] if dout is None else []))
    need(all(x.dtype == torch.float32 for x in summed), "lse, or what is added to", "not fp32", "fp32")
    need(dout is None or dout.dtype == q.dtype, "dout", "of another type", str(q.dtype))
    for x, y in zip(grads, (q, k, v), strict=False):
        need(x.shape == y.shape, "a gradient", f"of shape {list(x.shape)}", f"{list(y.shape)}")
    need(all(x.is_contiguous() for x in every), "a tensor", "not contiguous", "contiguous")
    need(len({x.device for x in every}) == 1, "the tensors", "on several devices", "on one")
    width = max(q.shape[2], v.shape[2])
    need(width <= WIDEST, "head_dim", width, f"up to {WIDEST}")


def blocks_for(dtype: torch.dtype, backward: bool, width: int = 128) -> tuple[int, int]:
    """Rows of a block of queries and of one of keys, for heads of so many channels."""
    most = max(16, BLOCK_BYTES // (power_of_two(width) * dtype.itemsize)) if width > 128 else 64
    rows, keys = (BACKWARD_BLOCKS if backward else BLOCKS)[dtype.itemsize]
    return min(rows, most), min(keys, most)


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    from mindspeed_cp.ascend_kernels.device.tile_attention import delta_kernel

    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    if delta.numel():
        width = power_of_two(out.shape[-1])
        block = max(1, 4096 // width)
        with current(out):
            delta_kernel[(-(-delta.numel() // block),)](
                out, dout, delta, delta.numel(), DIM_V=out.shape[-1], WIDTH_V=width, BLOCK=block
            )
    return delta


def _launch(
    name: str, schedule: TileSchedule, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Tensor, ...], scale: float,
    slopes: Tensor | None, rows: int,
) -> None:  # fmt: skip
    from mindspeed_cp.ascend_kernels.device import tile_attention

    if not len(schedule.blocks):
        return
    heads, kv_heads = q.shape[1], k.shape[1]
    bm, bn = blocks_for(q.dtype, name != "forward_kernel", max(q.shape[-1], v.shape[-1]))
    own = bn if name == "keys_kernel" else bm
    need(schedule.rows == own, "rows of the schedule's blocks", schedule.rows, f"{own}, see blocks_for")
    need(schedule.visits.device == q.device, "the schedule", f"on {schedule.visits.device}", f"on {q.device}")
    kernel = getattr(tile_attention, name)
    with current(q):
        kernel[(len(schedule.blocks), kv_heads if name == "keys_kernel" else heads)](
            q, k, v, *rest, schedule.visits, schedule.blocks, q if slopes is None else slopes, rows,
            SCALE=scale, HEADS=heads, GROUP=heads // kv_heads, DIM=q.shape[-1], DIM_V=v.shape[-1],
            WIDTH=max(16, power_of_two(q.shape[-1])), WIDTH_V=max(16, power_of_two(v.shape[-1])), BM=bm, BN=bn,
            ALIBI=slopes is not None, DOT="ieee", num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
