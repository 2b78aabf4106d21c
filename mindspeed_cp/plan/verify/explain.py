"""From a wrong sum to the rank, step and tile that are wrong.  Slow and exact; runs only when a proof has failed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Documents, expand
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL
from mindspeed_cp.plan.tiles import visible_keys
from mindspeed_cp.plan.verify.interpret import Interpreter, expected_sums
from mindspeed_cp.plan.verify.structure import describe_tile


def refuse_query(plan: Plan, program: Program, name: str, rank: int, row: int, tiles: np.ndarray) -> None:
    """Raise PlanError for a query row that does not see each visible key once."""
    token = int(program.q_layout.tokens(rank)[row])
    doc, position = _place(plan.documents, token)
    keys, (left, right) = plan.kv_documents, program.attention.reach
    begin, length = int(keys.offsets[doc]), int(keys.lengths[doc])
    first, last = begin + min(max(position - left, 0), length), begin + min(max(position + right + 1, 0), length)
    contents = program.contents_of(rank)
    seen: dict[int, list[np.ndarray]] = {}
    for tile in tiles[(tiles["q_row"] <= row) & (row < tiles["q_row"] + tiles["q_rows"])]:
        same = (contents["step"] == tile["step"]) & (contents["slot"] == tile["slot"])
        content = contents[same & (contents["row"] <= tile["k_row"])][-1]
        spans = program.spans_in(content)
        tokens = expand(spans["start"], spans["stop"] - spans["start"])
        k_row = int(tile["k_row"] - content["row"])
        low, high = _seen_in(tile, row - int(tile["q_row"]), program.attention)
        for key in tokens[k_row + low : k_row + high].tolist():
            seen.setdefault(key, []).append(tile)
    query = f"query {position} of document {doc} (row {row})"
    for key, by in seen.items():
        where = "; ".join(f"step {t['step']}, {describe_tile(t)}" for t in by)
        if not first <= key < last:
            other, at = _place(keys, key)
            raise PlanError(
                f"{name}: rank {rank}: {query} sees key {at} of document {other}, which its mask hides: {where}"
            )
        if len(by) > 1:
            raise PlanError(
                f"{name}: rank {rank}: {query} sees key {key - begin} of its document {len(by)} times: {where}"
            )
    missing = next(key for key in range(first, last) if key not in seen)
    holder = next(r for r in range(plan.ranks) if missing in plan.kv_layout.tokens(r))
    near = [c for c in program.contents_of(rank) if _holds(program, c, missing)]
    when = (
        f"step {near[0]['step']}, where slot {near[0]['slot']} holds it"
        if near
        else "any step: it is never brought there"
    )
    raise PlanError(
        f"{name}: rank {rank}: {query} does not see key {missing - begin} of its document, owned by rank "
        f"{holder}, in {when}"
    )


def _holds(program: Program, content: np.ndarray, token: int) -> bool:
    spans = program.spans_in(content)
    return bool(((spans["start"] <= token) & (token < spans["stop"])).any())


def refuse_gradient(
    plan: Plan,
    program: Program,
    rank: int,
    row: int,
    tiles: Sequence[np.ndarray],
    numbers: tuple[np.ndarray, np.ndarray],
) -> None:
    """Raise PlanError for a key row whose gradient is not the sum over the queries that see it.

    The program is run once for every rank with the numbers of all other ranks' queries at zero: that shows whose part
    is lost or counted twice on the way.
    """
    token = int(plan.kv_layout.tokens(rank)[row])
    doc, position = _place(plan.kv_documents, token)
    key = f"key {position} of document {doc}, owned by rank {rank} (row {row})"
    a, b = numbers
    for computing in range(plan.ranks):
        mine = np.zeros_like(a)
        mine[program.q_layout.tokens(computing)] = a[program.q_layout.tokens(computing)]
        run = Interpreter(plan, program, "backward", tiles, mine, b)
        run.run()
        want = expected_sums(plan.documents, plan.kv_documents, program.attention, mine, b)[1][token]
        got = run.gradient[rank][0][row]
        if got == want:
            continue
        steps = [int(c["step"]) for c in program.contents_of(computing) if _holds(program, c, token)]
        what = (
            "is lost"
            if got == 0
            else "comes back more than once"
            if _multiple(got, want)
            else "is not what it should be"
        )
        raise PlanError(
            f"backward: rank {computing}, step {steps[0] if steps else 'none'}: its part of the gradient of {key} "
            f"{what} on the way to "
            "the owner; see the reduces that leave the slot it is computed in"
        )
    raise PlanError(
        f"backward: rank {rank}, step {program.steps - 1}: the gradient of {key} is wrong, though every rank's "
        "part is right"
    )


def _multiple(got: np.uint64, want: np.uint64) -> bool:
    return any(int(got) == int(want) * times % 2**64 for times in range(2, 9))


def _seen_in(tile: np.ndarray, row: int, attention: AttentionConfig) -> tuple[int, int]:
    """First and last-plus-one key of the tile that its q row `row` sees."""
    rows = int(tile["k_rows"])
    if tile["mask"] == BAND:
        first, last = visible_keys(tile.reshape(1), attention)
        return int(first[row]), int(last[row])
    return 0, rows - (int(tile["q_rows"]) - 1 - row if tile["mask"] == CAUSAL else 0)


def _place(documents: Documents, token: int) -> tuple[int, int]:
    doc = int(documents.document_of(np.asarray(token)))
    return doc, token - int(documents.offsets[doc])
