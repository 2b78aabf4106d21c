"""A plan behind an equal-token layout: linear layers are balanced by tokens, attention by its work.

The redistribution is joined to the projections of q, k and v, in one of two places::

    "qkv"      linear layers (equal tokens) ── q, k, v ──► move ──► attention ──► out ──► move back ──►
    "hidden"   linear layers (equal tokens) ── hidden ──► move ──► projections, attention, projection ──► move back ──►

The same rows move; a row of one is not as wide as one of the other (:func:`remap_bytes`). With "hidden" the projections
around attention run where attention does, and are balanced as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Layout, equal_token_layout
from mindspeed_cp.plan.combine import combine, is_in, layout_of
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.program import Plan

MODES = ("qkv", "hidden")


@dataclass(frozen=True)
class RowBytes:
    """Bytes that one moved row costs a tensor-parallel rank, there and back, in each direction of a layer."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def with_linear_layout(plan: Plan, mode: str = "qkv", objective: str = "minmax") -> Plan:
    """The plan with the equal-token layout of its tokens in front (:func:`mindspeed_cp.layout.equal_token_layout`).

    Where attention is computed, and by which messages, stays. With "qkv" the caller of attention holds the equal-token
    layout: `layout`, and `layout_kv` with it, so that the engine moves q, k and v there and the output back. A plan
    that splits heads moves them anyway, and then moves them straight from the new layout: one move as before. With
    "hidden" `layout` stays, and `linear` is the equal-token layout. A plan whose token counts are equal already is
    returned as it is.

    Args:
        plan: any plan, also one of parts.
        mode: "qkv" or "hidden".
        objective: of the move between the layouts: "minmax" or "sum".

    Raises:
        ConfigError: an argument is not valid, the plan has a linear layout already, or with "hidden" the plan is of
            cross-attention or splits the heads of all documents.
    """
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; valid: {', '.join(MODES)}")
    if plan.linear is not None:
        raise ConfigError("the plan has a linear layout already; valid: a plan as it was built")
    per_node = plan.topology.ranks_per_node
    layout = equal_token_layout(plan.layout, per_node, objective)
    if mode == "hidden":
        return plan if layout is plan.layout else _checked_hidden(replace(plan, linear=layout))
    is_self = plan.layout_kv.same_as(plan.layout)
    layout_kv = layout if is_self else equal_token_layout(plan.layout_kv, per_node, objective)
    if layout is plan.layout and (is_self or layout_kv is plan.layout_kv):
        return plan
    if not plan.parts:
        return replace(plan, layout=layout, layout_kv=layout_kv)
    parts = [_cut(part, layout, layout_kv, is_self) for part in plan.parts]
    return combine(plan.algorithm, parts, plan.order, plan.order_backward)


def remap_bytes(
    attention: AttentionConfig,
    hidden_size: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    bytes_per_element: int = 2,
) -> dict[str, RowBytes]:
    """What one row that changes its rank costs, by mode.

    "qkv" moves q, k and v there and the output back, and in the backward the gradient of the output there and those of
    q, k and v back: the heads of one tensor-parallel rank, kv heads once for their group of queries. Multi-latent
    attention has as many kv heads as heads, and values of another width. "hidden" moves hidden states there and back,
    and so do their gradients. Every tensor-parallel rank has them as a whole, and moves them as a whole, unless
    sequence parallelism gives each a share of the rows.

    Args:
        attention: of one tensor-parallel rank.
        hidden_size: of the model.
        tensor_parallel_size: ranks that share the heads.
        sequence_parallel: these share the rows of linear layers, too.
        bytes_per_element: of q, k, v, hidden states and their gradients.

    Returns:
        {"qkv": ..., "hidden": ...}. The difference is the same for any number of rows, as both modes move the same.
    """
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * (attention.head_dim + attention.head_dim_v)
    one_way = (q + kv + attention.heads * attention.head_dim_v) * bytes_per_element
    shares = tensor_parallel_size if sequence_parallel else 1
    hidden = 2 * hidden_size * bytes_per_element / shares
    return {"qkv": RowBytes(one_way, one_way), "hidden": RowBytes(hidden, hidden)}


def fewer_bytes(plan: Plan, hidden_size: int, tensor_parallel_size: int = 1, sequence_parallel: bool = False) -> str:
    """The mode of :func:`with_linear_layout` that moves fewer bytes, forward and backward; "qkv" where both are equal,
    and where every document's heads are split, since then the move is there anyway."""
    if not has_hidden(plan):
        return "qkv"
    found = remap_bytes(plan.attention, hidden_size, tensor_parallel_size, sequence_parallel)
    return min(MODES, key=lambda mode: found[mode].total)


def _cut(part: Plan, layout: Layout, layout_kv: Layout, is_self: bool) -> Plan:
    """A part behind its documents' rows of the whole's new layouts."""
    own = layout_of(layout, is_in(part))
    return replace(part, layout=own, layout_kv=own if is_self else layout_of(layout_kv, is_in(part)))


def has_hidden(plan: Plan) -> bool:
    """True where hidden states could move: queries and keys of some documents are computed on the rows that the caller
    holds."""
    return plan.layout_kv.same_as(plan.layout) and any(piece.q_layout.heads is None for piece in plan.pieces)


def _checked_hidden(plan: Plan) -> Plan:
    if not has_hidden(plan):
        kind = "splits the heads of all documents" if plan.layout_kv.same_as(plan.layout) else "is of cross-attention"
        raise ConfigError(f"mode is 'hidden', but the plan {kind}; valid: 'qkv'")
    return plan
