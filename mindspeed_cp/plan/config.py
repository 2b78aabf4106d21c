"""What attention means and where it runs: the two inputs of a plan beside the documents."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_cp.errors import ConfigError

MASKS = ("causal", "full")


@dataclass(frozen=True)
class Topology:
    """nodes x ranks_per_node context-parallel ranks, numbered node by node.

    Raises:
        ConfigError: a number is below 1.
    """

    nodes: int = 1
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"Topology.{name} is {value!r}; valid: a whole number, 1 or more")

    @property
    def ranks(self) -> int:
        """Context-parallel ranks in all."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class AttentionConfig:
    """What one attention layer computes, on one tensor-parallel rank.

    Attributes:
        heads: query heads of this tensor-parallel rank.
        kv_heads: key/value heads; default: as many as query heads. Query head h reads kv head h // (heads / kv_heads).
        head_dim: width of q and k.
        head_dim_v: width of v and of the output; default: head_dim.
        mask: "causal" (a query sees itself and what comes before it in its document) or "full" (its whole document).
        window: (left, right), ALiBi and dropout belong to the public surface but not to this version: see `check`.
        scale: factor of q.k; default: head_dim ** -0.5.

    Raises:
        ConfigError: a value is out of range, or a feature is not in this version.
    """

    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # filled in: heads
    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # filled in: head_dim
    mask: str = "causal"
    window: tuple[int, int] | None = None
    alibi: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        self.check()

    @property
    def softmax_scale(self) -> float:
        """The factor of q.k that is used."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def check(self) -> None:
        """Raise ConfigError, naming the setting, its value and what is valid."""
        for name in ("heads", "kv_heads", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"attention.{name} is {value!r}; valid: a whole number, 1 or more")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"attention.kv_heads is {self.kv_heads}; valid: a divisor of attention.heads, which is {self.heads}"
            )
        if self.mask not in MASKS:
            raise ConfigError(f"attention.mask is {self.mask!r}; valid: {', '.join(MASKS)}")
        if self.scale is not None and not (isinstance(self.scale, (int, float)) and 0 < self.scale < math.inf):
            raise ConfigError(
                f"attention.scale is {self.scale!r}; valid: a finite number above 0, or None: head_dim ** -0.5"
            )
        if self.window is not None:
            raise ConfigError(
                f"attention.window is {self.window}; this version has no sliding window, so use None: a whole document "
                "is then visible, which is another model"
            )
        if self.alibi is not False:
            raise ConfigError("attention.alibi is set; this version has no ALiBi, use rotary positions (RoPE) instead")
        if self.dropout:
            raise ConfigError(
                f"attention.dropout is {self.dropout}; this version has no attention dropout, use 0.0 "
                "(dropout of hidden states, outside attention, is not affected)"
            )
