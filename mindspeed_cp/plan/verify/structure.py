"""Structure: every step, slot, row, run, rank and document that a plan refers to exists."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CAUSAL, MASK_NAMES, Messages


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
    ranks = plan.ranks
    if (
        program.steps < 1
        or program.capacity.ndim != 2
        or len(program.capacity) != ranks
        or not program.capacity.shape[1]
    ):
        raise PlanError(f"{direction}: {program.steps} steps and capacity {program.capacity.shape} for {ranks} ranks")
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
    _check_messages(program, program.fetch, f"{direction}: fetch")
    _check_messages(program, program.reduce, f"{direction}: reduce")
    into_own = np.flatnonzero(program.fetch.items["dst_slot"] == 0)
    if len(into_own):
        item = program.fetch.items[into_own[0]]
        raise PlanError(
            f"{direction}: rank {item['dst']}, step {item['start']}: a fetch writes to slot 0, the rank's own rows "
            f"({describe_message('fetch', item)})"
        )
    _check_contents(program, direction)


def _check_messages(program: Program, messages: Messages, where: str) -> None:
    items, runs = messages.items, messages.runs
    ranks, slots = program.capacity.shape
    if not len(items):
        return
    ends_ok = np.ones(len(items), bool)
    for side in ("src", "dst"):
        ends_ok &= (items[side] >= 0) & (items[side] < ranks)
        ends_ok &= (items[side + "_slot"] >= 0) & (items[side + "_slot"] < slots)
    step_ok = (items["start"] >= 0) & (items["start"] <= items["done"]) & (items["done"] < program.steps)
    runs_ok = (items["first"] >= 0) & (items["count"] > 0) & (items["first"] + items["count"] <= len(runs))
    for ok, why in (
        (ends_ok, f"ranks go from 0 to {ranks - 1} and slots from 0 to {slots - 1}"),
        (items["src"] != items["dst"], "a rank does not send to itself"),
        (step_ok, f"steps go from 0 to {program.steps - 1}, and a message is not done before it starts"),
        (runs_ok, "its runs do not exist"),
    ):
        if not ok.all():
            item = items[int(np.argmin(ok))]
            raise PlanError(
                f"{where}: rank {item['src']}, step {item['start']}: {describe_message('message', item)}: {why}"
            )
    late = np.flatnonzero(np.diff(items["start"]) < 0)
    if len(late):
        item = items[late[0] + 1]
        raise PlanError(
            f"{where}: rank {item['src']}, step {item['start']}: {describe_message('message', item)} comes after a "
            "message of a later step; ranks would issue sends and receives in different orders and could dead-lock"
        )
    owner, flat = messages.flat_runs
    total = np.zeros(len(items), np.int64)
    np.add.at(total, owner, flat["rows"])
    if (flat["rows"] <= 0).any() or (total != items["rows"]).any():
        item = items[int(np.argmax(total != items["rows"]))]
        raise PlanError(
            f"{where}: rank {item['src']}, step {item['start']}: {describe_message('message', item)} has another "
            "number of rows than its runs"
        )
    for side in ("src", "dst"):
        room = program.capacity[items[side][owner], items[side + "_slot"][owner]]
        outside = np.flatnonzero((flat[side + "_row"] + flat["rows"] > room) | (flat[side + "_row"] < 0))
        if len(outside):
            item = items[owner[outside[0]]]
            raise PlanError(
                f"{where}: rank {item[side]}, step {item['start']}: {describe_message('message', item)} leaves the "
                f"{room[outside[0]]} rows of slot {item[side + '_slot']}"
            )


def _check_contents(program: Program, direction: str) -> None:
    contents, spans = program.contents, program.spans
    ranks, slots = program.capacity.shape
    ok = (contents["rank"] >= 0) & (contents["rank"] < ranks) & (contents["slot"] >= 0) & (contents["slot"] < slots)
    ok &= (contents["step"] >= 0) & (contents["step"] < program.steps) & (contents["first"] >= 0)
    ok &= (contents["count"] > 0) & (contents["first"] + contents["count"] <= len(spans))
    if not ok.all():
        bad = contents[int(np.argmin(ok))]
        raise PlanError(
            f"{direction}: rank {bad['rank']}, step {bad['step']}: contents of slot {bad['slot']} refer to a rank, "
            f"slot, step or span that does not exist"
        )
    keys = [contents[field] for field in ("row", "slot", "step", "rank")]
    order = np.lexsort(keys)
    same = np.all([np.diff(key) == 0 for key in keys[1:]], axis=0)  # another content of the same slot and step
    rows = _content_rows(program)
    overlap = same & (contents["row"][1:] < contents["row"][:-1] + rows[:-1])
    bad_order = np.flatnonzero((order[1:] != order[:-1] + 1) | overlap) if len(order) else np.zeros(0, np.int64)
    if len(bad_order):
        bad = contents[bad_order[0] + 1]
        raise PlanError(
            f"{direction}: rank {bad['rank']}, step {bad['step']}: contents of slot {bad['slot']} are out of order or "
            "overlap"
        )
    _, distinct = np.unique(np.stack([contents["first"], contents["count"]], 1), axis=0, return_index=True)
    for content in contents[distinct]:
        held, offsets = program.spans_in(content), program.kv_documents.offsets
        where = f"{direction}: rank {content['rank']}, step {content['step']}: contents of slot {content['slot']}"
        inside = np.all((held["doc"] >= 0) & (held["doc"] < len(program.kv_documents)))
        if (
            not inside
            or (held["start"] < offsets[held["doc"]]).any()
            or (held["stop"] > offsets[held["doc"] + 1]).any()
        ):
            raise PlanError(f"{where} leave their documents")
        if (held["stop"] <= held["start"]).any() or (held["start"][1:] < held["stop"][:-1]).any():
            raise PlanError(f"{where} do not ascend in token order")


def _content_rows(program: Program) -> np.ndarray:
    """Count the rows of each content, int64 [contents]."""
    ends = np.concatenate([[0], np.cumsum(program.spans["stop"] - program.spans["start"])])
    return ends[program.contents["first"] + program.contents["count"]] - ends[program.contents["first"]]


def check_tiles(program: Program, rank: int, tiles: np.ndarray, direction: str) -> None:
    """Check that every tile lies in the rank's queries, in the rows that its slot holds, and in its document.

    Args:
        program: program that has passed `check_program`.
        rank: rank that computes the tiles.
        tiles: records of dtype TILE.
        direction: "forward" or "backward", for the message.

    Raises:
        PlanError: names rank, step and tile.
    """
    q_rows = int(program.q_layout_compute.token_counts[rank])
    slot_rows = _rows_held(program, rank, tiles)
    ok = (tiles["q_row"] >= 0) & (tiles["q_rows"] > 0) & (tiles["q_row"] + tiles["q_rows"] <= q_rows)
    ok &= (tiles["k_row"] >= 0) & (tiles["k_rows"] > 0) & (tiles["k_row"] + tiles["k_rows"] <= slot_rows)
    for name in ("doc", "k_doc"):
        ok &= (tiles[name] >= 0) & (tiles[name] < len(program.kv_documents))
    ok &= np.isin(tiles["mask"], list(MASK_NAMES)) & ((tiles["mask"] != CAUSAL) | (tiles["k_rows"] >= tiles["q_rows"]))
    if not ok.all():
        index = int(np.argmin(ok))
        raise PlanError(
            f"{direction}: rank {rank}, step {tiles[index]['step']}: {describe_tile(tiles[index])}: the rank has "
            f"{q_rows} q "
            f"rows, the slot holds rows up to {slot_rows[index]} in that step, a causal tile has at least as many "
            f"keys as "
            f"queries, and documents go from 0 to {len(program.kv_documents) - 1}"
        )
    _check_tile_positions(program, rank, tiles, direction)
    earlier = np.flatnonzero(np.diff(tiles["step"]) < 0)
    if len(earlier):
        tile = tiles[earlier[0] + 1]
        raise PlanError(
            f"{direction}: rank {rank}, step {tile['step']}: {describe_tile(tile)} comes after a tile of a later step"
        )


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


def _check_tile_positions(program: Program, rank: int, tiles: np.ndarray, direction: str) -> None:
    """Raise PlanError unless positions and rows of every tile fit into the documents that it names.

    Only the first query of a tile of a tree's queries and an ancestor's keys has to be in the document that the tile
    names, unless positions matter: documents that continue the same one share such a tile.
    """
    is_shared = (tiles["k_doc"] != tiles["doc"]) & (not program.attention.needs_positions)
    for pos, documents, doc, rows in (
        ("q_pos", program.q_layout_compute.documents, "doc", np.where(is_shared, 1, tiles["q_rows"])),
        ("k_pos", program.kv_documents, "k_doc", tiles["k_rows"]),
    ):
        length, position = documents.lengths[tiles[doc]], tiles[pos] - documents.first_positions[tiles[doc]]
        outside = np.flatnonzero((position < 0) | (position + rows > length))
        if len(outside):
            tile = tiles[outside[0]]
            raise PlanError(
                f"{direction}: rank {rank}, step {tile['step']}: {describe_tile(tile)}: its {pos} is {tile[pos]} with "
                f"{rows[outside[0]]} rows, but its document {tile[doc]} has {length[outside[0]]} tokens"
            )
