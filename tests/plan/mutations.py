"""Random changes of plans: of any field, array or tile, of a thing wherever it stands, or of a kind that keeps a plan right.

What comes of a change is a plan that is refused, or one that is exact (tests/plan/test_mutated_plans.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from random import Random
from typing import Any

import numpy as np

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Layout, Plan
from mindspeed_cp.layout import contiguous, row_zigzag, zigzag
from mindspeed_cp.plan import BAND, CAUSAL, FULL, Messages, Program, Topology
from tests.engine.draw import blocks, parents, problem
from tests.plan.forests import forest_plan
from tests.plan.parts import mixed_plan
from tools import capabilities

CELLS = [cell for cell in capabilities.all_cells() if cell.backend == "cpu" and capabilities.unsupported(cell) is None]
WORDS = ("float32", "bfloat16", "float16", "int8", "bool", "messages", "all_to_all", "causal", "full", "", None, 3)
OBJECTS = None, 3, "x", True, (), 0.5
EXTREMES = (0, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def random_plan(rng: Random) -> Plan:
    """A right plan of up to 120 tokens on up to 5 ranks: of any cell of the capabilities, with latents, of relays or parts."""
    while True:
        case = problem(rng.choice(CELLS), rng.choice((1, 2, 3, 3, 4, 4, 5)), rng)
        if case.documents.tokens + (sum(case.kv_lengths or ())) > 120:
            continue
        case = replace(case, head_dim=8, head_dim_v=rng.choice((8, 5)))
        kind = rng.random()
        if kind < 0.1 and case.kv_lengths is None and case.documents.is_plain and case.ranks > 1:
            return forest_plan(list(case.lengths), case.ranks, case.attention, rng.randrange(1000))
        if kind < 0.2 and case.kv_lengths is None and case.documents.is_plain:
            return mixed_plan(case.documents, case.ranks, case.attention, rng.choice(("ring", "direct")))
        if kind < 0.3 and case.heads == case.kv_heads:
            case = replace(case, latent=(6, 3))
        return case.plan()


def mutated(plan: Plan, rng: Random) -> Plan:
    """The plan with one to three changes."""
    changes = (_change_leaf, _change_leaf, _change_everywhere, _change_tiles, _change_tiles, _change_program)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change, before = rng.choice(changes), plan
        for _ in range(20):
            try:
                plan = change(before, rng)
            except (ConfigError, ValueError, IndexError, TypeError, AttributeError):
                continue  # the change makes no object, or does not fit one that another change made
            if plan is not before:
                break
    return plan


# ---- anywhere: values by their types


def _leaves(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Path and value of everything in a plan."""
    if path:
        yield path, item
    if is_dataclass(item):
        for field in fields(Program if isinstance(item, Program) else item):  # of ChangedTiles a program's fields alone
            yield from _leaves(getattr(item, field.name), (*path, field.name))
    elif isinstance(item, tuple) and item and isinstance(item[0], Plan):
        for index, part in enumerate(item):
            yield from _leaves(part, (*path, index))


def _with(item: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    name, *rest = path
    if isinstance(item, tuple):
        return (*item[:name], _with(item[name], tuple(rest), value), *item[name + 1 :])
    return replace(item, **{name: _with(getattr(item, name), tuple(rest), value)})


def _change_leaf(plan: Plan, rng: Random) -> Plan:
    leaves = list(_leaves(plan))
    kinds = sorted({type(value).__name__ for _, value in leaves})
    kind = "ndarray" if rng.random() < 0.5 else rng.choice(kinds)  # arrays are where most of a plan is
    path, value = rng.choice([leaf for leaf in leaves if type(leaf[1]).__name__ == kind])
    return _with(plan, path, changed_value(value, rng, plan))


def changed_value(value: Any, rng: Random, plan: Plan) -> Any:
    """Another value, mostly of the same type."""
    if rng.random() < 0.05:
        return rng.choice(OBJECTS)
    if isinstance(value, np.ndarray):
        return changed_array(value, rng)
    if isinstance(value, str):
        return rng.choice([word for word in WORDS if word != value])
    if isinstance(value, bool) or value is None:
        return rng.choice((True, (2, 0), (0, 0), (1.0,) * plan.attention.heads, plan.layout, (6, 3), 0.3))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, np.int64(value), float(value), *EXTREMES))
    if isinstance(value, float):
        return rng.choice((0.0, 0.25, 1.0, -value, 2 * value, float("nan")))
    if isinstance(value, AttentionConfig):
        name = rng.choice([field.name for field in fields(AttentionConfig)])
        return replace(value, **{name: changed_value(getattr(value, name), rng, plan)})
    if isinstance(value, Topology):
        return rng.choice((Topology(1, plan.ranks + 1), Topology(plan.ranks, 1), Topology(1, plan.ranks, "x")))
    if isinstance(value, Documents):
        return changed_documents(value, rng)
    if isinstance(value, Layout):
        return changed_layout(value, rng)
    if isinstance(value, tuple) and value:
        first, second = rng.randrange(len(value)), rng.randrange(len(value))
        items = list(value)
        items[first], items[second] = items[second], items[first]
        return rng.choice((tuple(items), value[:-1], (*value, value[first]), value[::-1], list(value), (*value, 1)))
    return rng.choice((plan.forward, plan.backward, plan.forward.fetch, plan.backward.reduce))


def changed_array(array: np.ndarray, rng: Random) -> np.ndarray:
    """An array of integers or records with other numbers, rows in another order, or another shape or type."""
    out, kind = array.copy(), rng.random()
    if kind < 0.06:
        shapes = (array[:, None], array[:0], array.tolist(), array[::2], np.repeat(array, 2))
        return rng.choice((*shapes, array.astype([(name, np.int32) for name in array.dtype.names or ("x",)])))
    if not len(array):
        return np.zeros(1, array.dtype) if array.ndim == 1 else out
    first, second = rng.randrange(len(array)), rng.randrange(len(array))
    if kind < 0.26:
        order = np.array(rng.sample(range(len(array)), len(array)))
        out[[first, second]] = out[[second, first]]
        return rng.choice((out, np.delete(array, first, 0), np.insert(array, first, array[second], 0), array[order]))
    column = out[rng.choice(array.dtype.names)] if array.dtype.names else out.reshape(len(out), -1)
    column = column if column.ndim == 1 else column[:, rng.randrange(column.shape[1])]
    before = int(column[first])
    near = (
        before + 1,
        before - 1,
        before + rng.randint(-9, 9),
        int(column[second]),
        rng.randint(0, int(column.max()) + 1),
    )
    if kind < 0.35:
        column += rng.choice((1, -1, 3))
    elif kind < 0.5:
        column[[first, second]] = column[[second, first]]
    elif kind < 0.55 and array.dtype.names:
        column[first] = out[rng.choice(array.dtype.names)][first]
    else:
        column[first] = rng.choice(near if rng.random() < 0.9 else EXTREMES)
    return out


# ---- a thing wherever it stands


def _change_everywhere(plan: Plan, rng: Random) -> Plan:
    """Another attention, other documents or another layout, in all places where the old ones stand."""
    kinds = rng.choice((AttentionConfig, Documents, Documents, Layout))
    old = rng.choice([value for _, value in _leaves(plan) if isinstance(value, kinds)])
    new, made = changed_value(old, rng, plan), {}

    def put(item: Any) -> Any:
        if item is old or (not isinstance(item, Layout) and type(item) is type(old) and item == old):
            return new
        if id(item) not in made:
            made[id(item)] = item
            if isinstance(item, tuple):
                made[id(item)] = tuple(map(put, item))
            elif is_dataclass(item) and not isinstance(item, AttentionConfig):
                made[id(item)] = replace(item, **{field.name: put(getattr(item, field.name)) for field in fields(item)})
        return made[id(item)]

    return put(plan)


def changed_documents(documents: Documents, rng: Random) -> Documents:
    lengths = documents.lengths.tolist()
    old_blocks = None if documents.blocks is None else np.stack([documents.blocks.start, documents.blocks.stop], 1)
    kind = rng.choice(("lengths", "parents", "blocks"))
    if kind == "lengths":
        index = rng.randrange(len(lengths))
        lengths[index] = max(0, lengths[index] + rng.choice((-1, 1, 4)))
        return Documents(rng.choice((lengths, lengths[::-1], lengths[1:])), documents.parents, old_blocks)
    if kind == "parents":
        return Documents(lengths, rng.choice((None, parents(len(lengths), rng))), old_blocks)
    return Documents(lengths, documents.parents, rng.choice((None, blocks(lengths, rng))))


def changed_layout(layout: Layout, rng: Random) -> Layout:
    """The same tokens on other ranks, with other heads, or cut elsewhere."""
    if not 0 < layout.ranks < 100:  # of another change
        return layout
    make = rng.choice((zigzag, contiguous, row_zigzag, None, None))
    if make is not None:
        return replace(make(layout.documents, layout.ranks), heads=layout.heads)
    spans = layout.spans.copy()
    if rng.random() < 0.3:
        heads = np.array([sorted((rng.randint(0, 4), rng.randint(0, 4))) for _ in range(layout.ranks)])
        return replace(layout, heads=rng.choice((None, heads, np.tile([0, 4], (layout.ranks, 1)))))
    if rng.random() < 0.5:
        ranks = np.array(rng.sample(range(layout.ranks), layout.ranks))
        spans["rank"] = ranks[spans["rank"]]
        return replace(layout, spans=spans[np.lexsort((spans["start"], spans["rank"]))])
    index = rng.randrange(len(spans))
    middle = (spans["start"][index] + spans["stop"][index]) // 2  # a span becomes two that touch
    spans = np.insert(spans, index, spans[index])
    spans["stop"][index] = spans["start"][index + 1] = middle
    return replace(layout, spans=spans)


# ---- tiles


@dataclass(frozen=True, eq=False)
class ChangedTiles(Program):
    """A program whose tiles at one rank are changed."""

    changed_rank: int = 0
    seed: int = 0

    def tiles(self, rank: int) -> np.ndarray:
        tiles = super().tiles(rank)
        return changed_tiles(tiles, Random(self.seed), self.attention) if rank == self.changed_rank else tiles


def _change_tiles(plan: Plan, rng: Random) -> Plan:
    path, program = rng.choice([leaf for leaf in _leaves(plan) if isinstance(leaf[1], Program) and leaf[1].steps])
    ranks = sorted(set(program.contents["rank"].tolist()))
    values = {field.name: getattr(program, field.name) for field in fields(Program)}
    return _with(plan, path, ChangedTiles(**values, changed_rank=rng.choice(ranks), seed=rng.randrange(2**30)))


def changed_tiles(tiles: np.ndarray, rng: Random, attention: AttentionConfig) -> np.ndarray:
    if not len(tiles) or tiles.ndim > 1:  # of another change
        return tiles
    kind, index = rng.random(), rng.randrange(len(tiles))
    if kind < 0.25:
        out = changed_array(tiles, rng)
        return out if isinstance(out, np.ndarray) else tiles[:0]
    if kind < 0.4:
        key = tiles["step"] * 100 + (0 if rng.random() < 0.5 else tiles["slot"])  # in a step or a slot any order
        return tiles[np.lexsort((np.array(rng.sample(range(len(tiles)), len(tiles))), key))]
    tile, out = tiles[index].copy(), tiles.copy()
    if kind < 0.5:  # a band that may be the same, and may have rows and keys that see nothing
        out["mask"][index] = BAND
        return out
    if kind < 0.6:
        for name, by in rng.choice(((("q_rows", 1),), (("k_rows", 1),), (("k_rows", -1),), (("q_row", -1), ("q_pos", -1), ("q_rows", 1)), (("k_row", -1), ("k_pos", -1), ("k_rows", 1)))):  # fmt: skip
            out[name][index] += by
        return out
    return np.concatenate([tiles[:index], *(piece[None] for piece in _pieces(tile, rng)), tiles[index + 1 :]])


def _pieces(tile: np.ndarray, rng: Random) -> list[np.ndarray]:
    """Tiles that together are one: cut along queries or keys, a causal one in its full part and its square, a full one in
    a causal one and the rest of each row."""

    def piece(q: int, q_rows: int, k: int, k_rows: int, mask: int) -> np.ndarray:
        out = tile.copy()
        for name, by in (("q_row", q), ("q_pos", q), ("k_row", k), ("k_pos", k)):
            out[name] += by
        out["q_rows"], out["k_rows"], out["mask"] = q_rows, k_rows, mask
        return out

    n, m, mask = int(tile["q_rows"]), int(tile["k_rows"]), int(tile["mask"])
    if mask == FULL and m >= n > 1 and rng.random() < 0.5:
        rest = [piece(row, 1, m - n + row + 1, n - row - 1, FULL) for row in range(n - 1)]
        return [piece(0, n, 0, m, CAUSAL), *rest]
    if mask == CAUSAL and m > n and rng.random() < 0.5:
        return [piece(0, n, 0, m - n, FULL), piece(0, n, m - n, n, CAUSAL)]
    if n > 1 and (mask == CAUSAL or rng.random() < 0.5):
        cut = rng.randrange(1, n)
        hidden = n - cut if mask == CAUSAL else 0
        return [piece(0, cut, 0, m - hidden, mask), piece(cut, n - cut, 0, m, mask)]
    if m > 1 and mask != CAUSAL:
        cut = rng.randrange(1, m)
        return [piece(0, n, 0, cut, mask), piece(0, n, cut, m - cut, mask)]
    return [tile]


# ---- steps, slots and messages


def _change_program(plan: Plan, rng: Random) -> Plan:
    path, program = rng.choice([leaf for leaf in _leaves(plan) if isinstance(leaf[1], Program) and leaf[1].steps])
    return _with(plan, path, rng.choice(PROGRAM_CHANGES)(program, rng))


def idle_step(program: Program, rng: Random) -> Program:
    """One step more, without work."""
    step = rng.randrange(program.steps + 1)
    contents = program.contents.copy()
    contents["step"] += contents["step"] >= step
    return replace(program, steps=program.steps + 1, contents=contents, **{
        kind: _with_items(getattr(program, kind), lambda items: [_later(items, step)]) for kind in ("fetch", "reduce")
    })  # fmt: skip


def _later(items: np.ndarray, step: int) -> np.ndarray:
    for name in ("start", "done"):
        items[name] += items[name] >= step
    return items


def other_slots(program: Program, rng: Random) -> Program:
    """Receive buffers in another order."""
    slots = program.capacity.shape[1]
    number = np.array([0, *rng.sample(range(1, slots), slots - 1)])  # of each slot
    contents, capacity = program.contents.copy(), program.capacity.copy()
    contents["slot"] = number[contents["slot"]]
    contents = contents[np.lexsort([contents[name] for name in ("row", "slot", "step", "rank")])]
    capacity[:, number] = program.capacity

    def renumber(items: np.ndarray) -> list[np.ndarray]:
        for name in ("src_slot", "dst_slot"):
            items[name] = number[items[name]]
        return [items]

    both = {kind: _with_items(getattr(program, kind), renumber) for kind in ("fetch", "reduce")}
    return replace(program, contents=contents, capacity=capacity, **both)


def message_in_two(program: Program, rng: Random) -> Program:
    """The runs of a message as two messages."""
    kind = rng.choice(("fetch", "reduce"))
    messages = getattr(program, kind)
    index = rng.choice(np.flatnonzero(messages.items["count"] > 1).tolist())
    item = messages.items[index]
    cut = rng.randrange(1, int(item["count"]))
    rows = int(messages.runs_of(index)["rows"][:cut].sum())

    def split(items: np.ndarray) -> list[np.ndarray]:
        second = items[index].copy()
        items["count"][index], items["rows"][index] = cut, rows
        second["first"] += cut
        second["count"] -= cut
        second["rows"] -= rows
        return [items[: index + 1], second[None], items[index + 1 :]]

    return replace(program, **{kind: _with_items(messages, split)})


def message_at_another_time(program: Program, rng: Random) -> Program:
    """A message, or all, earlier or later."""
    kind = rng.choice(("fetch", "reduce"))
    messages = getattr(program, kind)
    index, start, done = rng.randrange(len(messages)), rng.choice((0, 0, 1, -1)), rng.choice((0, 1, -1))

    def move(items: np.ndarray) -> list[np.ndarray]:
        where = slice(None) if rng.random() < 0.2 else index
        items["start"][where] += start
        items["done"][where] += done
        return [items[np.argsort(items["start"], kind="stable")]]

    return replace(program, **{kind: _with_items(messages, move)})


def messages_in_another_order(program: Program, rng: Random) -> Program:
    """The messages of each step in any order."""
    kind = rng.choice(("fetch", "reduce"))
    items = getattr(program, kind).items
    order = np.lexsort((np.array(rng.sample(range(len(items)), len(items))), items["start"]))
    return replace(program, **{kind: Messages(items[order], getattr(program, kind).runs)})


def content_in_two(program: Program, rng: Random) -> Program:
    """The spans of a content as two contents, of which the second may be computed in another step."""
    index = rng.choice(np.flatnonzero(program.contents["count"] > 1).tolist())
    content = program.contents[index]
    cut = rng.randrange(1, int(content["count"]))
    spans = program.spans_in(content)[:cut]
    contents = np.insert(program.contents, index + 1, content)
    contents["count"][index] = cut
    contents["first"][index + 1] += cut
    contents["count"][index + 1] -= cut
    contents["row"][index + 1] += (spans["stop"] - spans["start"]).sum()
    contents["step"][index + 1] = rng.choice((content["step"], content["step"] + 1, content["step"] - 1))
    return replace(program, contents=contents[np.lexsort([contents[name] for name in ("row", "slot", "step", "rank")])])


def _with_items(messages: Messages, change: Callable[[np.ndarray], list[np.ndarray]]) -> Messages:
    return Messages(np.concatenate(change(messages.items.copy())), messages.runs)


PROGRAM_CHANGES = (
    idle_step, other_slots, message_in_two, message_at_another_time, message_at_another_time, messages_in_another_order,
    content_in_two,
)  # fmt: skip
