"""Modelled seconds of a rank's kernels: attention by pairs and by how short its tiles are, linear layers by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.cost.cluster import Cluster
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.layout import is_whole

if TYPE_CHECKING:
    from mindspeed_cp.plan.config import AttentionConfig

ATTENTION_BACKWARD = 2.5  # five matrix products in place of two: the scores again, dV, dP, dQ, dK
LINEAR_BACKWARD = 2.0  # the gradients of the input and of the weights

#: Of linear layers: all; the projections to q, k and v; that of the output; what is neither of these.
PARTS = ("all", "qkv", "out", "rest")

MOST = 10**9


@dataclass(frozen=True)
class LayerCost:
    """The linear part of one transformer layer, on one tensor-parallel rank.

    Attributes:
        flops_per_token: of the forward; the backward is twice that.
        hidden_size: of the whole layer.
        qkv_flops, out_flops: of `flops_per_token`, those of the projections before and after attention, which run where
            attention does if a plan moves hidden states (`Plan.linear`).
        row_shares: ranks that share the rows of hidden states: the tensor-parallel ones with sequence parallelism.
        bytes_per_element: of q, k, v, out and hidden states. Gradients of keys and values that are summed on their way
            have 4.

    Raises:
        ConfigError: a number is out of range.
    """

    flops_per_token: float
    hidden_size: int
    qkv_flops: float = 0.0
    out_flops: float = 0.0
    row_shares: int = 1
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden_size", "row_shares"):
            _check(name, getattr(self, name))
        for name in ("flops_per_token", "qkv_flops", "out_flops"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"LayerCost.{name} is {value!r}; valid: a number from 0")
        if self.qkv_flops + self.out_flops > self.flops_per_token * (1 + 1e-9):
            raise ConfigError(
                f"LayerCost.qkv_flops + out_flops is {self.qkv_flops + self.out_flops!r}; valid: at most "
                f"flops_per_token = {self.flops_per_token!r}, of which they are a part"
            )
        if self.bytes_per_element not in (2, 4):
            raise ConfigError(f"LayerCost.bytes_per_element is {self.bytes_per_element!r}; valid: 2 (bf16), 4 (fp32)")

    def flops(self, part: str) -> float:
        """FLOPs of a token in one of PARTS, forward."""
        rest = self.flops_per_token - self.qkv_flops - self.out_flops
        return {"all": self.flops_per_token, "qkv": self.qkv_flops, "out": self.out_flops, "rest": max(rest, 0.0)}[part]

    @staticmethod
    def of(
        hidden_size: int,
        ffn_hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int,
        gated: bool = True,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        bytes_per_element: int = 2,
    ) -> LayerCost:
        """A decoder layer: 2 FLOPs for each weight of QKV, the output projection and the FFN, over the tensor-parallel
        ranks.

        Args:
            hidden_size: of the layer.
            ffn_hidden_size: inner width of the FFN.
            heads, kv_heads, head_dim, head_dim_v: of the whole layer's attention.
            gated: an FFN of three matrices (SwiGLU) in place of two.
            tensor_parallel: ranks that share the layer.
            sequence_parallel: these share the rows of hidden states, too.
            bytes_per_element: see :class:`LayerCost`.
        """
        given = locals()
        for name in ("hidden_size", "heads", "kv_heads", "head_dim", "head_dim_v", "tensor_parallel"):
            _check(name, given[name])
        _check("ffn_hidden_size", ffn_hidden_size, least=0)
        qkv = 2.0 * hidden_size * (heads * head_dim + kv_heads * (head_dim + head_dim_v)) / tensor_parallel
        out = 2.0 * heads * head_dim_v * hidden_size / tensor_parallel
        ffn = 2.0 * (3 if gated else 2) * hidden_size * ffn_hidden_size / tensor_parallel
        shares = tensor_parallel if sequence_parallel else 1
        return LayerCost(qkv + out + ffn, hidden_size, qkv, out, shares, bytes_per_element)

    @staticmethod
    def like(attention: AttentionConfig, tensor_parallel: int = 1) -> LayerCost:
        """A plain decoder layer around an attention: hidden size heads * head_dim, a gated FFN 8/3 as wide (as in
        LLaMA).

        Args:
            attention: of one tensor-parallel rank.
            tensor_parallel: ranks that share the layer; all have as many heads.
        """
        heads, kv_heads = attention.heads * tensor_parallel, attention.kv_heads * tensor_parallel
        hidden = heads * attention.head_dim
        return LayerCost.of(
            hidden,
            round(hidden * 8 / 3),
            heads,
            kv_heads,
            attention.head_dim,
            attention.head_dim_v,
            tensor_parallel=tensor_parallel,
        )


class ComputeCost:
    """Modelled kernel times of one attention and one layer on the devices of a cluster; arrays in, arrays out."""

    def __init__(self, cluster: Cluster, attention: AttentionConfig, layer: LayerCost | None = None) -> None:
        """
        Args:
            cluster: what the devices can do.
            attention: of one tensor-parallel rank.
            layer: its linear part; default: :meth:`LayerCost.like` the attention.
        """
        self.cluster, self.attention = cluster, attention
        self.layer = LayerCost.like(attention) if layer is None else layer
        self.flops_per_pair = 2.0 * attention.heads * (attention.head_dim + attention.head_dim_v)
        self._seconds_per_pair = self.flops_per_pair / (cluster.peak_flops * cluster.attention_efficiency)

    def attention_seconds(self, pairs: Any, short_side: Any, calls: Any = 0, backward: bool = False) -> Any:
        """Seconds of attention tiles: pairs * flops_per_pair / (peak * efficiency * n / (n + tile_rows)) + launches.

        Args:
            pairs: visible (query, key) pairs of a tile, or of several tiles with the same shorter side.
            short_side: n, rows of the shorter side of the tile, queries or keys; of no importance where pairs is 0.
            calls: kernel calls, each of which costs `launch`.
            backward: 2.5 times the FLOPs of the forward.

        Returns:
            fp64, of the broadcast shape of the first three.
        """
        pairs = np.asarray(pairs, np.float64)
        rows = np.maximum(np.asarray(short_side, np.float64), 1.0)
        factor = self._seconds_per_pair * (ATTENTION_BACKWARD if backward else 1.0)
        return pairs * factor * (1.0 + self.cluster.tile_rows / rows) + np.asarray(calls) * self.cluster.launch

    def linear_seconds(self, tokens: Any, backward: bool = False, part: str = "all") -> Any:
        """Seconds of the linear layers (one of PARTS) of that many tokens, fp64 of the same shape; the backward is
        twice the forward."""
        each = self.layer.flops(part) / (self.cluster.peak_flops * self.cluster.linear_efficiency)
        return np.asarray(tokens, np.float64) * each * (LINEAR_BACKWARD if backward else 1.0)


def _check(name: str, value: object, least: int = 1) -> None:
    if not is_whole(value) or not least <= value <= MOST:  # type: ignore[operator]
        raise ConfigError(f"LayerCost: {name} is {value!r}; valid: a whole number from {least} to {MOST}")
