"""The contract of the attention operator, which every backend fulfils.

TND layout: rows of all documents back to back, [rows, heads, dim], the last dimension contiguous; statistics are
lse = log(sum(exp(scores))), fp32 [rows, heads]. A backend gets the tiles of a rank and turns them into as few kernel
calls as it can, once for a plan; it then adds each (step, slot) to fp32 accumulators. The backward takes the GLOBAL out
and lse, so that the parts of a distributed attention are exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import AttentionConfig

#: (step, slot) -> what the backend made of the tiles there; opaque to the caller.
Lowered = Mapping[tuple[int, int], Sequence[Any]]

#: (seed, layer): with head, document and positions they decide which attention weights are dropped.
DropoutKey = tuple[int, int]


def checked_dropout_key(key: object) -> DropoutKey:
    """The key as Python's whole numbers.

    Raises:
        ConfigError: it is not (seed, layer), two whole numbers from 0 to below 2**63.
    """
    numbers = key if isinstance(key, (tuple, list)) and len(key) == 2 else ()
    whole = [int(n) for n in numbers if isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 0 <= n < 2**63]
    if len(whole) != 2:
        raise ConfigError(f"dropout_key is {key!r}; valid: (seed, layer), whole numbers from 0 to below 2**63")
    return whole[0], whole[1]


@dataclass(frozen=True)
class Heads:
    """The heads that a rank computes, out of those of an AttentionConfig.

    Attributes:
        q: first and last-plus-one query head.
        kv: first and last-plus-one kv head; they serve the query heads. Where heads do not divide evenly, query heads
            that share a kv head may be on two ranks, and the number of query heads for each kv head may differ.
    """

    q: tuple[int, int]
    kv: tuple[int, int]

    @staticmethod
    def all(attention: AttentionConfig) -> Heads:
        """All heads."""
        return Heads((0, attention.heads), (0, attention.kv_heads))


@dataclass(frozen=True)
class ForwardState:
    """What the forward reads and updates. `heads` below are those of `heads.q`.

    Attributes:
        q: [t, heads, head_dim].
        out: fp32 [t, heads, head_dim_v]; zero, or anything where every tile finds its rows all untouched or all
            touched: a tile on untouched rows is stored, not merged.
        lse: fp32 [t, heads], starts at -inf.
        heads: which heads these are.
        dropout: seed and layer, or None: nothing is dropped.
        kept: what the backend keeps of its calls for the backward, under names of its own; the states of a forward and
            of its backward share it.
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    heads: Heads
    dropout: DropoutKey | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BackwardState:
    """What the backward reads and updates. `heads` below are those of `heads.q`.

    Attributes:
        q: [t, heads, head_dim].
        out: [t, heads, head_dim_v] of q's type: the complete attention output, over all ranks.
        lse: fp32 [t, heads], complete.
        dout: [t, heads, head_dim_v], gradient of out.
        dq: fp32 [t, heads, head_dim], starts at 0.
        heads: which heads these are.
        dropout: as in the forward.
        kept: of the forward.
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dq: Tensor
    heads: Heads
    dropout: DropoutKey | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


class AttentionBackend(Protocol):
    """An implementation of attention for one kind of device.

    Attributes:
        name: the kind of device.
        key: tells backends apart that lower differently: the name and the options.
        deterministic: the same call gives the same bits every time, for any number of threads.
    """

    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def key(self) -> Hashable: ...

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """Raise ConfigError, naming setting, value, valid values and alternative, for what is not supported."""

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError, as `check`, for a device of the right kind that the kernels do not run on, or one without
        what they need; called before anything is sent."""

    def lower_forward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowered:
        """Kernel calls for the tiles (records of dtype TILE, in the order they run) of a rank with `rows` queries of
        type `dtype`."""

    def lower_backward(self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype) -> Lowered:
        """The same for the backward."""

    def place(self, calls: Sequence[Any], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """Make what the calls need on a device now, and not in the first layer that runs them."""

    def forward(
        self, calls: Sequence[Any], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """Add the tiles of one (step, slot) to state.out and state.lse.

        Args:
            calls: of that (step, slot).
            attention: what is computed.
            state: accumulators.
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
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Add the gradients of the tiles of one (step, slot) to state.dq, dk and dv (fp32, of the slot's shape)."""
