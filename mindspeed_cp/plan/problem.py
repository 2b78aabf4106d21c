"""The inputs of a plan beside the documents: AttentionConfig, Topology, and which documents go with which attention."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import check_count, is_int
from mindspeed_cp.schema.unsupported import BLOCKS_NEED, CAUSAL_CROSS_ATTENTION, TREES_NEED

MASKS = ("causal", "full")

#: Visible range without limit: no document exceeds it, as lengths are below 2**31.
UNLIMITED = 2**31

#: Upper limit of the number of ranks.
RANK_LIMIT = 10**6

#: Largest slope and scale: kernels take both in fp32.
FP32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Topology:
    """Grid of nodes x ranks_per_node context-parallel ranks, numbered node by node.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: number of ranks in each node.
        cluster: preset name or YAML file with the speeds of devices and links, for decisions by cost.

    Raises:
        ConfigError: nodes, ranks_per_node or their product is below 1 or above 10**6.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    cluster: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            number = check_count(f"Topology.{name}", getattr(self, name), most=RANK_LIMIT)
            object.__setattr__(self, name, number)
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise ConfigError(
                f"Topology.cluster is {self.cluster!r}; valid: the name of a preset, a YAML file, or None"
            )
        check_count("Topology.nodes * ranks_per_node", self.nodes * self.ranks_per_node, most=RANK_LIMIT)

    @classmethod
    def from_mesh(cls, mesh: Any, processes_per_node: int | None = None, cluster: str | None = None) -> Topology:
        """Make the topology of a device mesh of context-parallel ranks, such as ``mesh["cp"]``.

        >>> Topology.from_mesh(init_device_mesh("cuda", (2, 16), mesh_dim_names=("dp", "cp"))["cp"], 8)
        Topology(nodes=2, ranks_per_node=8, cluster=None)

        Args:
            mesh: torch's DeviceMesh with one dimension; nothing is sent.
            processes_per_node: processes that the launcher starts on a node, numbered node by node; default: the
                LOCAL_WORLD_SIZE that torchrun sets; where that is not set, all processes are on one node.
            cluster: as for Topology.

        Raises:
            ConfigError: the mesh has several dimensions, or the nodes have different numbers of its ranks.
        """
        if not hasattr(mesh, "mesh"):
            raise ConfigError(f"mesh is {short_repr(mesh)}; valid: torch's DeviceMesh of the context-parallel ranks")
        table = np.asarray(mesh.mesh)
        if table.ndim != 1:
            names = getattr(mesh, "mesh_dim_names", None)
            raise ConfigError(
                f"mesh has the dimensions {names or table.ndim}; valid: the context-parallel one alone, mesh[name]"
            )
        if processes_per_node is None:
            processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or int(table.max()) + 1
        check_count("processes_per_node", processes_per_node)
        node = table // processes_per_node
        counts = np.unique(node, return_counts=True)[1]
        if len(set(counts.tolist())) > 1 or (np.diff(node) < 0).any():
            raise ConfigError(
                f"mesh has the ranks {table.tolist()}, with {processes_per_node} processes on a node; valid: equally "
                "many ranks on every node, node by node"
            )
        return cls(len(counts), int(counts[0]), cluster)

    @property
    def ranks(self) -> int:
        """Total number of context-parallel ranks."""
        return self.nodes * self.ranks_per_node


class KvRow(NamedTuple):
    """A token's keys and values as ranks hold and send them: `heads` x (`dim` channels of k, `dim_v` of v)."""

    heads: int
    dim: int
    dim_v: int

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.heads * (self.dim + self.dim_v)


@dataclass(frozen=True)
class AttentionConfig:
    """Definition of the attention of one layer, on one tensor-parallel rank.

    Attributes:
        heads: query heads of this tensor-parallel rank.
        kv_heads: key/value heads; default: `heads`. Query head h reads kv head h // (heads / kv_heads).
        head_dim: channels of q and k.
        head_dim_v: channels of v and of the output; default: head_dim.
        mask: "causal" (a query sees itself and all earlier tokens of its document) or "full" (its whole document).
        window: (left, right): query i sees only keys i-left .. i+right of its document; -1: no limit on that side. With
            mask "causal", right is 0 (-1 means the same). A window without limits becomes None.
        alibi: linear biases (Press et al. 2022): -slope * |query position - key position| is added to the scaled
            scores; positions restart in each document. True: the slopes of the paper for `heads` heads. Otherwise one
            slope for each head (numbers, array or tensor): a tensor-parallel rank passes its slice of all slopes.
        dropout: probability of dropping an attention weight, from 0 to below 1; `context_parallel_attention` takes the
            seed.
        scale: factor of the scores q.k; default: head_dim ** -0.5.
        first_head: index of this tensor-parallel rank's first head in the whole layer; dropout depends on it.
        latent: (channels of the latent, channels of k that all heads share), for multi-head latent attention
            (DeepSeek-V2, 2405.04434, section 2.1): ranks hold and send these of each token, and whoever reads them
            expands them to the heads' k = [up_k(latent), shared] and v = up_v(latent). None: k and v of all heads.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
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
    latent: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if not isinstance(self.alibi, bool):
            object.__setattr__(self, "alibi", _numbers("attention.alibi", self.alibi))
        if isinstance(self.window, list):
            object.__setattr__(self, "window", tuple(self.window))
        if isinstance(self.latent, list):
            object.__setattr__(self, "latent", tuple(self.latent))
        self.check()
        for name in ("heads", "kv_heads", "head_dim", "head_dim_v", "first_head"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.latent is not None:
            object.__setattr__(self, "latent", (int(self.latent[0]), int(self.latent[1])))
        if self.window is not None:
            left, right = (-1 if side >= UNLIMITED else int(side) for side in self.window)
            right = 0 if self.mask == "causal" else right
            unlimited = left == -1 and (right == -1 or self.mask == "causal")
            object.__setattr__(self, "window", None if unlimited else (left, right))

    @cached_property
    def softmax_scale(self) -> float:
        """Factor of the scores q.k, with the default filled in."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @cached_property
    def visible_range(self) -> tuple[int, int]:
        """(left, right): a query at position p sees positions p - left .. p + right; UNLIMITED: no limit."""
        left, right = (-1, -1) if self.window is None else self.window
        right = 0 if self.mask == "causal" else right
        return UNLIMITED if left == -1 else left, UNLIMITED if right == -1 else right

    @cached_property
    def slopes(self) -> np.ndarray | None:
        """ALiBi slopes, fp64 [heads], read-only; None without ALiBi."""
        if self.alibi is False:
            return None
        slopes = alibi_slopes(self.heads) if self.alibi is True else np.array(self.alibi, np.float64)
        slopes.setflags(write=False)
        return slopes

    @cached_property
    def kv_row(self) -> KvRow:
        """Keys and values of a token as ranks hold and send them.

        With latents these are one head: the shared channels in the place of k, the latent in the place of v.
        """
        if self.latent is None:
            return KvRow(self.kv_heads, self.head_dim, self.head_dim_v)
        latent, shared = self.latent
        return KvRow(1, shared, latent)

    @cached_property
    def expanded(self) -> AttentionConfig:
        """The same attention with k and v of all heads instead of latents."""
        return self if self.latent is None else replace(self, latent=None)

    @property
    def is_triangular(self) -> bool:
        """True for a causal mask without a window: work grows with the position of the query."""
        return self.mask == "causal" and self.window is None

    @property
    def needs_positions(self) -> bool:
        """True if a tile must be one run of positions on both sides, as windows, ALiBi and dropout need."""
        return self.window is not None or self.alibi is not False or self.dropout > 0

    def check(self) -> None:
        """Check all values; raise ConfigError naming the setting, its value and the valid values."""
        for name, least in (("heads", 1), ("kv_heads", 1), ("head_dim", 1), ("head_dim_v", 1), ("first_head", 0)):
            check_count(f"attention.{name}", getattr(self, name), least)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"attention.kv_heads is {self.kv_heads}; valid: a divisor of attention.heads, which is {self.heads}"
            )
        if self.mask not in MASKS:
            raise ConfigError(f"attention.mask is {self.mask!r}; valid: {', '.join(MASKS)}")
        if self.scale is not None and not (_is_number(self.scale) and 0 < self.scale <= FP32_MAX):
            raise ConfigError(
                f"attention.scale is {self.scale!r}; valid: a finite number above 0, in fp32 too, or None "
                "(head_dim ** -0.5)"
            )
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ConfigError(f"attention.dropout is {self.dropout!r}; valid: a number from 0 to below 1")
        if self.window is not None:
            self._check_window(self.window)
        if self.alibi is not False:
            self._check_alibi()
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_window(self, window: tuple[int, int]) -> None:
        is_pair = isinstance(window, tuple) and len(window) == 2
        if not is_pair or any(not is_int(side) or side < -1 for side in window):
            raise ConfigError(
                f"attention.window is {short_repr(window)}; valid: (left, right), whole numbers of tokens, 0 or "
                "more, or -1 for no limit on that side; or None"
            )
        if self.mask == "causal" and window[1] > 0:
            raise ConfigError(
                f"attention.window is {window}, but under mask 'causal' no key to the right is visible; valid: "
                f"({window[0]}, 0), or mask 'full'"
            )

    def _check_alibi(self) -> None:
        if self.alibi is True and self.first_head:
            raise ConfigError(
                f"attention.alibi is True with first_head = {self.first_head}, but the slopes of the paper for "
                f"{self.heads} heads are not a slice of the slopes for more heads; valid: one slope for each of these "
                "heads, alibi_slopes(all heads)[first_head : first_head + heads]"
            )
        if isinstance(self.alibi, bool):
            return
        if len(self.alibi) != self.heads or not all(abs(slope) <= FP32_MAX for slope in self.alibi):
            raise ConfigError(
                f"attention.alibi is {self.alibi}; valid: True, False, or one finite slope for each of the "
                f"{self.heads} heads, in fp32 too"
            )

    def _check_latent(self, latent: tuple[int, int]) -> None:
        is_pair = isinstance(latent, tuple) and len(latent) == 2
        if not is_pair or any(not is_int(count) or count < 1 for count in latent):
            raise ConfigError(
                f"attention.latent is {latent!r}; valid: (channels of the latent, channels of k that all heads "
                "share), whole numbers from 1, such as (512, 64); or None"
            )
        if latent[1] >= self.head_dim:
            raise ConfigError(
                f"attention.latent is {latent}, with {latent[1]} channels of k that all heads share; valid: "
                f"fewer than attention.head_dim, which is {self.head_dim}"
            )
        if self.kv_heads != self.heads:
            raise ConfigError(
                f"attention.latent is {latent} with kv_heads = {self.kv_heads}; valid: kv_heads = heads, which is "
                f"{self.heads}, as every head has keys and values of its own; or latent None"
            )


def documents_error(documents: Documents, kv_documents: Documents, attention: AttentionConfig) -> str | None:
    """Return the error text if attention over these documents is not defined or not computed, else None.

    `build_plan` and `verify_plan` both ask here.

    Args:
        documents, kv_documents: documents by lengths of queries and of keys.
        attention: attention of one layer.
    """
    if len(kv_documents) != len(documents):
        return (
            f"kv_documents has {len(kv_documents)} documents, documents {len(documents)}; valid: one length of keys "
            "for each document"
        )
    has_blocks = documents.blocks is not None or kv_documents.blocks is not None
    has_parents = documents.trees is not None or kv_documents.trees is not None
    for name, is_given, valid in (("parents", has_parents, TREES_NEED), ("blocks", has_blocks, BLOCKS_NEED)):
        conflict = None
        if kv_documents != documents:
            same = np.array_equal(kv_documents.lengths, documents.lengths)
            conflict = f"keys of other {name if same else 'lengths'}"
        elif attention.mask != "causal":
            conflict = f"attention.mask {attention.mask!r}"
        elif name == "blocks" and attention.slopes is not None:
            conflict = "attention.alibi"
        if is_given and conflict is not None:
            return f"documents have {name}, with {conflict}; valid: {valid}"
    if attention.mask == "causal" and kv_documents != documents:
        return str(CAUSAL_CROSS_ATTENTION)
    return None


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the slopes of the ALiBi paper (Press et al. 2022, section 3), fp64 [heads].

    For a power of two: 2 ** (-8 i / heads), i = 1 .. heads. Otherwise the slopes of the next smaller power of two,
    followed by every second slope of the next larger one, as in the authors' code.
    """
    power = 1 << (int(heads).bit_length() - 1)
    power_slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    extra_slopes = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
    return np.concatenate([power_slopes, extra_slopes])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """Convert a flat list, array or tensor of numbers to a tuple of floats; raise ConfigError for strings and bools."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)) or not all(_is_number(value) for value in listed):
        raise ConfigError(f"{name} is {values!r}; valid: True, False, or one slope for each head")
    try:
        return tuple(map(float, listed))
    except OverflowError:
        raise ConfigError(f"{name} is {values!r}; valid: slopes that fp32 holds") from None


# Counts of the (query, key) pairs that mask and window leave visible, of documents and of runs of their queries.


def visible_pairs(lengths: np.ndarray, kv_lengths: np.ndarray, attention: AttentionConfig) -> np.ndarray:
    """Count the (query, key) pairs of each document that mask and window leave visible.

    The query at position p of n sees keys max(0, p - left) .. min(m - 1, p + right) of m. The count is the difference
    of two sums of clipped lines, in exact int64 arithmetic: every machine gets the same bits.

    Args:
        lengths: queries of each document, int64 [documents], below 2**31.
        kv_lengths: keys of each document, int64 [documents], below 2**31.
        attention: mask and window.

    Returns:
        fp64 [documents].
    """
    left, right = attention.visible_range
    pairs = _sum_of_clipped_line(lengths, right + 1, kv_lengths) - _sum_of_clipped_line(lengths, -left, kv_lengths)
    return pairs.astype(np.float64)


def document_pairs(queries: Documents, keys: Documents, attention: AttentionConfig) -> np.ndarray:
    """Count the (query, key) pairs of each document's queries that mask and window leave visible, fp64 [documents].

    Args:
        queries, keys: documents by lengths of queries and of keys. In trees and with blocks (causal masks) they are the
            same.
        attention: mask and window.
    """
    if queries.is_plain:
        return visible_pairs(queries.lengths, keys.lengths, attention)
    return run_pairs(np.arange(len(queries)), queries.offsets[:-1], queries.offsets[1:], queries, keys, attention)


def run_pairs(
    doc: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    queries: Documents,
    keys: Documents,
    attention: AttentionConfig,
) -> np.ndarray:
    """Count the visible (query, key) pairs of runs of queries, fp64 [n].

    Args:
        doc: document of each run, int64 [n].
        start, stop: first and last-plus-one token of each run, int64 [n].
        queries, keys, attention: as for :func:`document_pairs`.
    """
    first = queries.first_positions[doc] - queries.offsets[doc]
    keys_on_path = keys.first_positions[doc] + keys.lengths[doc]
    begin, end = (visible_pairs(token + first, keys_on_path, attention) for token in (start, stop))
    pairs = end - begin
    if queries.blocks is not None:
        added = [queries.blocks.pairs_before(token, attention.visible_range[0]) for token in (start, stop)]
        pairs += added[1] - added[0]
    return pairs


def _sum_of_clipped_line(n: np.ndarray, begin: int, m: np.ndarray) -> np.ndarray:
    """Sum of min(max(p + begin, 0), m) over p = 0 .. n - 1, int64."""
    low = np.clip(-begin, 0, n)  # the line is 0 below this p
    high = np.clip(m - begin, low, n)  # and m from this p on
    count = high - low
    return count * (low + high - 1) // 2 + count * begin + (n - high) * m
