"""What attention means and where it runs: the two inputs of a plan beside the documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.layout import is_whole

MASKS = ("causal", "full")

#: A reach that no document exceeds (their lengths are below 2**31).
UNLIMITED = 2**31

#: No count of heads, channels or rounds is larger in earnest, and none of ranks; their products then fit into 64 bits.
MOST, MOST_RANKS = 10**9, 10**6

#: Kernels take slopes and scale in fp32.
LARGEST_FP32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Topology:
    """nodes x ranks_per_node context-parallel ranks, numbered node by node.

    Attributes:
        nodes, ranks_per_node: how many.
        cluster: preset or YAML file with the speeds of devices and links, for what is decided by costs.

    Raises:
        ConfigError: a number, or the product, is below 1 or above 10**6.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    cluster: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            check_count(f"Topology.{name}", getattr(self, name), most=MOST_RANKS)
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise ConfigError(f"Topology.cluster is {self.cluster!r}; valid: the name of a preset, a file, or None")
        check_count("Topology.nodes * ranks_per_node", int(self.nodes) * int(self.ranks_per_node), most=MOST_RANKS)

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
        window: (left, right): query i sees keys i-left .. i+right of its document only; -1 is no limit on that side.
            With mask "causal", right is 0 (-1 means the same). A window without limits becomes None.
        alibi: linear biases (Press et al. 2022): -slope * |query position - key position| is added to the scaled
            scores, positions counted in each document. True: the paper's slopes for `heads` heads; else one slope for
            each head (numbers, array or tensor), as a tensor-parallel rank needs: its slice of all heads' slopes.
        dropout: share of attention weights that is dropped, below 1; see `context_parallel_attention` for the seed.
        scale: factor of q.k; default: head_dim ** -0.5.
        first_head: number of this tensor-parallel rank's first head in the whole layer; dropout depends on it.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # filled in: heads
    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # filled in: head_dim
    mask: str = "causal"
    window: tuple[int, int] | None = None
    alibi: bool | tuple[float, ...] = False
    dropout: float = 0.0
    scale: float | None = None
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if not isinstance(self.alibi, bool):
            object.__setattr__(self, "alibi", _numbers("attention.alibi", self.alibi))
        if isinstance(self.window, list):
            object.__setattr__(self, "window", tuple(self.window))
        self.check()
        if self.window is not None:
            left, right = (-1 if side >= UNLIMITED else int(side) for side in self.window)
            right = 0 if self.mask == "causal" else right
            nothing = left == -1 and (right == -1 or self.mask == "causal")
            object.__setattr__(self, "window", None if nothing else (left, right))

    @property
    def softmax_scale(self) -> float:
        """The factor of q.k that is used."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @cached_property
    def reach(self) -> tuple[int, int]:
        """A query at position p sees positions p - reach[0] .. p + reach[1]; UNLIMITED is no limit."""
        left, right = (-1, -1) if self.window is None else self.window
        right = 0 if self.mask == "causal" else right
        return UNLIMITED if left == -1 else left, UNLIMITED if right == -1 else right

    @cached_property
    def slopes(self) -> np.ndarray | None:
        """ALiBi slopes, fp64 [heads], read-only; None without ALiBi."""
        if self.alibi is False:
            return None
        out = alibi_slopes(self.heads) if self.alibi is True else np.array(self.alibi, np.float64)
        out.setflags(write=False)
        return out

    @property
    def by_position(self) -> bool:
        """True when a tile must be one run of positions on both sides: for windows, ALiBi and dropout, rows alone do
        not say enough."""
        return self.window is not None or self.alibi is not False or self.dropout > 0

    def check(self) -> None:
        """Raise ConfigError, naming the setting, its value and what is valid."""
        for name in ("heads", "kv_heads", "head_dim", "head_dim_v"):
            check_count(f"attention.{name}", getattr(self, name))
        check_count("attention.first_head", self.first_head, least=0)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"attention.kv_heads is {self.kv_heads}; valid: a divisor of attention.heads, which is {self.heads}"
            )
        if self.mask not in MASKS:
            raise ConfigError(f"attention.mask is {self.mask!r}; valid: {', '.join(MASKS)}")
        if self.scale is not None and not (_is_number(self.scale) and 0 < self.scale <= LARGEST_FP32):
            raise ConfigError(
                f"attention.scale is {self.scale!r}; valid: a finite number above 0, in fp32 too, or None: "
                "head_dim ** -0.5"
            )
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ConfigError(f"attention.dropout is {self.dropout!r}; valid: a number from 0 to below 1")
        self._check_window()
        self._check_alibi()

    def _check_window(self) -> None:
        if self.window is None:
            return
        whole = isinstance(self.window, tuple) and len(self.window) == 2
        if not whole or any(not is_whole(side) or side < -1 for side in self.window):
            raise ConfigError(
                f"attention.window is {self.window!r}; valid: (left, right), whole numbers of tokens, 0 or more, "
                "-1 for no limit on that side; or None"
            )
        if self.mask == "causal" and self.window[1] > 0:
            raise ConfigError(
                f"attention.window is {self.window}, but under mask 'causal' nothing to the right is visible; valid: "
                f"({self.window[0]}, 0), or mask 'full'"
            )

    def _check_alibi(self) -> None:
        if self.alibi is True and self.first_head:
            raise ConfigError(
                f"attention.alibi is True with first_head = {self.first_head}: the paper's slopes for "
                f"{self.heads} heads "
                "are not those of a slice of more heads; valid: one slope for each of these heads, "
                "alibi_slopes(all heads)[first_head : first_head + heads]"
            )
        if isinstance(self.alibi, bool):
            return
        if len(self.alibi) != self.heads or not all(abs(slope) <= LARGEST_FP32 for slope in self.alibi):
            raise ConfigError(
                f"attention.alibi is {self.alibi}; valid: True, False, or one finite slope for each of the "
                f"{self.heads} heads, in fp32 too"
            )


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes of the ALiBi paper (Press et al. 2022, section 3), fp64 [heads].

    For a power of two: 2 ** (-8 i / heads), i = 1 .. heads. Otherwise those of the next smaller power of two, then
    every second one of the next larger, as in the authors' code.
    """
    power = 1 << (heads.bit_length() - 1)
    of_power = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([of_power, between])


def check_count(name: str, value: object, least: int = 1, most: int = MOST, what: str = "a whole number") -> None:
    """Raise ConfigError unless the value is a whole number from `least` to `most`."""
    if not is_whole(value) or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; valid: {what}, {least} or more, at most {most}")


def check_divisor(name: str, value: object, ranks: int) -> None:
    """Raise ConfigError unless the option is a whole number that divides the ranks."""
    if not is_whole(value) or value < 1 or ranks % value:  # type: ignore[operator]
        valid = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ConfigError(f"{name} is {value!r}; valid: a divisor of the {ranks} ranks: {valid}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """A flat list of numbers out of a list, an array or a tensor; texts and truth values are none."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)) or not all(_is_number(value) for value in listed):
        raise ConfigError(f"{name} is {values!r}; valid: True, False, or one slope for each head")
    try:
        return tuple(map(float, listed))
    except OverflowError:
        raise ConfigError(f"{name} is {values!r}; valid: slopes that fp32 holds") from None
