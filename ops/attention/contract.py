"""The contract of an attention backend.

TND layout: rows of all documents back to back, [rows, heads, dim], the last dimension contiguous; statistics are
lse = log(sum(exp(scores))), fp32 [rows, heads]. A backend lowers the tiles of a rank to as few kernel calls as
possible, once for a plan; each layer then gives the result of each (step, slot) to accumulators. The backward takes the
GLOBAL out and lse, so that the gradients of the parts of a distributed attention are exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.accumulators import GradientAccumulator, OutputAccumulator
from mindspeed_cp.plan import AttentionConfig

#: (step, slot) -> calls of the backend for the tiles there; opaque to the caller.
LoweredCalls = Mapping[tuple[int, int], Sequence[Any]]

#: (seed, layer). Together with head, document and positions it determines which attention weights are dropped.
DropoutKey = tuple[int, int]


def checked_dropout_key(key: object) -> DropoutKey:
    """Return the key as Python integers.

    Raises:
        ConfigError: the key is not (seed, layer), two integers from 0 to below 2**63.
    """
    numbers = key if isinstance(key, (tuple, list)) and len(key) == 2 else ()
    whole = [int(n) for n in numbers if isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 0 <= n < 2**63]
    if len(whole) != 2:
        raise ConfigError(f"dropout_key is {key!r}; valid: (seed, layer), whole numbers from 0 to below 2**63")
    return whole[0], whole[1]


def check_dtype(kernel: str, dtype: torch.dtype, supported: Sequence[torch.dtype]) -> None:
    """Raise ConfigError unless the kernel (a phrase, for the error text) supports the type."""
    if dtype not in supported:
        valid = ", ".join(str(valid_dtype)[6:] for valid_dtype in supported)
        raise ConfigError(f"dtype is {dtype}; {kernel} supports {valid}")


def check_choice(name: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ConfigError unless an option of a backend has one of the valid values."""
    if value not in valid:
        raise ConfigError(f"{name} is {value!r}; valid: {', '.join(valid)}")


@dataclass(frozen=True)
class Heads:
    """The heads of an AttentionConfig that a rank computes.

    Attributes:
        q: first and last-plus-one query head.
        kv: first and last-plus-one kv head of these query heads. Where heads do not divide evenly, query heads that
            share a kv head may be on two ranks, and the number of query heads for each kv head may differ.
    """

    q: tuple[int, int]
    kv: tuple[int, int]

    @staticmethod
    def all(attention: AttentionConfig) -> Heads:
        """Return all heads of a layer."""
        return Heads((0, attention.heads), (0, attention.kv_heads))


@dataclass(frozen=True)
class ForwardState:
    """Inputs and results of the forward. Dimension `heads` has the heads of `heads.q`.

    Attributes:
        q: [t, heads, head_dim].
        output: out [t, heads, head_dim_v] and lse [t, heads]; a result on rows without one is stored, not merged.
        heads: the rank's heads.
        dropout: seed and layer; None: no dropout.
        saved: data that the backend saves in the forward for the backward, under keys of its own. The backward gets the
            same dict.
    """

    q: Tensor
    output: OutputAccumulator
    heads: Heads
    dropout: DropoutKey | None = None
    saved: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BackwardState:
    """Inputs and results of the backward. Dimension `heads` has the heads of `heads.q`.

    Attributes:
        q: [t, heads, head_dim].
        out: [t, heads, head_dim_v] of q's type: the complete attention output over all ranks.
        lse: fp32 [t, heads], complete.
        dout: [t, heads, head_dim_v], gradient of out.
        dq: sum of gradients, [t, heads, head_dim].
        heads, dropout: as in the forward.
        saved: filled by the forward.
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dq: GradientAccumulator
    heads: Heads
    dropout: DropoutKey | None = None
    saved: dict[Any, Any] = field(default_factory=dict)


class AttentionBackend(Protocol):
    """An implementation of attention for one device type.

    Attributes:
        name: device type.
        key: name and options; backends that lower differently have different keys.
        deterministic: True if the same call gives the same bits every time, for any number of threads.
    """

    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def key(self) -> Hashable: ...

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """Raise ConfigError with setting, value, valid values and alternative if the attention is not supported."""

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError if the kernels do not run on this device or lack a package. Called before any message is
        sent."""

    def lower(
        self, direction: str, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> LoweredCalls:
        """Return the kernel calls of a direction.

        Args:
            direction: "forward" or "backward".
            tiles: records of dtype TILE in execution order.
            rows: number of the rank's queries.
            attention: configuration of the layer.
            dtype: type of q, k and v.
        """

    def prepare(self, calls: Sequence[Any], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """Build the device tensors that the calls need ahead of the first layer that runs them."""

    def forward(
        self, calls: Sequence[Any], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """Merge the results of the tiles of one (step, slot) into state.output.

        Args:
            calls: lowered calls of the (step, slot).
            attention: configuration of the layer.
            state: inputs and accumulators.
            k: the slot's keys [slot rows, kv heads, head_dim].
            v: the slot's values [slot rows, kv heads, head_dim_v].
        """

    def backward(
        self,
        calls: Sequence[Any],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: GradientAccumulator,
        dv: GradientAccumulator,
    ) -> None:
        """Add the gradients of the tiles of one (step, slot) to state.dq, dk and dv (of the slot's shape)."""


# Groups of a rank's heads, where query heads do not divide evenly over kv heads.


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
