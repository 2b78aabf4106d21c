"""Heads of a rank, where query heads do not divide evenly over kv heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from mindspeed_cp.ops.attention.contract import Heads
from mindspeed_cp.plan import AttentionConfig


@dataclass(frozen=True)
class EvenPart:
    """Heads next to each other of which every kv head serves the same number of query heads.

    Attributes:
        q, kv: which heads of the rank's tensors.
        first: number of its first query head in the AttentionConfig.
    """

    q: slice
    kv: slice
    first: int

    @property
    def numbers(self) -> tuple[int, int]:
        """First and last-plus-one query head in the AttentionConfig."""
        return self.first, self.first + self.q.stop - self.q.start


@lru_cache(maxsize=64)
def even_parts(attention: AttentionConfig, heads: Heads) -> tuple[EvenPart, ...]:
    """A rank's heads as parts that kernels for grouped heads can take as they are: views, nothing is copied.

    A range of query heads begins and ends anywhere in the group of a kv head, so there are three parts at most:

        query heads   2 3 | 4 5 6 7  8 9 10 11 | 12       4 for each kv head
        kv heads       0  |    1         2     |  3

    Args:
        attention: all heads.
        heads: the rank's. kv heads that none of its query heads reads are left out.
    """
    each = attention.heads // attention.kv_heads
    (first, stop), kv_first = heads.q, heads.kv[0]
    parts: list[EvenPart] = []
    shared = 0
    for kv in range(first // each, -(-stop // each) if stop > first else 0):
        a, b = max(first, kv * each) - first, min(stop, (kv + 1) * each) - first
        if parts and b - a == shared:
            last = parts.pop()
            parts.append(EvenPart(slice(last.q.start, b), slice(last.kv.start, kv + 1 - kv_first), last.first))
        else:
            parts.append(EvenPart(slice(a, b), slice(kv - kv_first, kv + 1 - kv_first), first + a))
        shared = b - a
    return tuple(parts)


def whole(x: Tensor, heads: slice) -> Tensor:
    """Some heads, contiguous: x itself where they are all and it is."""
    return x[:, heads].contiguous()


def put_back(total: Tensor, heads: slice, part: Tensor) -> None:
    """What :func:`whole` has copied, to where it came from."""
    if total.data_ptr() != part.data_ptr() or total.shape != part.shape:
        total[:, heads] = part
