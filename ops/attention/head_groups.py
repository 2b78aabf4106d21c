"""Groups of a rank's heads, where query heads do not divide evenly over kv heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.ops.attention.contract import Heads
from mindspeed_cp.plan import AttentionConfig


@dataclass(frozen=True)
class HeadGroup:
    """Adjacent heads in which every kv head has the same number of query heads.

    Attributes:
        q, kv: heads of the rank's tensors.
        q_range: first and last-plus-one query head in the AttentionConfig.
    """

    q: slice
    kv: slice
    q_range: tuple[int, int]


@lru_cache(maxsize=64)
def uniform_head_groups(attention: AttentionConfig, heads: Heads) -> tuple[HeadGroup, ...]:
    """Split a rank's heads into groups that kernels for grouped-query attention accept as views.

    A range of query heads may begin and end within the group of a kv head, so that there are at most three groups:

        query heads   2 3 | 4 5 6 7  8 9 10 11 | 12       4 for each kv head
        kv heads       0  |    1         2     |  3

    Args:
        attention: configuration of the layer.
        heads: the rank's heads. kv heads that none of its query heads uses are left out.
    """
    heads_per_kv = attention.heads // attention.kv_heads
    (first, stop), kv_first = heads.q, heads.kv[0]
    groups: list[HeadGroup] = []
    count = 0
    for kv in range(first // heads_per_kv, -(-stop // heads_per_kv) if stop > first else 0):
        a, b = max(first, kv * heads_per_kv) - first, min(stop, (kv + 1) * heads_per_kv) - first
        if groups and b - a == count:
            last = groups.pop()
            q_start, kv_start = last.q.start, last.kv.start
        else:
            q_start, kv_start = a, kv - kv_first
        q_range = first + q_start, first + b
        groups.append(HeadGroup(slice(q_start, b), slice(kv_start, kv + 1 - kv_first), q_range))
        count = b - a
    return tuple(groups)


def contiguous_heads(x: Tensor, heads: slice) -> Tensor:
    """Return some heads, contiguous; x itself if it is contiguous and these are all heads."""
    return x[:, heads].contiguous()


def write_heads(total: Tensor, heads: slice, part: Tensor) -> None:
    """Write back heads that :func:`contiguous_heads` has copied; no effect if it returned the tensor itself."""
    if total.data_ptr() != part.data_ptr() or total.shape != part.shape:
        total[:, heads] = part


def pad_head_dim(x: Tensor, width: int) -> Tensor:
    """Pad the last dimension with zeros, which changes neither scores nor the other channels of outputs."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
