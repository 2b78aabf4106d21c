"""First part of the proof: every number of a plan refers to something that exists."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CAUSAL, MASK_NAMES, Messages


def describe_tile(tile: np.ndarray) -> str:
    """A tile in words."""
    mask = MASK_NAMES.get(int(tile["mask"]), f"unknown mask {tile['mask']}")
    q, k = int(tile["q_row"]), int(tile["k_row"])
    q_last, k_last = q + int(tile["q_rows"]) - 1, k + int(tile["k_rows"]) - 1
    return f"{mask} tile of q rows {q}..{q_last} and rows {k}..{k_last} of slot {tile['slot']}"


def describe_message(kind: str, item: np.ndarray) -> str:
    """A message in words."""
    return (
        f"{kind} of {item['rows']} rows from rank {item['src']} slot {item['src_slot']} to rank {item['dst']} slot "
        f"{item['dst_slot']}, steps {item['start']} to {item['done']}"
    )


def check_program(plan: Plan, program: Program, name: str) -> None:
    """Raise PlanError unless steps, slots, rows and runs of messages and contents exist."""
    ranks = plan.ranks
    if (
        program.steps < 1
        or program.capacity.ndim != 2
        or len(program.capacity) != ranks
        or not program.capacity.shape[1]
    ):
        raise PlanError(f"{name}: {program.steps} steps and capacity {program.capacity.shape} for {ranks} ranks")
    negative = np.argwhere(program.capacity < 0)
    if len(negative):
        rank, slot = map(int, negative[0])
        raise PlanError(f"{name}: rank {rank}, step 0: slot {slot} has {program.capacity[rank, slot]} rows")
    wrong = np.flatnonzero(program.capacity[:, 0] != plan.kv_layout.token_counts)
    if len(wrong):
        rank = int(wrong[0])
        raise PlanError(
            f"{name}: rank {rank}, step 0: slot 0 has {program.capacity[rank, 0]} rows, but the rank holds "
            f"{plan.kv_layout.token_counts[rank]} tokens"
        )
    _check_messages(program, program.fetch, f"{name}: fetch")
    _check_messages(program, program.reduce, f"{name}: reduce")
    into_own = np.flatnonzero(program.fetch.items["dst_slot"] == 0)
    if len(into_own):
        item = program.fetch.items[into_own[0]]
        raise PlanError(
            f"{name}: rank {item['dst']}, step {item['start']}: a fetch targets slot 0, the rank's own rows "
            f"({describe_message('fetch', item)})"
        )
    _check_contents(program, name)


def _check_messages(program: Program, messages: Messages, name: str) -> None:
    items, runs = messages.items, messages.runs
    ranks, slots = program.capacity.shape
    if not len(items):
        return
    side_ok = np.ones(len(items), bool)
    for side in ("src", "dst"):
        side_ok &= (items[side] >= 0) & (items[side] < ranks)
        side_ok &= (items[side + "_slot"] >= 0) & (items[side + "_slot"] < slots)
    step_ok = (items["start"] >= 0) & (items["start"] <= items["done"]) & (items["done"] < program.steps)
    runs_ok = (items["first"] >= 0) & (items["count"] > 0) & (items["first"] + items["count"] <= len(runs))
    for ok, why in (
        (side_ok, f"ranks go from 0 to {ranks - 1} and slots from 0 to {slots - 1}"),
        (items["src"] != items["dst"], "a rank does not send to itself"),
        (step_ok, f"steps go from 0 to {program.steps - 1}, and a message is not done before it starts"),
        (runs_ok, "its runs do not exist"),
    ):
        if not ok.all():
            item = items[int(np.argmin(ok))]
            raise PlanError(
                f"{name}: rank {item['src']}, step {item['start']}: {describe_message('message', item)}: {why}"
            )
    late = np.flatnonzero(np.diff(items["start"]) < 0)
    if len(late):
        item = items[late[0] + 1]
        raise PlanError(
            f"{name}: rank {item['src']}, step {item['start']}: {describe_message('message', item)} comes after a "
            "message of a "
            "later step; ranks would issue sends and receives in different orders and could dead-lock"
        )
    owner, flat = messages.flat_runs
    total = np.zeros(len(items), np.int64)
    np.add.at(total, owner, flat["rows"])
    if (flat["rows"] <= 0).any() or (total != items["rows"]).any():
        item = items[int(np.argmax(total != items["rows"]))]
        raise PlanError(
            f"{name}: rank {item['src']}, step {item['start']}: {describe_message('message', item)} counts other "
            "rows than its runs"
        )
    for side in ("src", "dst"):
        room = program.capacity[items[side][owner], items[side + "_slot"][owner]]
        over = np.flatnonzero((flat[side + "_row"] + flat["rows"] > room) | (flat[side + "_row"] < 0))
        if len(over):
            item = items[owner[over[0]]]
            raise PlanError(
                f"{name}: rank {item[side]}, step {item['start']}: {describe_message('message', item)} leaves the "
                f"{room[over[0]]} rows of slot {item[side + '_slot']}"
            )


def _check_contents(program: Program, name: str) -> None:
    contents, spans = program.contents, program.spans
    ranks, slots = program.capacity.shape
    ok = (contents["rank"] >= 0) & (contents["rank"] < ranks) & (contents["slot"] >= 0) & (contents["slot"] < slots)
    ok &= (contents["step"] >= 0) & (contents["step"] < program.steps) & (contents["first"] >= 0)
    ok &= (contents["count"] > 0) & (contents["first"] + contents["count"] <= len(spans))
    if not ok.all():
        bad = contents[int(np.argmin(ok))]
        raise PlanError(
            f"{name}: rank {bad['rank']}, step {bad['step']}: contents of slot {bad['slot']} refer to what is not there"
        )
    keys = [contents[name] for name in ("row", "slot", "step", "rank")]
    order = np.lexsort(keys)
    same = np.all([np.diff(key) == 0 for key in keys[1:]], axis=0)  # another part of the same slot in the same step
    rows = _content_rows(program)
    overlap = same & (contents["row"][1:] < contents["row"][:-1] + rows[:-1])
    bad_order = np.flatnonzero((order[1:] != order[:-1] + 1) | overlap) if len(order) else np.zeros(0, np.int64)
    if len(bad_order):
        bad = contents[bad_order[0] + 1]
        raise PlanError(
            f"{name}: rank {bad['rank']}, step {bad['step']}: contents of slot {bad['slot']} are out of order or given "
            "twice"
        )
    _, distinct = np.unique(np.stack([contents["first"], contents["count"]], 1), axis=0, return_index=True)
    for content in contents[distinct]:
        held = program.spans_in(content)
        inside = np.all((held["doc"] >= 0) & (held["doc"] < len(program.kv_documents)))
        offsets = program.kv_documents.offsets
        if (
            not inside
            or (held["start"] < offsets[held["doc"]]).any()
            or (held["stop"] > offsets[held["doc"] + 1]).any()
        ):
            raise PlanError(
                f"{name}: rank {content['rank']}, step {content['step']}: contents of slot {content['slot']} "
                "leave their "
                "documents"
            )
        if (held["stop"] <= held["start"]).any() or (held["start"][1:] < held["stop"][:-1]).any():
            raise PlanError(
                f"{name}: rank {content['rank']}, step {content['step']}: contents of slot {content['slot']} do "
                "not ascend in token order"
            )


def _content_rows(program: Program) -> np.ndarray:
    """Rows of each content, int64 [contents]."""
    ends = np.concatenate([[0], np.cumsum(program.spans["stop"] - program.spans["start"])])
    return ends[program.contents["first"] + program.contents["count"]] - ends[program.contents["first"]]


def check_tiles(program: Program, rank: int, tiles: np.ndarray, name: str) -> None:
    """Raise PlanError unless every tile lies in the rank's queries and in what the slot holds at its step.

    Args:
        program: the program.
        rank: rank that computes the tiles.
        tiles: records of dtype TILE.
        name: "forward" or "backward".
    """
    q_rows = int(program.q_layout.token_counts[rank])
    lo, hi = np.searchsorted(program.contents["rank"], [rank, rank + 1])
    contents, rows = program.contents[lo:hi], _content_rows(program)[lo:hi]
    # The content that a tile reads is the last one of its step and slot that begins at or before the tile's keys.
    scale = int(program.capacity.max(initial=0)) + 2
    places = (contents["step"] * program.capacity.shape[1] + contents["slot"]) * scale
    slots = (tiles["step"] * program.capacity.shape[1] + tiles["slot"]) * scale
    at = np.searchsorted(places + contents["row"], slots + np.clip(tiles["k_row"], 0, scale - 1), "right") - 1
    known = (at >= 0) & (places[np.maximum(at, 0)] == slots) if len(contents) else np.zeros(len(tiles), bool)
    held = (
        np.where(known, (contents["row"] + rows)[np.maximum(at, 0)], 0) if len(contents) else np.zeros(len(tiles), int)
    )
    ok = (tiles["q_row"] >= 0) & (tiles["q_rows"] > 0) & (tiles["q_row"] + tiles["q_rows"] <= q_rows)
    ok &= (tiles["k_row"] >= 0) & (tiles["k_rows"] > 0) & (tiles["k_row"] + tiles["k_rows"] <= held)
    ok &= (tiles["doc"] >= 0) & (tiles["doc"] < len(program.kv_documents))
    ok &= np.isin(tiles["mask"], list(MASK_NAMES)) & ((tiles["mask"] != CAUSAL) | (tiles["k_rows"] >= tiles["q_rows"]))
    if not ok.all():
        bad = tiles[int(np.argmin(ok))]
        last = held[int(np.argmin(ok))]
        raise PlanError(
            f"{name}: rank {rank}, step {bad['step']}: {describe_tile(bad)}: the rank has {q_rows} q rows, the "
            f"slot holds rows up to {last} in that step, a causal tile has at least as many keys as queries, and "
            f"documents go from 0 to {len(program.kv_documents) - 1}"
        )
    back = np.flatnonzero(np.diff(tiles["step"]) < 0)
    if len(back):
        bad = tiles[back[0] + 1]
        raise PlanError(
            f"{name}: rank {rank}, step {bad['step']}: {describe_tile(bad)} comes after a tile of a later step"
        )
