"""Parts: a plan composed of several plans over disjoint documents, each computed in its own way.

A part is an ordinary plan whose `Documents` has all documents of the batch; documents of other parts have length 0, so
a document has the same index everywhere (dropout depends on it). A tree of documents is in one part. The rows of a part
on a rank are the rank's rows of the part's documents, in their order::

    batch           A A A B B B B C C        documents A, B, C
    part 0          A A A         C C        lengths 3, 0, 2: keys and values are fetched
    part 1                B B B B            lengths 0, 4, 0: heads are split

The engine posts the redistributions of all parts first. It then takes the steps of all parts in one order, the same on
every rank: a step finishes the messages due in the previous step of its part, posts its own, and computes. The messages
of a part travel while steps of other parts compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Layout, from_spans
from mindspeed_cp.layout.runs import concatenate_records
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CONTENT, Messages
from mindspeed_cp.schema.messages import short_repr

StepOrder = tuple[tuple[int, int], ...]  # (part, step)


def combine(
    name: str,
    parts: Sequence[Plan],
    forward_order: StepOrder | None = None,
    backward_order: StepOrder | None = None,
) -> Plan:
    """Combine several plans into one plan of parts.

    Args:
        name: name of the combined plan, for display.
        parts: plans without parts, with the same attention and topology. Each document is in one of them and has length
            0 in the others (`select_documents` and `select_layout` make such parts of a batch).
        forward_order: (part, step) of all forward steps in execution order; default: one step of each part in turn.
        backward_order: the same for the backward.

    Raises:
        ConfigError: the parts do not form one plan; names the part and the document or step.
    """
    parts = tuple(parts) if isinstance(parts, Iterable) else ()
    if not parts or not all(isinstance(part, Plan) for part in parts):
        raise ConfigError(
            f"parts are {short_repr(parts)}; valid: one Plan or more, each over some documents of the batch"
        )
    for index, part in enumerate(parts):
        error = _part_error(parts[0], index, part)
        if error is not None:
            raise ConfigError(f"parts: {error}")
    layout = _union_layout([part.layout for part in parts])
    same = all(part.kv_layout_in is part.layout for part in parts)
    kv_layout_in = layout if same else _union_layout([part.kv_layout_in for part in parts])
    attention = parts[0].attention
    empty_program = Program(
        steps=0,
        capacity=kv_layout_in.token_counts[:, None],
        q_layout_compute=layout,
        kv_documents=kv_layout_in.documents,
        attention=attention,
        contents=np.empty(0, CONTENT),
        spans=kv_layout_in.spans[:0],
        fetch=Messages.empty(),
        reduce=Messages.empty(),
    )
    plan = Plan(
        name,
        attention,
        parts[0].topology,
        layout,
        kv_layout_in,
        q_layout_compute=layout,
        kv_layout_compute=kv_layout_in,
        forward=empty_program,
        backward=empty_program,
        parts=parts,
        forward_order=_in_turn(parts, "forward") if forward_order is None else tuple(forward_order),
        backward_order=_in_turn(parts, "backward") if backward_order is None else tuple(backward_order),
        reduce_dtype=parts[0].reduce_dtype,
    )
    error = parts_error(plan)
    if error is not None:
        raise ConfigError(f"parts: {error}")
    return plan


def _in_turn(parts: Sequence[Plan], direction: str) -> StepOrder:
    """Return (part, step) of the steps of all parts, one of each part in turn."""
    steps = [getattr(part, direction).steps for part in parts]
    return tuple((part, step) for step in range(max(steps)) for part, count in enumerate(steps) if step < count)


def select_documents(documents: Documents, chosen: np.ndarray) -> Documents:
    """Set the length of all documents that are not chosen (bool [documents]) to 0."""
    return documents.with_lengths(np.where(chosen, documents.lengths, 0))


def select_layout(layout: Layout, chosen: np.ndarray) -> Layout:
    """Restrict a layout to the chosen documents (bool [documents]), as the layout of a part."""
    documents = select_documents(layout.documents, chosen)
    spans = layout.spans[chosen[layout.spans["doc"]]]
    return Layout(documents, layout.ranks, _renumbered(spans, layout.documents, documents), layout.heads)


def document_mask(part: Plan) -> np.ndarray:
    """Return True for the documents of which a part has queries or keys, bool [documents]."""
    return (part.documents.lengths > 0) | (part.kv_documents.lengths > 0)


def part_rows(plan: Plan, part: int, rank: int, keys: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Locate the rows of a part among the rank's rows of the whole batch.

    Args:
        plan: plan of parts.
        part: index of the part.
        rank: context-parallel rank.
        keys: True for rows of k and v, False for rows of q.

    Returns:
        First row and number of rows of each run, int64 [runs] each.
    """
    layout = plan.kv_layout_in if keys else plan.layout
    spans = layout.rank_spans(rank)
    in_part = document_mask(plan.parts[part])[spans["doc"]]
    first = layout.span_first_rows[layout.span_offsets[rank] : layout.span_offsets[rank + 1]]
    return first[in_part], (spans["stop"] - spans["start"])[in_part]


def part_ends(plan: Plan, direction: str) -> list[int]:
    """Return, for each part, the index in `step_order` after which it is concluded.

    A concluded part rounds its output or gradients and redistributes them. This is after its last step, or after all
    steps (the index is their number) if messages of its last step are still due.
    """
    order = plan.step_order(direction)
    last = {part: index for index, (part, _) in enumerate(order)}
    programs: list[Program] = [getattr(part, direction) for part in plan.parts_or_self]
    return [
        len(order)
        if any((messages.items["done"] == program.steps - 1).any() for messages in (program.fetch, program.reduce))
        else last[part]
        for part, program in enumerate(programs)
    ]


def parts_error(plan: Plan) -> str | None:
    """Return the error text if the parts of a plan do not form it, else None."""
    uses = np.zeros(len(plan.documents), np.int64)  # parts that each document is in
    for index, part in enumerate(plan.parts):
        error = _part_error(plan, index, part)
        if error is not None:
            return error
        uses += document_mask(part)
    repeated = np.flatnonzero(uses > 1)
    if len(repeated):
        doc = repeated[0]
        users = ", ".join(str(index) for index, part in enumerate(plan.parts) if document_mask(part)[doc])
        return f"document {doc} is in parts {users}; valid: in one, and of length 0 in the others"
    return _tree_error(plan) or (
        _layout_error(plan, "layout", "queries")
        or _layout_error(plan, "kv_layout_in", "keys")
        or _order_error(plan, "forward")
        or _order_error(plan, "backward")
    )


def _part_error(plan: Plan, index: int, part: Plan) -> str | None:
    """Return the error text if one part cannot be a part of the plan, else None."""
    documents = len(plan.documents)
    if part.parts:
        return f"part {index} has parts itself; valid: plans without parts"
    if part.attention != plan.attention:
        return f"part {index} is for {part.attention}, the plan for {plan.attention}"
    if part.topology != plan.topology:
        return f"part {index} is for {part.topology}, the plan for {plan.topology}"
    if part.reduce_dtype != plan.reduce_dtype:
        return f"part {index} has reduce_dtype {part.reduce_dtype}, the plan {plan.reduce_dtype}; valid: the same"
    if part.linear_layout is not None:
        return f"part {index} has a linear_layout; valid: None, as the whole plan has the layout of linear layers"
    if len(part.documents) != documents or len(part.kv_documents) != documents:
        return f"part {index} has {len(part.documents)} documents, the plan {documents}"
    return None


def _tree_error(plan: Plan) -> str | None:
    """Return the error text if a part has other parents or blocks than the plan, or only some documents of a tree, else
    None."""
    trees = plan.documents.trees
    for index, part in enumerate(plan.parts):
        if not np.array_equal(part.documents.parents, plan.documents.parents):
            return f"part {index} has other parents of documents than the plan"
        if part.documents.key[2] != plan.documents.key[2]:
            return f"part {index} has other blocks of documents than the plan"
        if trees is None:
            continue
        missing = (part.documents.lengths == 0) & (plan.documents.lengths > 0)
        in_part = np.zeros(len(missing), bool)
        in_part[trees.roots[document_mask(part)]] = True
        broken = np.flatnonzero(missing & in_part[trees.roots])
        if len(broken):
            doc = broken[0]
            return f"part {index} has documents of the tree of document {trees.roots[doc]}, but not document {doc}"
    return None


def _layout_error(plan: Plan, name: str, noun: str) -> str | None:
    """Return the error text if a layout of the parts is not the plan's layout of their documents, else None."""
    whole: Layout = getattr(plan, name)
    layouts: list[Layout] = [getattr(part, name) for part in plan.parts]
    lengths = sum((layout.documents.lengths for layout in layouts), np.zeros(len(plan.documents), np.int64))
    wrong = np.flatnonzero(lengths != whole.documents.lengths)
    if len(wrong):
        doc = int(wrong[0])
        return f"document {doc}: the parts have {lengths[doc]} of its {whole.documents.lengths[doc]} {noun}"
    for index, (part, layout) in enumerate(zip(plan.parts, layouts, strict=True)):
        if layout.ranks != whole.ranks:
            return f"part {index} is for {layout.ranks} ranks, the plan for {whole.ranks}"
        expected = select_layout(whole, document_mask(part))
        spans, others = (from_spans(x.documents, x.ranks, x.spans).spans for x in (layout, expected))
        for rank in range(layout.ranks) if not np.array_equal(spans, others) else ():
            if not np.array_equal(spans[spans["rank"] == rank], others[others["rank"] == rank]):
                return f"rank {rank}: {name} of part {index} differs from the plan's rows of its documents"
    return None


def _order_error(plan: Plan, direction: str) -> str | None:
    """Return the error text if an order does not take every step of every part once and ascending, else None."""
    name = f"{direction}_order"
    steps = [getattr(part, direction).steps for part in plan.parts]
    taken = [0] * len(steps)
    for entry in plan.step_order(direction):
        part, step = entry
        if not 0 <= part < len(steps):
            return f"{name}: {entry} names part {part}; valid: 0 to {len(steps) - 1}"
        if step != taken[part]:
            return f"{name}: {entry} comes where step {taken[part]} of part {part} is due"
        if step >= steps[part]:
            return f"{name}: {entry}: part {part} has {steps[part]} steps"
        taken[part] += 1
    for part, (count, all_steps) in enumerate(zip(taken, steps, strict=True)):
        if count < all_steps:
            return f"{name}: step {count} of part {part} is missing"
    return None


def _union_layout(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of the whole batch, given the layouts of all parts."""
    documents = layouts[0].documents.with_lengths(np.sum([layout.documents.lengths for layout in layouts], axis=0))
    spans = concatenate_records([_renumbered(layout.spans, layout.documents, documents) for layout in layouts])
    return Layout(documents, layouts[0].ranks, spans[np.lexsort((spans["start"], spans["rank"]))])


def _renumbered(spans: np.ndarray, source: Documents, target: Documents) -> np.ndarray:
    """Renumber the tokens of spans from one batch to another with the same document indices."""
    out = spans.copy()
    shift = target.offsets[spans["doc"]] - source.offsets[spans["doc"]]
    out["start"] += shift
    out["stop"] += shift
    return out
