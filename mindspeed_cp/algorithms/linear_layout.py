"""A layout of linear layers with equal tokens, beside that of attention; the setting `remap` says what moves between.

The redistribution is next to the projections of q, k and v, in one of two places::

    "qkv"     linear layers (equal tokens) -> q, k, v -> redistribute -> attention -> out -> redistribute back
    "hidden"  linear layers (equal tokens) -> hidden -> redistribute -> projections, attention, projection
              -> redistribute back

Both move the same rows, of different width (:func:`cheapest_mode`). With "hidden" the projections around
attention run on the rows of attention's layout, and are as balanced as attention is.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Layout, equal_token_layout
from mindspeed_cp.plan.parts import combine, document_mask, select_layout
from mindspeed_cp.plan.program import Plan

LINEAR_LAYOUT_MODES = ("qkv", "hidden")


def with_linear_layout(plan: Plan, mode: str = "qkv") -> Plan:
    """Put the equal-token layout (:func:`mindspeed_cp.layout.equal_token_layout`) in front of a plan.

    The computation of attention and its messages stay the same. With "qkv", `layout` and `kv_layout_in` become the
    equal-token layout, so that the engine redistributes q, k, v and the output. A plan that splits heads redistributes
    them anyway, and then does so from the new layout. With "hidden", `layout` stays and `linear_layout` is the
    equal-token layout.

    Args:
        plan: any plan, with or without parts.
        mode: "qkv" or "hidden".

    Returns:
        The new plan, or the given one if its token counts are equal already.

    Raises:
        ConfigError: the mode is unknown, the plan has a linear layout already, or the mode is "hidden" and the plan is
            of cross-attention or splits the heads of all documents.
    """
    if mode not in LINEAR_LAYOUT_MODES:
        raise ConfigError(f"mode is {mode!r}; valid: {', '.join(LINEAR_LAYOUT_MODES)}")
    if plan.linear_layout is not None:
        raise ConfigError("the plan has a linear layout already; valid: a plan as it was built")
    ranks_per_node = plan.topology.ranks_per_node
    layout = equal_token_layout(plan.layout, ranks_per_node)
    is_self_attention = plan.kv_layout_in.same_as(plan.layout)
    if mode == "hidden":
        if layout is plan.layout:
            return plan
        if not can_move_hidden(plan):
            kind = "splits the heads of all documents" if is_self_attention else "is of cross-attention"
            raise ConfigError(f"mode is 'hidden', but the plan {kind}; valid: 'qkv'")
        return replace(plan, linear_layout=layout)
    kv_layout_in = layout if is_self_attention else equal_token_layout(plan.kv_layout_in, ranks_per_node)
    if layout is plan.layout and (is_self_attention or kv_layout_in is plan.kv_layout_in):
        return plan
    return _with_layouts(plan, layout, kv_layout_in)


def with_caller_layout(plan: Plan, layout: Layout) -> Plan:
    """Let the caller hold the rows of a given layout, such as those that another program has cut.

    The computation of attention and its messages stay the same. The engine redistributes q, k, v and the output between
    these rows and those of the computation, where they differ. The linear layers have the rows of the caller, so that a
    `linear_layout` of the plan is dropped.

    Args:
        plan: plan of self-attention, with or without parts.
        layout: rows of the caller, for the documents and ranks of the plan, all heads on every rank.

    Raises:
        ConfigError: the layout is of other documents or ranks or splits heads, or the plan is of cross-attention.
    """
    if not plan.kv_layout_in.same_as(plan.layout):
        raise ConfigError("the plan is of cross-attention; valid with a layout of the caller: self-attention")
    if layout.documents != plan.documents or layout.ranks != plan.ranks or layout.heads is not None:
        heads = "" if layout.heads is None else ", heads split"
        raise ConfigError(
            f"layout is of {layout.documents!r} on {layout.ranks} ranks{heads}; valid: whole tokens of "
            f"{plan.documents!r} on {plan.ranks} ranks, as the plan has"
        )
    if plan.linear_layout is not None:
        plan = replace(plan, linear_layout=None)
    return plan if layout.same_as(plan.layout) else _with_layouts(plan, layout, layout)


def _with_layouts(plan: Plan, layout: Layout, kv_layout_in: Layout) -> Plan:
    """Return the plan with other rows of the caller."""
    if not plan.parts:
        return replace(plan, layout=layout, kv_layout_in=kv_layout_in)
    parts = []
    for part in plan.parts:
        documents = document_mask(part)
        part_layout = select_layout(layout, documents)
        kv_part_layout = part_layout if kv_layout_in is layout else select_layout(kv_layout_in, documents)
        parts.append(replace(part, layout=part_layout, kv_layout_in=kv_part_layout))
    return combine(plan.algorithm, parts, plan.forward_order, plan.backward_order)


def cheapest_mode(plan: Plan, hidden_size: int, tensor_parallel_size: int = 1, sequence_parallel: bool = False) -> str:
    """Return the mode of :func:`with_linear_layout` that moves fewer bytes; "qkv" if both move the same number, or if
    hidden states cannot move.

    "qkv" moves q, k and v of the rank's heads there and the output back, and in the backward as many gradients.
    "hidden" moves hidden states there and back. Every tensor-parallel rank moves whole hidden states, or its share of
    the rows under sequence parallelism.
    """
    attention, shares = plan.attention, tensor_parallel_size if sequence_parallel else 1
    qkv_width = attention.heads * (attention.head_dim + attention.head_dim_v) + attention.kv_row.channels
    return "hidden" if can_move_hidden(plan) and 2 * hidden_size / shares < qkv_width else "qkv"


def can_move_hidden(plan: Plan) -> bool:
    """Return True if mode "hidden" is valid: self-attention, and some documents whose heads are not split."""
    return plan.kv_layout_in.same_as(plan.layout) and any(
        part.q_layout_compute.heads is None for part in plan.parts_or_self
    )
