"""Structure: fields have their types, and every step, slot, row, run, rank and document that a plan refers to exists.

Numbers may be any of 64 bits: sums that could overflow are written as differences (`row > room - rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_origin, get_type_hints

import numpy as np

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import ROW_RUN, TOKEN_SPAN, Layout, ragged_arange
from mindspeed_cp.plan.parts import parts_error
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.program import DIRECTIONS, REDUCE_BYTES, Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL, CONTENT, MASK_NAMES, MESSAGE, Messages
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import is_int

#: Most steps of a program: the engine and the proof take time and memory for each.
MAX_STEPS = 10**6

#: Classes of a plan's objects, and records of their one-dimensional arrays by the field's name; others are of int64.
_CLASSES = (Plan, Program, Messages, Layout)
_RECORDS = {"contents": CONTENT, "spans": TOKEN_SPAN, "items": MESSAGE, "runs": ROW_RUN}


@cache
def _field_types(owner: type) -> dict[str, Any]:
    """Return the type of each field of a class, a dtype in the place of a one-dimensional array of records."""
    hints = get_type_hints(owner)
    return {name: _RECORDS.get(name, tuple if get_origin(hint) is tuple else hint) for name, hint in hints.items()}


def check_types(plan: Plan) -> None:
    """Raise PlanError unless all fields of a plan and its parts have their types, shapes and values by name."""
    for index, part in enumerate([plan, *plan.parts] if isinstance(plan.parts, tuple) else [plan]):
        where = f"part {index - 1}: " if index else ""
        if not isinstance(part, Plan):
            raise PlanError(f"{where}it is {short_repr(part)}; valid: a Plan")
        _check_fields(part, where)
        if index and part.parts:
            raise PlanError(f"parts: part {index - 1} has parts itself; valid: plans without parts")
        if part.reduce_dtype not in REDUCE_BYTES:
            raise PlanError(f"{where}reduce_dtype is {short_repr(part.reduce_dtype)}; valid: {', '.join(REDUCE_BYTES)}")
        for direction in DIRECTIONS:
            shape = getattr(part, direction).capacity.shape
            if len(shape) != 2 or shape[0] != part.ranks or not shape[1]:
                raise PlanError(f"{where}{direction}: capacity has shape {shape}; valid: ({part.ranks}, slots)")
            order = getattr(part, f"{direction}_order")
            if not all(isinstance(entry, tuple) and len(entry) == 2 and all(map(is_int, entry)) for entry in order):
                raise PlanError(f"{where}{direction}_order is {short_repr(order)}; valid: pairs of part and step")


def _check_fields(item: object, where: str) -> None:
    """Check the types of the fields of one object, and of those in it."""
    for name, kind in _field_types(next(owner for owner in _CLASSES if isinstance(item, owner))).items():
        value = getattr(item, name)
        if isinstance(kind, np.dtype):
            fits = isinstance(value, np.ndarray) and value.dtype == kind and value.ndim == 1
        else:
            fits = is_int(value) if kind is int else isinstance(value, kind)
        if isinstance(value, np.ndarray) and not isinstance(kind, np.dtype):  # capacity and heads
            fits = fits and value.dtype == np.int64
        if not fits:
            raise PlanError(f"{where}{name} is {_described(value)}; valid: {_described_type(kind)}")
        if isinstance(value, _CLASSES):
            _check_fields(value, f"{where}{name}.")
        elif isinstance(value, AttentionConfig):
            try:
                value.check()
            except ConfigError as error:
                raise PlanError(f"{where}{error}") from None
    if isinstance(item, Layout) and item.heads is not None and item.heads.shape != (item.ranks, 2):
        raise PlanError(f"{where}heads has shape {item.heads.shape}; valid: ({item.ranks}, 2)")


def _described(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return short_repr(value)
    fields = "" if value.dtype.names is None else f"records of {', '.join(value.dtype.names)}, "
    return f"an array of {fields or f'{value.dtype}, '}shape {value.shape}"


def _described_type(kind: Any) -> str:
    if isinstance(kind, np.dtype):
        return f"int64 records of {', '.join(kind.names or ())}"
    if kind in (np.ndarray, np.ndarray | None):
        return "an array of int64"
    return str(getattr(kind, "__name__", kind))


def describe_tile(tile: np.ndarray) -> str:
    """Describe a tile for an error message."""
    mask = MASK_NAMES.get(int(tile["mask"]), f"unknown mask {tile['mask']}")
    q, k = int(tile["q_row"]), int(tile["k_row"])
    q_last, k_last = q + int(tile["q_rows"]) - 1, k + int(tile["k_rows"]) - 1
    return f"{mask} tile of q rows {q}..{q_last} and rows {k}..{k_last} of slot {tile['slot']}"


def describe_message(kind: str, item: np.ndarray) -> str:
    """Describe a message for an error message."""
    return (
        f"{kind} of {item['rows']} rows from rank {item['src']} slot {item['src_slot']} to rank {item['dst']} slot "
        f"{item['dst_slot']}, steps {item['start']} to {item['done']}"
    )


def check_program(plan: Plan, program: Program, direction: str) -> None:
    """Raise PlanError unless the steps, slots, rows and runs of messages and contents exist."""
    if not 1 <= program.steps <= MAX_STEPS:
        raise PlanError(f"{direction}: it has {program.steps} steps; valid: 1 to {MAX_STEPS}")
    tokens = program.kv_documents.tokens
    impossible = np.argwhere(
        (program.capacity < 0) | (program.capacity > tokens)
    )  # before the proof takes their memory
    if len(impossible):
        rank, slot = map(int, impossible[0])
        raise PlanError(
            f"{direction}: rank {rank}, step 0: slot {slot} has {program.capacity[rank, slot]} rows, and the batch "
            f"{tokens} tokens"
        )
    wrong = np.flatnonzero(program.capacity[:, 0] != plan.kv_layout_compute.token_counts)
    if len(wrong):
        rank = int(wrong[0])
        raise PlanError(
            f"{direction}: rank {rank}, step 0: slot 0 has {program.capacity[rank, 0]} rows, but the rank holds "
            f"{plan.kv_layout_compute.token_counts[rank]} tokens"
        )
    for kind in ("fetch", "reduce"):
        items = getattr(program, kind).items
        for wrong, end, why in _message_faults(program, kind) if len(items) else ():
            if wrong.any():
                item = items[int(np.argmax(wrong))]
                where = f"{direction}: {kind}: rank {item[end]}, step {item['start']}"
                raise PlanError(f"{where}: {describe_message('message', item)}{why}")
    for wrong, why in _content_faults(program) if len(program.contents) else ():
        if wrong.any():
            bad = program.contents[int(np.argmax(wrong))]
            where = f"{direction}: rank {bad['rank']}, step {bad['step']}"
            raise PlanError(f"{where}: contents of slot {bad['slot']} {why}")


def _message_faults(program: Program, kind: str) -> Iterator[tuple[np.ndarray, str, str]]:
    """Yield which messages are wrong, the end to name, and why; a check relies on those before it."""
    messages: Messages = getattr(program, kind)
    items, sides, (ranks, slots) = messages.items, ("src", "dst"), program.capacity.shape
    unknown = [(items[side] < 0) | (items[side] >= ranks) for side in sides]
    unknown += [(items[side + "_slot"] < 0) | (items[side + "_slot"] >= slots) for side in sides]
    yield np.any(unknown, axis=0), "src", f": ranks go from 0 to {ranks - 1} and slots from 0 to {slots - 1}"
    yield items["src"] == items["dst"], "src", ": a rank does not send to itself"
    backwards = (items["start"] < 0) | (items["start"] > items["done"]) | (items["done"] >= program.steps)
    yield backwards, "src", f": steps go from 0 to {program.steps - 1}, and a message is not done before it starts"
    missing = (items["first"] < 0) | (items["count"] <= 0) | (items["first"] > len(messages.runs) - items["count"])
    yield missing, "src", ": its runs do not exist"
    why = " comes after a message of a later step; ranks would issue sends and receives in different orders and could "
    yield np.append(False, np.diff(items["start"]) < 0), "src", f"{why}dead-lock"
    owner, runs = messages.flat_runs
    total = np.zeros(len(items), np.int64)
    np.add.at(total, owner, runs["rows"])
    empty = np.bincount(owner[runs["rows"] <= 0], minlength=len(items)) > 0
    yield empty | (total != items["rows"]), "src", " has another number of rows than its runs"
    for side in sides:
        room = program.capacity[items[side][owner], items[side + "_slot"][owner]]
        outside = (runs[side + "_row"] > room - runs["rows"]) | (runs[side + "_row"] < 0)
        first = int(np.argmax(outside))
        why = f" leaves the {room[first]} rows of slot {items[side + '_slot'][owner[first]]}"
        yield np.bincount(owner[outside], minlength=len(items)) > 0, side, why
    if kind == "fetch":
        yield items["dst_slot"] == 0, "dst", " writes to slot 0, the rank's own rows"


def _content_faults(program: Program) -> Iterator[tuple[np.ndarray, str]]:
    """Yield which contents are wrong, and why; a check relies on those before it."""
    contents, spans, documents = program.contents, program.spans, program.kv_documents
    ranks, slots = program.capacity.shape
    ok = (contents["rank"] >= 0) & (contents["rank"] < ranks) & (contents["slot"] >= 0) & (contents["slot"] < slots)
    ok &= (contents["step"] >= 0) & (contents["step"] < program.steps) & (contents["first"] >= 0)
    ok &= (contents["count"] > 0) & (contents["first"] <= len(spans) - contents["count"])
    yield ~ok, "refer to a rank, slot, step or span that does not exist"
    keys = [contents[field] for field in ("row", "slot", "step", "rank")]
    order, rows = np.lexsort(keys), _content_rows(program)
    same = np.all([np.diff(key) == 0 for key in keys[1:]], axis=0)  # another content of the same slot and step
    overlap = same & (contents["row"][1:] < contents["row"][:-1] + rows[:-1])
    yield np.append(False, (order[1:] != order[:-1] + 1) | overlap), "are out of order or overlap"
    _, distinct = np.unique(np.stack([contents["first"], contents["count"]], 1), axis=0, return_index=True)
    first, count = contents["first"][distinct], contents["count"][distinct]
    held, owner = spans[ragged_arange(first, count)], np.repeat(distinct, count)
    offsets = np.append(documents.offsets, documents.tokens)
    doc = np.clip(held["doc"], 0, len(documents))
    leaves = (doc != held["doc"]) | (held["start"] < offsets[doc]) | (held["stop"] > offsets[doc + 1])
    yield np.bincount(owner[leaves], minlength=len(contents)) > 0, "leave their documents"
    falls = held["stop"] <= held["start"]
    falls[1:] |= (held["start"][1:] < held["stop"][:-1]) & (owner[1:] == owner[:-1])
    yield np.bincount(owner[falls], minlength=len(contents)) > 0, "do not ascend in token order"
    room = program.capacity[contents["rank"], contents["slot"]]
    yield (contents["row"] < 0) | (contents["row"] > room - rows), "leave the rows of the slot"


def _content_rows(program: Program) -> np.ndarray:
    """Count the rows of each content, int64 [contents]."""
    ends = np.concatenate([[0], np.cumsum(program.spans["stop"] - program.spans["start"])])
    return ends[program.contents["first"] + program.contents["count"]] - ends[program.contents["first"]]


def check_tiles(program: Program, rank: int, tiles: np.ndarray, direction: str) -> None:
    """Check that every tile lies in the rank's queries, in the rows that its slot holds, and in its document, and that
    tiles are as operators rely on (:mod:`mindspeed_cp.plan.records`).

    Args:
        program: program that has passed `check_program`.
        rank: rank that computes the tiles.
        tiles: records of dtype TILE.
        direction: "forward" or "backward", for the message.

    Raises:
        PlanError: names rank, step and tile.
    """
    for wrong, why in _tile_faults(program, rank, tiles) if len(tiles) else ():
        if wrong.any():
            tile = tiles[int(np.argmax(wrong))]
            raise PlanError(f"{direction}: rank {rank}, step {tile['step']}: {describe_tile(tile)}: {why}")


def _tile_faults(program: Program, rank: int, tiles: np.ndarray) -> Iterator[tuple[np.ndarray, str]]:
    """Yield which tiles are wrong, and why; a check relies on those before it.

    Every row of a band tile sees a key, and every key is seen; causal tiles are of queries that see no later key and,
    if positions matter, end at one position on both sides and lie in the window: operators make the masks of some calls
    from the attention's visible range and the positions of a tile, not from its mask.
    """
    q_rows, k_rows, attention = tiles["q_rows"], tiles["k_rows"], program.attention
    own_rows, slots = int(program.q_layout_compute.token_counts[rank]), program.capacity.shape[1]
    exists = (tiles["step"] >= 0) & (tiles["step"] < program.steps) & (tiles["slot"] >= 0) & (tiles["slot"] < slots)
    slot_rows = np.where(exists, _rows_held(program, rank, tiles), 0)
    ok = (tiles["q_row"] >= 0) & (q_rows > 0) & (tiles["q_row"] <= own_rows - q_rows)
    ok &= (tiles["k_row"] >= 0) & (k_rows > 0) & (tiles["k_row"] <= slot_rows - k_rows)
    for name in ("doc", "k_doc"):
        ok &= (tiles[name] >= 0) & (tiles[name] < len(program.kv_documents))
    is_band, is_causal = tiles["mask"] == BAND, tiles["mask"] == CAUSAL
    ok &= np.isin(tiles["mask"], list(MASK_NAMES)) & (~is_causal | (k_rows >= q_rows))
    why = (
        f"the rank has {own_rows} q rows, the slot holds rows up to {slot_rows[np.argmin(ok)]} in that step, a causal "
    )
    why += f"tile has at least as many keys as queries, and documents go from 0 to {len(program.kv_documents) - 1}"
    yield ~ok, why
    # Documents that continue the same one share a tile of an ancestor's keys, unless positions matter: only the first
    # query has to be in the document that the tile names.
    is_shared = (tiles["k_doc"] != tiles["doc"]) & (not attention.needs_positions)
    for pos, documents, doc, rows in (
        ("q_pos", program.q_layout_compute.documents, tiles["doc"], np.where(is_shared, 1, q_rows)),
        ("k_pos", program.kv_documents, tiles["k_doc"], k_rows),
    ):
        position = tiles[pos] - documents.first_positions[doc]
        outside = (position < 0) | (position > documents.lengths[doc] - rows)
        i = int(np.argmax(outside))
        why = f"its document {doc[i]} has {documents.lengths[doc[i]]} tokens"
        yield outside, f"its {pos} is {tiles[pos][i]} with {rows[i]} rows, but {why}"
    (left, right), ahead = attention.visible_range, tiles["q_pos"] - tiles["k_pos"]
    last = ahead + q_rows - 1  # position of the last query, from the first key
    yield is_causal & (right > 0), "queries see keys behind themselves"
    yield is_band & ((ahead + right < 0) | (last - left >= k_rows)), "a query sees no key of it"
    yield is_band & ((ahead - left > 0) | (last + right < k_rows - 1)), "no query sees a key of it"
    exact = is_causal & attention.needs_positions
    yield exact & (ahead != k_rows - q_rows), "its last query and its last key are at different positions"
    yield exact & (last > left), "its last query does not reach its first key"
    later = np.diff(tiles["step"] * slots + tiles["slot"]) < 0
    yield np.append(False, later), "it comes after a tile of a later step or slot"


def _rows_held(program: Program, rank: int, tiles: np.ndarray) -> np.ndarray:
    """Return, for each tile, the row behind the content that holds its first key; 0 if there is none. int64 [tiles]."""
    lo, hi = np.searchsorted(program.contents["rank"], [rank, rank + 1])
    contents, rows = program.contents[lo:hi], _content_rows(program)[lo:hi]
    if not len(contents):
        return np.zeros(len(tiles), np.int64)
    # It is the last content of the tile's step and slot that begins at or before the tile's first key.
    scale = int(program.capacity.max(initial=0)) + 2
    content_key = (contents["step"] * program.capacity.shape[1] + contents["slot"]) * scale
    tile_key = (tiles["step"] * program.capacity.shape[1] + tiles["slot"]) * scale
    first_key = tile_key + np.clip(tiles["k_row"], 0, scale - 1)
    index = np.searchsorted(content_key + contents["row"], first_key, "right") - 1
    exists = (index >= 0) & (content_key[index] == tile_key)
    return np.where(exists, (contents["row"] + rows)[index], 0)


# Plans of parts: the parts form the plan.


def check_parts(plan: Plan) -> None:
    """Check a plan of parts, whose layouts are valid; the parts themselves are proved one by one.

    Raises:
        PlanError: the parts do not cover the documents of the batch once, hold other rows than the plan, or miss or
            repeat a step.
    """
    error = parts_error(plan)
    if error is not None:
        raise PlanError(f"parts: {error}")
    if not plan.q_layout_compute.same_as(plan.layout) or not plan.kv_layout_compute.same_as(plan.kv_layout_in):
        raise PlanError(
            "q_layout_compute, kv_layout_compute: a plan of parts redistributes nothing itself, but they differ "
            "from the caller's layouts"
        )
    for direction, program in (("forward", plan.forward), ("backward", plan.backward)):
        if program.steps or len(program.contents) or len(program.fetch) or len(program.reduce):
            raise PlanError(
                f"{direction}: a plan of parts computes and sends in its parts, but it has a program itself"
            )
