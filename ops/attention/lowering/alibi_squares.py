r"""Tiles with ALiBi as squares, because the operator makes biases only where queries and keys are equally many.

It counts distances as |(j + kv_start) - (i + q_start)| with ONE pair of starts for all sequences of a call. Keys that
all lie before their queries need no more: a wrong start adds the same to every distance of a row, cancels in its
softmax, and is put right in the statistics. Keys that all lie behind become such by turning both sides round. So a tile
is cut where positions are equal, and everything beside that square shares a call, whatever the document::

    keys   c       a=x      y=d      b            c       x        b=y      d
        a  before  | DIAGONAL                  a  behind all keys
           before  |   DIAGONAL                x          DIAGONAL  | behind
        y  before  | before                    b            DIAGONAL| behind

What is beside it is a rectangle, under a window without a triangle: ALL of some rows, UPPER and ALL of the others. A
rectangle becomes squares as Euclid found the greatest common divisor, but where little is lost: there the queries of a
wide piece are filled up with repetitions of the last one, whose results are dropped. Keys are never filled up.
"""

from __future__ import annotations

import numpy as np

from mindspeed_cp.ops.attention.npu_blocks import part
from mindspeed_cp.ops.attention.npu_calls import BLOCK, Choice, Kind
from mindspeed_cp.plan import AttentionConfig


def alibi_blocks(tiles: np.ndarray, place: np.ndarray, attention: AttentionConfig, choice: Choice) -> np.ndarray:
    """Square blocks (records of dtype BLOCK: size == k_rows) of tiles (records of dtype TILE).

    Args:
        tiles: in the order they run.
        place: number of each tile's (step, slot).
        attention: its window and mask say what is visible.
        choice: how rectangles are cut.
    """
    if not len(tiles):
        return np.empty(0, BLOCK)
    blocks = np.zeros(len(tiles), BLOCK)
    for name in ("q_row", "q_rows", "k_row", "k_rows", "doc", "q_pos", "k_pos"):
        blocks[name] = tiles[name]
    blocks["tile"], blocks["place"] = np.arange(len(tiles)), place
    left, right = attention.reach
    n, m = blocks["q_rows"], blocks["k_rows"]
    a, c = blocks["q_pos"], blocks["k_pos"]
    b, d = a + n, c + m
    x, y = np.maximum(a, c), np.minimum(b, d)
    meets = x < y
    x, y = np.where(meets, x, 0), np.where(meets, y, 0)

    def rectangle(where: np.ndarray, q: tuple[np.ndarray, np.ndarray], k: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Positions q[0] .. q[1] - 1 against k[0] .. k[1] - 1 of some of the tiles."""
        sizes = [np.where(where, r[1] - r[0], 0) for r in (q, k)]
        return part(blocks, Kind.SIDE, q[0] - a, sizes[0], k[0] - c, sizes[1])

    before = [
        rectangle(~meets & (a >= d), (a, b), (c, d)),
        rectangle(meets & (c < a), (a, b), (c, a)),
        rectangle(meets & (b > d), (d, b), (x, d)),
    ]
    behind = [
        rectangle(~meets & (b <= c), (a, b), (c, d)),
        rectangle(meets & (a < c), (a, c), (c, d)),
        rectangle(meets & (d > b), (x, b), (b, d)),
    ]
    squares = rectangle(meets, (x, y), (x, y))
    squares["kind"], squares["size"] = Kind.DIAGONAL, squares["k_rows"]
    mirrored = _turned(np.concatenate(behind), back=False)  # as if positions went the other way
    found = [
        squares,
        _beside(np.concatenate(before), left, choice),
        _turned(_beside(mirrored, right, choice), back=True),
    ]
    out = np.concatenate(found)
    return out[np.argsort(out["tile"], kind="stable")]


def _beside(blocks: np.ndarray, reach: int, choice: Choice) -> np.ndarray:
    """Squares of rectangles whose keys all lie before the queries, where a query sees `reach` tokens back."""
    a, c = blocks["q_pos"], blocks["k_pos"]
    b, d = a + blocks["q_rows"], c + blocks["k_rows"]
    last, first = np.minimum(b, d + reach), np.maximum(c, a - reach)  # queries and keys that see and are seen
    blocks = part(blocks, Kind.SIDE, np.zeros_like(a), last - a, first - c, d - first)
    n, m = blocks["q_rows"], blocks["k_rows"]
    low = blocks["q_pos"] - blocks["k_pos"] - reach  # row i sees the keys from i + low on
    whole = np.clip(1 - low, 0, n)
    rest, at, zero = n - whole, whole + low, np.zeros_like(n)
    upper = part(blocks, Kind.SIDE_UPPER, whole, rest, at, rest)
    upper["size"] = upper["k_rows"]
    rectangles = [
        part(blocks, Kind.SIDE, zero, whole, zero, m),
        part(blocks, Kind.SIDE, whole, rest, at + rest, m - at - rest),
    ]
    return np.concatenate([upper, _squares(np.concatenate(rectangles), choice)])


def _turned(blocks: np.ndarray, back: bool) -> np.ndarray:
    """The same blocks with positions and rows negated, so that the last is the first; and back."""
    out = blocks.copy()
    for side in ("q", "k"):
        for name in ("_row", "_pos"):
            out[side + name] = 1 - out[side + name] - out[side + "_rows"]
    out["behind"] = int(back)
    return out


def _squares(blocks: np.ndarray, choice: Choice) -> np.ndarray:
    """Rectangles, all of whose pairs are visible, as squares."""
    found = []
    while len(blocks):
        n, m = blocks["q_rows"], blocks["k_rows"]
        many = np.maximum(1, np.maximum(m // np.maximum(n, choice.least), -(-m // choice.rows)))
        size = -(-m // many)
        fill = (m // many >= n) & ((size <= choice.small) | (4 * size <= 5 * n))
        found.append(_pieces(blocks[fill], many[fill]))
        blocks = blocks[~fill]
        n, m = blocks["q_rows"], blocks["k_rows"]
        side = np.minimum(n, m)
        squares, rest = _peeled(blocks, n > m, side)
        found.append(squares)
        blocks = rest
    return np.concatenate(found) if found else np.empty(0, BLOCK)


def _pieces(blocks: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Wide rectangles cut into so many pieces along the keys, their queries filled up."""
    of, turn = _repeated(many)
    first = turn * blocks["k_rows"][of] // many[of]
    last = (turn + 1) * blocks["k_rows"][of] // many[of]
    blocks = blocks[of]
    out = part(blocks, Kind.SIDE, 0 * first, blocks["q_rows"], first, last - first)
    out["size"] = out["k_rows"]
    return out


def _peeled(blocks: np.ndarray, tall: np.ndarray, side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As many whole squares of the shorter side as there are, and what is left of each rectangle."""
    n, m = blocks["q_rows"], blocks["k_rows"]
    many = np.where(tall, n, m) // side
    of, turn = _repeated(many)
    start, some = turn * side[of], side[of]
    zero = np.zeros_like(start)
    squares = part(blocks[of], Kind.SIDE, np.where(tall[of], start, zero), some, np.where(tall[of], zero, start), some)
    squares["size"] = squares["k_rows"]
    done, zero = many * side, np.zeros_like(many)
    q, k = np.where(tall, done, zero), np.where(tall, zero, done)
    return squares, part(blocks, Kind.SIDE, q, n - q, k, m - k)


def _repeated(many: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """0 0 0 1 1 ... and 0 1 2 0 1 ... for [3, 2, ...]."""
    of = np.repeat(np.arange(len(many)), many)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(many) - many, many)
