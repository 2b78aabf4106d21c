"""Explain a wrong sum: find the rank, step and tile that are wrong.  Slow; runs only after a proof has failed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Documents, ragged_arange
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL
from mindspeed_cp.plan.tiles import visible_keys
from mindspeed_cp.plan.verify.interpret import Interpreter, expected_sums
from mindspeed_cp.plan.verify.structure import describe_tile


def raise_wrong_query(plan: Plan, program: Program, direction: str, rank: int, row: int, tiles: np.ndarray) -> None:
    """Raise PlanError for a query row that does not see every visible key exactly once."""
    token = int(program.q_layout_compute.tokens(rank)[row])
    doc, position = _doc_and_position(plan.documents, token)
    keys = plan.kv_documents
    visible = visible_keys_of(plan.documents, keys, program.attention, token)
    contents = program.contents_of(rank)
    seen: dict[int, list[np.ndarray]] = {}
    for tile in tiles[(tiles["q_row"] <= row) & (row < tiles["q_row"] + tiles["q_rows"])]:
        same = (contents["step"] == tile["step"]) & (contents["slot"] == tile["slot"])
        content = contents[same & (contents["row"] <= tile["k_row"])][-1]
        spans = program.spans_in(content)
        tokens = ragged_arange(spans["start"], spans["stop"] - spans["start"])
        k_row = int(tile["k_row"] - content["row"])
        low, high = _visible_rows(tile, row - int(tile["q_row"]), program.attention)
        for key in tokens[k_row + low : k_row + high].tolist():
            seen.setdefault(key, []).append(tile)
    query = f"query {position} of document {doc} (row {row})"
    for key, seen_by in seen.items():
        where = "; ".join(f"step {tile['step']}, {describe_tile(tile)}" for tile in seen_by)
        if key not in visible:
            key_doc, key_position = _doc_and_position(keys, key)
            raise PlanError(
                f"{direction}: rank {rank}: {query} sees key {key_position} of document {key_doc}, which its mask "
                f"hides: "
                f"{where}"
            )
        if len(seen_by) > 1:
            raise PlanError(
                f"{direction}: rank {rank}: {query} sees {_key(keys, key, doc)} {len(seen_by)} times: {where}"
            )
    missing = next((key for key in visible if key not in seen), None)
    if missing is None:  # the sums see another mask than this function
        raise PlanError(f"{direction}: rank {rank}: {query}: the sum of its keys is wrong")
    holder = next(r for r in range(plan.ranks) if missing in plan.kv_layout_compute.tokens(r))
    holding = [content for content in program.contents_of(rank) if _holds(program, content, missing)]
    when = (
        f"step {holding[0]['step']}, where slot {holding[0]['slot']} holds it"
        if holding
        else "any step: it never arrives there"
    )
    raise PlanError(
        f"{direction}: rank {rank}: {query} does not see {_key(keys, missing, doc)}, owned by rank {holder}, in {when}"
    )


def visible_keys_of(queries: Documents, keys: Documents, attention: AttentionConfig, token: int) -> list[int]:
    """Return the tokens of all keys that a query sees, in the order of positions."""
    doc, position = _doc_and_position(queries, token)
    path = [doc] if keys.trees is None else keys.trees.path(doc)
    tokens = ragged_arange(keys.offsets[path], keys.lengths[path])
    left, right = attention.visible_range
    first, last = max(position - left, 0), max(position + right + 1, 0)
    if queries.blocks is not None and (block := int(queries.blocks.of(np.asarray(token)))) >= 0:
        first = min(first, position - token + int(queries.blocks.start[block]))
        last = position - token + int(queries.blocks.stop[block])
    return tokens[first:last].tolist()


def _key(documents: Documents, token: int, query_doc: int) -> str:
    """Describe a key that a query of a document sees."""
    doc, position = _doc_and_position(documents, token)
    return f"key {position} of its document" if doc == query_doc else f"key {position} of document {doc}, on its path"


def _holds(program: Program, content: np.ndarray, token: int) -> bool:
    spans = program.spans_in(content)
    return bool(((spans["start"] <= token) & (token < spans["stop"])).any())


def raise_wrong_gradient(
    plan: Plan,
    program: Program,
    rank: int,
    row: int,
    tiles: Sequence[np.ndarray],
    numbers: tuple[np.ndarray, np.ndarray],
) -> None:
    """Raise PlanError for a key row whose gradient is not the sum over the queries that see it.

    The program is run once for each rank with the numbers of all other ranks' queries set to zero, which shows the rank
    whose contribution is lost or counted twice on the way.
    """
    token = int(plan.kv_layout_compute.tokens(rank)[row])
    doc, position = _doc_and_position(plan.kv_documents, token)
    key = f"key {position} of document {doc}, owned by rank {rank} (row {row})"
    query_numbers, key_numbers = numbers
    for computing in range(plan.ranks):
        rank_numbers, tokens = np.zeros_like(query_numbers), program.q_layout_compute.tokens(computing)
        rank_numbers[tokens] = query_numbers[tokens]
        interpreter = Interpreter(plan, program, "backward", tiles, rank_numbers, key_numbers)
        interpreter.run()
        sums = expected_sums(plan.documents, plan.kv_documents, program.attention, rank_numbers, key_numbers)
        got, expected = interpreter.gradient[rank][0][row], sums[1][token]
        if got == expected:
            continue
        contents = program.contents_of(computing)
        steps = [int(content["step"]) for content in contents if _holds(program, content, token)]
        fault = "is lost" if got == 0 else "is wrong"
        if got != 0 and any(int(got) == int(expected) * times % 2**64 for times in range(2, 9)):
            fault = "comes back more than once"
        raise PlanError(
            f"backward: rank {computing}, step {steps[0] if steps else 'none'}: its part of the gradient of {key} "
            f"{fault} "
            "on the way to the owner; see the reduces that leave the slot in which it is computed"
        )
    raise PlanError(
        f"backward: rank {rank}, step {program.steps - 1}: the gradient of {key} is wrong, though every rank's "
        "part is right"
    )


def _visible_rows(tile: np.ndarray, row: int, attention: AttentionConfig) -> tuple[int, int]:
    """Return the first and last-plus-one key row of the tile that its q row `row` sees."""
    rows = int(tile["k_rows"])
    if tile["mask"] == BAND:
        first, last = visible_keys(tile.reshape(1), attention)
        return int(first[row]), int(last[row])
    return 0, rows - (int(tile["q_rows"]) - 1 - row if tile["mask"] == CAUSAL else 0)


def _doc_and_position(documents: Documents, token: int) -> tuple[int, int]:
    doc = int(documents.document_of(np.asarray(token)))
    return doc, token - int(documents.offsets[doc]) + int(documents.first_positions[doc])
