"""A plan of several parts over disjoint documents of one batch, each treated in its own way.

A part is an ordinary plan over `Documents` that has all documents of the batch: those of other parts have length 0, so
that a document has one number everywhere (dropout depends on it). Its rows on a rank are the rank's rows of its
documents, in their order::

    batch           A A A B B B B C C        documents A, B, C
    part 0          A A A         C C        lengths 3, 0, 2: keys and values are exchanged
    part 1                B B B B            lengths 0, 4, 0: heads are split

The engine posts the moves of all parts first. Then it takes the steps of all parts in one order, the same on every
rank: a step finishes the messages due in its part's step before, posts its own, and computes. What a part waits for
travels while the parts between its steps compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Layout, from_spans
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CONTENT, Messages

Order = tuple[tuple[int, int], ...]


def combine(name: str, parts: Sequence[Plan], order: Order | None = None, order_backward: Order | None = None) -> Plan:
    """One plan of several parts.

    Args:
        name: of the whole, for people.
        parts: plans without parts, of one attention and topology. Every document is in one of them, and has length 0 in
            the others (`documents_of` and `layout_of` cut a batch so).
        order: (part, step) of every forward step, in the order to take them; default: `default_order`.
        order_backward: the same for the backward.

    Raises:
        ConfigError: the parts do not make one plan; names the part and the document or step.
    """
    parts = tuple(parts)
    if not parts or not all(isinstance(part, Plan) for part in parts):
        raise ConfigError(f"parts are {parts!r}; valid: one Plan or more, each over some documents of the batch")
    if len({(part.ranks, len(part.documents), len(part.kv_documents)) for part in parts}) > 1:
        said = "; ".join(f"{part.ranks} ranks, {len(part.documents)} documents" for part in parts)
        raise ConfigError(f"parts are of {said}; valid: the same ranks, and all documents of the batch in each")
    layout = _together([part.layout for part in parts])
    same = all(part.layout_kv is part.layout for part in parts)
    layout_kv = layout if same else _together([part.layout_kv for part in parts])
    attention = parts[0].attention
    capacity = layout_kv.token_counts[:, None]
    empty, none = np.empty(0, CONTENT), Messages.none()
    nothing = Program(
        0, capacity, layout, layout_kv.documents, attention, empty, layout_kv.spans[:0], none, none
    )  # the whole computes in its parts
    plan = Plan(
        name,
        attention,
        parts[0].topology,
        layout,
        layout_kv,
        layout,
        layout_kv,
        nothing,
        nothing,
        parts,
        default_order(parts, "forward") if order is None else tuple(order),
        default_order(parts, "backward") if order_backward is None else tuple(order_backward),
    )
    problem = no_whole(plan)
    if problem is not None:
        raise ConfigError(f"parts: {problem}")
    return plan


def default_order(parts: Sequence[Plan], direction: str) -> Order:
    """First steps of the parts that exchange messages, so that these travel; then the parts without messages; then the
    other steps, one of each part in turn."""
    programs: list[Program] = [getattr(part, direction) for part in parts]
    exchanging = [number for number, program in enumerate(programs) if len(program.fetch) or len(program.reduce)]
    alone = [number for number in range(len(parts)) if number not in exchanging]
    most = max(program.steps for program in programs)
    return (
        *((number, 0) for number in exchanging),
        *((number, step) for number in alone for step in range(programs[number].steps)),
        *((number, step) for step in range(1, most) for number in exchanging if step < programs[number].steps),
    )


def documents_of(documents: Documents, chosen: np.ndarray) -> Documents:
    """The same documents, with length 0 where they are not chosen (bool [documents])."""
    return Documents(np.where(chosen, documents.lengths, 0))


def layout_of(layout: Layout, chosen: np.ndarray) -> Layout:
    """What a layout holds of the chosen documents (bool [documents]), as the layout of a part."""
    documents = documents_of(layout.documents, chosen)
    spans = layout.spans[chosen[layout.spans["doc"]]]
    return Layout(documents, layout.ranks, _shifted(spans, layout.documents, documents), layout.heads)


def is_in(part: Plan) -> np.ndarray:
    """Documents that a part has queries or keys of, bool [documents]."""
    return (part.documents.lengths > 0) | (part.kv_documents.lengths > 0)


def rows_of(plan: Plan, part: int, rank: int, keys: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of a part are among the rank's rows of the whole: first row and number of rows of each run.

    Args:
        plan: a plan of parts.
        part: its number.
        rank: context-parallel rank.
        keys: rows of keys and values, and not of queries.
    """
    layout = plan.layout_kv if keys else plan.layout
    spans = layout.of(rank)
    mine = is_in(plan.parts[part])[spans["doc"]]
    first = layout.first_rows[layout.bounds[rank] : layout.bounds[rank + 1]]
    return first[mine], (spans["stop"] - spans["start"])[mine]


def conclusions(plan: Plan, direction: str) -> list[int]:
    """For each part when it is concluded: its output, or its gradients, are rounded and leave for where they belong.
    That is after the turn of the number given, its last one; or after all turns, where messages are still due."""
    turns = plan.turns(direction)
    last = {part: number for number, (part, _) in enumerate(turns)}
    programs: list[Program] = [getattr(part, direction) for part in plan.pieces]
    return [
        len(turns)
        if any((messages.items["done"] == program.steps - 1).any() for messages in (program.fetch, program.reduce))
        else last[number]
        for number, program in enumerate(programs)
    ]


def no_whole(plan: Plan) -> str | None:
    """Why the parts of a plan do not make it; None where they do."""
    times = np.zeros(len(plan.documents), np.int64)
    for number, part in enumerate(plan.parts):
        if part.parts:
            return f"part {number} has parts itself; valid: plans without parts"
        if part.attention != plan.attention:
            return f"part {number} is for {part.attention}, the plan for {plan.attention}"
        if part.topology != plan.topology:
            return f"part {number} is for {part.topology}, the plan for {plan.topology}"
        if part.linear is not None:
            return f"part {number} has a layout of linear layers; valid: none, as that is the whole plan's"
        if len(part.documents) != len(times) or len(part.kv_documents) != len(times):
            return f"part {number} has {len(part.documents)} documents, the plan {len(times)}"
        times += is_in(part)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        of = [number for number, part in enumerate(plan.parts) if is_in(part)[twice[0]]]
        return (
            f"document {twice[0]} is in parts {', '.join(map(str, of))}; valid: in one, and of length 0 in the others"
        )
    for name, what in (("layout", "queries"), ("layout_kv", "keys")):
        whole: Layout = getattr(plan, name)
        lengths = sum((getattr(part, name).documents.lengths for part in plan.parts), np.zeros(len(times), np.int64))
        wrong = np.flatnonzero(lengths != whole.documents.lengths)
        if len(wrong):
            doc = int(wrong[0])
            return f"document {doc}: the parts have {lengths[doc]} of its {whole.documents.lengths[doc]} {what}"
        for number, part in enumerate(plan.parts):
            held: Layout = getattr(part, name)
            if held.ranks != whole.ranks:
                return f"part {number} is for {held.ranks} ranks, the plan for {whole.ranks}"
            rank = _differs(held, layout_of(whole, is_in(part)))
            if rank is not None:
                return f"rank {rank}: part {number} has other rows in its {name} than the plan has of its documents"
    for direction in ("forward", "backward"):
        problem = _no_order(plan, direction)
        if problem is not None:
            return problem
    return None


def _no_order(plan: Plan, direction: str) -> str | None:
    """Why the order of a direction does not take every step of every part once, each part's ascending."""
    name = "order" if direction == "forward" else "order_backward"
    steps = [getattr(part, direction).steps for part in plan.parts]
    taken = [0] * len(steps)
    for entry in plan.turns(direction):
        part, step = entry
        if not 0 <= part < len(steps):
            return f"{name}: {entry} names part {part}; valid: 0 to {len(steps) - 1}"
        if step != taken[part]:
            return f"{name}: {entry} comes where step {taken[part]} of part {part} is due"
        if step >= steps[part]:
            return f"{name}: {entry}: part {part} has {steps[part]} steps"
        taken[part] += 1
    for part, (done, all_steps) in enumerate(zip(taken, steps, strict=True)):
        if done < all_steps:
            return f"{name}: step {done} of part {part} is missing"
    return None


def _together(layouts: Sequence[Layout]) -> Layout:
    """The layout of the whole batch, from those of the parts."""
    documents = Documents(np.sum([layout.documents.lengths for layout in layouts], axis=0))
    spans = np.concatenate([_shifted(one.spans, one.documents, documents) for one in layouts])
    return Layout(documents, layouts[0].ranks, spans[np.lexsort((spans["start"], spans["rank"]))])


def _shifted(spans: np.ndarray, source: Documents, target: Documents) -> np.ndarray:
    """Spans in the token numbers of other documents; documents that the target leaves out are not in them."""
    out = spans.copy()
    by = target.offsets[spans["doc"]] - source.offsets[spans["doc"]]
    out["start"] += by
    out["stop"] += by
    return out


def _differs(one: Layout, other: Layout) -> int | None:
    """The first rank to which two layouts give other tokens; None where there is none."""
    a, b = (from_spans(layout.documents, layout.ranks, layout.spans).spans for layout in (one, other))
    if np.array_equal(a, b):
        return None
    return next(rank for rank in range(one.ranks) if not np.array_equal(a[a["rank"] == rank], b[b["rank"] == rank]))
