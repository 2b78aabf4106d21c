"""Modelled seconds of a rank's kernels: attention by pairs and tile size, linear layers by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan.problem import AttentionConfig, document_pairs
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import check_count, check_type

ATTENTION_BACKWARD = 2.5  # five matrix products instead of two: recomputed scores, dV, dP, dQ, dK
LINEAR_BACKWARD = 2.0  # the gradients of the input and of the weights

MAX_FLOPS = 1e30  # of a token: far more than products of sizes of at most MAX_SIZE have


@dataclass(frozen=True)
class LayerCost:
    """The linear part of one transformer layer, on one tensor-parallel rank.

    Attributes:
        flops_per_token: FLOPs of the forward; the backward has twice as many.
        hidden_size: hidden size of the whole layer.
        qkv_flops, out_flops: of `flops_per_token`, those of the projections before and after attention, which run where
            attention does if a plan moves hidden states (`Plan.linear_layout`).
        hidden_row_shares: ranks that share the rows of hidden states: the tensor-parallel ones with sequence
            parallelism.
        bytes_per_element: of q, k, v, out and hidden states. Gradients of keys and values that are summed on their way
            have 4.

    Raises:
        ConfigError: A number is out of range.
    """

    flops_per_token: float
    hidden_size: int
    qkv_flops: float = 0.0
    out_flops: float = 0.0
    hidden_row_shares: int = 1
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden_size", "hidden_row_shares"):
            check_count(f"LayerCost.{name}", getattr(self, name))
        for name in ("flops_per_token", "qkv_flops", "out_flops"):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not 0 <= value <= MAX_FLOPS:
                raise ConfigError(f"LayerCost.{name} is {short_repr(value)}; valid: a number from 0 to {MAX_FLOPS:g}")
        if self.qkv_flops + self.out_flops > self.flops_per_token * (1 + 1e-9):
            raise ConfigError(
                f"LayerCost.qkv_flops + out_flops is {self.qkv_flops + self.out_flops!r}; valid: at most "
                f"flops_per_token = {self.flops_per_token!r}, of which they are a part"
            )
        if self.bytes_per_element not in (2, 4):
            raise ConfigError(f"LayerCost.bytes_per_element is {self.bytes_per_element!r}; valid: 2 (bf16), 4 (fp32)")

    @property
    def hidden_row_bytes(self) -> float:
        """Bytes of a row of hidden states that this rank moves; a share of it under sequence parallelism."""
        return self.hidden_size * self.bytes_per_element / self.hidden_row_shares

    def flops(self, part: str) -> float:
        """Return the forward FLOPs of a token in a part of the linear layers: "all", the projections "qkv" before
        attention and "out" after it, and the "rest"."""
        rest = self.flops_per_token - self.qkv_flops - self.out_flops
        return {"all": self.flops_per_token, "qkv": self.qkv_flops, "out": self.out_flops, "rest": max(rest, 0.0)}[part]

    @staticmethod
    def from_sizes(
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
        """Return the cost of a decoder layer: 2 FLOPs per token and weight of the q, k, v and output projections and
        the FFN, divided by the tensor-parallel ranks.

        Args:
            hidden_size: hidden size.
            ffn_hidden_size: inner width of the FFN.
            heads, kv_heads, head_dim, head_dim_v: attention of the whole layer.
            gated: the FFN has three matrices (SwiGLU) instead of two.
            tensor_parallel: ranks that share the layer.
            sequence_parallel: the tensor-parallel ranks share the rows of hidden states, too.
            bytes_per_element: see :class:`LayerCost`.
        """
        sizes = locals()
        for name in ("hidden_size", "heads", "kv_heads", "head_dim", "head_dim_v", "tensor_parallel"):
            check_count(name, sizes[name])
        check_count("ffn_hidden_size", ffn_hidden_size, least=0)
        qkv = 2.0 * hidden_size * (heads * head_dim + kv_heads * (head_dim + head_dim_v)) / tensor_parallel
        out = 2.0 * heads * head_dim_v * hidden_size / tensor_parallel
        ffn = 2.0 * (3 if gated else 2) * hidden_size * ffn_hidden_size / tensor_parallel
        shares = tensor_parallel if sequence_parallel else 1
        return LayerCost(qkv + out + ffn, hidden_size, qkv, out, shares, bytes_per_element)

    @staticmethod
    def for_attention(
        attention: AttentionConfig,
        hidden_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
    ) -> LayerCost:
        """Return the cost of a plain decoder layer with this attention and a gated FFN.

        Args:
            attention: attention of one tensor-parallel rank.
            hidden_size: default: heads * head_dim of the whole layer.
            ffn_hidden_size: default: 8/3 of the hidden size, as in LLaMA.
            tensor_parallel, sequence_parallel: as for :meth:`from_sizes`; all ranks have the same number of heads.
        """
        check_type("attention", attention, AttentionConfig, "AttentionConfig(...)")
        heads, kv_heads = attention.heads * tensor_parallel, attention.kv_heads * tensor_parallel
        hidden = heads * attention.head_dim if hidden_size is None else hidden_size
        width = round(hidden * 8 / 3) if ffn_hidden_size is None or hidden_size is None else ffn_hidden_size
        return LayerCost.from_sizes(
            hidden, width, heads, kv_heads, attention.head_dim, attention.head_dim_v, tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip


class ComputeCost:
    """Modelled kernel seconds of one layer on the devices of a cluster. All arguments may be arrays."""

    def __init__(self, cluster: Cluster, attention: AttentionConfig, layer: LayerCost | None = None) -> None:
        """
        Args:
            cluster: the devices.
            attention: attention of one tensor-parallel rank.
            layer: linear part of the layer; default: :meth:`LayerCost.for_attention`.
        """
        self.cluster, self.attention = cluster, attention
        check_type("cluster", cluster, Cluster, "load_cluster(...)")
        check_type("attention", attention, AttentionConfig, "AttentionConfig(...)")
        self.layer = LayerCost.for_attention(attention) if layer is None else layer
        check_type("layer", self.layer, LayerCost, "LayerCost(...), or None")
        self.flops_per_pair = 2.0 * attention.heads * (attention.head_dim + attention.head_dim_v)
        self._seconds_per_pair = self.flops_per_pair / (cluster.peak_flops * cluster.attention_efficiency)

    def attention_seconds(self, pairs: Any, short_side: Any, calls: Any = 0, backward: bool = False) -> Any:
        """Return the seconds of attention tiles: pairs * flops_per_pair / (peak * efficiency * n / (n + tile_rows)) +
        launches.

        Args:
            pairs: visible (query, key) pairs of a tile, or of several tiles with the same shorter side.
            short_side: n, rows of the shorter side of the tile (queries or keys); ignored where pairs is 0.
            calls: kernel calls; each costs `launch`.
            backward: True for the backward, which has 2.5 times the FLOPs of the forward.

        Returns:
            fp64, with the broadcast shape of the first three arguments.
        """
        pairs = np.asarray(pairs, np.float64)
        rows = np.maximum(np.asarray(short_side, np.float64), 1.0)
        factor = self._seconds_per_pair * (ATTENTION_BACKWARD if backward else 1.0)
        return pairs * factor * (1.0 + self.cluster.tile_rows / rows) + np.asarray(calls) * self.cluster.launch

    def expansion_seconds(self, rows: Any) -> Any:
        """Return the seconds in which a rank expands latents to keys and values of all heads: 2 FLOPs for each of a
        row's latent channels and the channels that come of it.

        Args:
            rows: number of rows, of some heads only in their share; once for each product of the expansion.

        Returns:
            fp64 of the shape of `rows`; 0 for attention without latents.
        """
        attention = self.attention
        if attention.latent is None:
            return np.zeros(np.shape(rows))
        latent, shared = attention.latent
        flops = 2.0 * latent * attention.heads * (attention.head_dim - shared + attention.head_dim_v)
        return np.asarray(rows, np.float64) * (flops / self.cluster.peak_flops) / self.cluster.linear_efficiency

    def linear_layer_seconds(self, tokens: Any, backward: bool = False, part: str = "all") -> Any:
        """Return the seconds of the linear layers, or a part of them (:meth:`LayerCost.flops`), for a number of tokens,
        fp64 of the same shape."""
        seconds_per_token = self.layer.flops(part) / (self.cluster.peak_flops * self.cluster.linear_efficiency)
        return np.asarray(tokens, np.float64) * seconds_per_token * (LINEAR_BACKWARD if backward else 1.0)


def balanced_lower_bound(
    documents: Documents, ranks: int, cost: ComputeCost, kv_documents: Documents | None = None
) -> float:
    """Return the bound in seconds of all plans of a batch: perfect balance, tiles as long as their documents, no
    exposed communication; kv_documents: in cross-attention, lengths of the keys of each document."""
    keys = documents if kv_documents is None else kv_documents
    lengths = documents.tree_sums(documents.lengths)
    pairs = documents.tree_sums(document_pairs(documents, keys, cost.attention))
    shorter = np.minimum(lengths, keys.tree_sums(keys.lengths))
    attention = cost.attention_seconds(pairs, shorter) * (1 + ATTENTION_BACKWARD)
    return float((attention + cost.linear_layer_seconds(lengths) * (1 + LINEAR_BACKWARD)).sum()) / ranks
