"""From a wrong sum to the rank, step and tile that are wrong.  Slow and exact; runs only when a proof has failed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import expand
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import CAUSAL
from mindspeed_cp.plan.verify.interpret import Interpreter, expected_sums
from mindspeed_cp.plan.verify.structure import describe_tile


def refuse_query(plan: Plan, program: Program, name: str, rank: int, row: int, tiles: np.ndarray) -> None:
    """Raise PlanError for a query row that does not see each visible key once."""
    documents = plan.documents
    token = int(program.q_layout.tokens(rank)[row])
    doc, position = _place(plan, token)
    first = int(documents.offsets[doc])
    last = token + 1 if program.mask == "causal" else int(documents.offsets[doc + 1])
    contents = program.contents_of(rank)
    seen: dict[int, list[np.ndarray]] = {}
    for tile in tiles[(tiles["q_row"] <= row) & (row < tiles["q_row"] + tiles["q_rows"])]:
        same = (contents["step"] == tile["step"]) & (contents["slot"] == tile["slot"])
        content = contents[same & (contents["row"] <= tile["k_row"])][-1]
        spans = program.spans_in(content)
        tokens = expand(spans["start"], spans["stop"] - spans["start"])
        k_row = int(tile["k_row"] - content["row"])
        hidden = int(tile["q_row"] + tile["q_rows"] - 1) - row if tile["mask"] == CAUSAL else 0
        for key in tokens[k_row : k_row + tile["k_rows"] - hidden].tolist():
            seen.setdefault(key, []).append(tile)
    query = f"query {position} of document {doc} (row {row})"
    for key, by in seen.items():
        where = "; ".join(f"step {t['step']}, {describe_tile(t)}" for t in by)
        if not first <= key < last:
            other, at = _place(plan, key)
            raise PlanError(
                f"{name}: rank {rank}: {query} sees key {at} of document {other}, which its mask hides: {where}"
            )
        if len(by) > 1:
            raise PlanError(
                f"{name}: rank {rank}: {query} sees key {key - first} of its document {len(by)} times: {where}"
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
        f"{name}: rank {rank}: {query} does not see key {missing - first} of its document, owned by rank "
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
    doc, position = _place(plan, token)
    key = f"key {position} of document {doc}, owned by rank {rank} (row {row})"
    a, b = numbers
    for computing in range(plan.ranks):
        mine = np.zeros_like(a)
        mine[program.q_layout.tokens(computing)] = a[program.q_layout.tokens(computing)]
        run = Interpreter(plan, program, "backward", tiles, mine, b)
        run.run()
        want = expected_sums(plan.documents, program.mask, mine, b)[1][token]
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


def _place(plan: Plan, token: int) -> tuple[int, int]:
    doc = int(plan.documents.document_of(np.asarray(token)))
    return doc, token - int(plan.documents.offsets[doc])
