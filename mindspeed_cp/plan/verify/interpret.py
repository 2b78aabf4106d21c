"""Sums: both programs are run for all ranks on 64-bit integers in place of tensors.

Each key token has a random odd number, each query token a random number. "Attention" is a sum modulo 2**64: a query row
adds the numbers of the keys it is computed with; the gradient of a key row adds the number of each such query, times
the key's own number. At the end, every query row must hold the sum over the keys that the mask lets it see. Every key
row, at its owner, must hold the sum over the queries that see it, times its own number, so that two keys seen by the
same queries differ. A missing, doubled, stale or misrouted row changes a sum; a wrong plan passes with probability
about 2**-60 a row.

Tiles are read like a kernel reads them, by row numbers; expected sums come from positions. Both are thus proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Documents, ragged_arange
from mindspeed_cp.plan.problem import AttentionConfig
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL, FULL, Messages
from mindspeed_cp.plan.tiles import visible_keys
from mindspeed_cp.plan.verify.structure import describe_message, describe_tile

EMPTY, IN_FLIGHT = -1, -2


def expected_sums(
    queries: Documents,
    keys: Documents,
    attention: AttentionConfig,
    query_numbers: np.ndarray,
    key_numbers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the sum that every token must get, from positions and the visible range alone.

    Args:
        queries, keys: documents by lengths of queries and of keys.
        attention: mask and window.
        query_numbers, key_numbers: numbers of the tokens, uint64 [query tokens] and [key tokens].

    Returns:
        Sum of the numbers of the keys that each query sees, uint64 [query tokens]; and sum of the numbers of the
        queries that see each key, times the key's own number, uint64 [key tokens].
    """
    left, right = attention.visible_range
    if not queries.is_plain:
        return _sums_along_paths(queries, left, query_numbers, key_numbers)
    return (
        _sums_in_visible_range(queries, keys, left, right, prefix_sums(key_numbers)),
        _sums_in_visible_range(keys, queries, right, left, prefix_sums(query_numbers)) * key_numbers,
    )


def _sums_in_visible_range(
    documents: Documents, seen: Documents, left: int, right: int, seen_sums: np.ndarray
) -> np.ndarray:
    """Sum, for each token at position p of `documents`, tokens p - left .. p + right of the same document of `seen`,
    given the prefix sums of `seen`."""
    doc = np.repeat(np.arange(len(documents)), documents.lengths)
    position = np.arange(documents.tokens) - documents.offsets[doc]
    first, length = seen.offsets[doc], seen.lengths[doc]
    low, high = np.clip(position - left, 0, length), np.clip(position + right + 1, 0, length)
    return seen_sums[first + high] - seen_sums[first + low]


def _sums_along_paths(
    documents: Documents, left: int, query_numbers: np.ndarray, key_numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Do as `expected_sums` for trees and blocks under a causal mask: document by document, along its path from the
    root."""
    trees, blocks = documents.trees, documents.blocks
    sees, seen_by = np.zeros(documents.tokens, np.uint64), np.zeros(documents.tokens, np.uint64)
    for doc in np.flatnonzero(documents.lengths).tolist():
        path = np.array([doc]) if trees is None else trees.path(doc)
        tokens = ragged_arange(documents.offsets[path], documents.lengths[path])
        sums = prefix_sums(key_numbers[tokens])
        position = np.arange(len(tokens) - documents.lengths[doc], len(tokens))  # of the document's own tokens
        low, high = np.maximum(position - left, 0), position + 1
        for _, first, last in blocks.records[blocks.doc == doc].tolist() if blocks is not None else ():
            low[first:last] = np.minimum(low[first:last], position[first])
            high[first:last] = position[last - 1] + 1
        sees[tokens[position]] = sums[high] - sums[low]
        deltas = np.zeros(len(tokens) + 1, np.uint64)
        _add_to_rows(deltas, low, high - low, query_numbers[tokens[position]])
        seen_by[tokens] += np.cumsum(deltas[:-1], dtype=np.uint64)
    return sees, seen_by * key_numbers


def prefix_sums(x: np.ndarray) -> np.ndarray:
    """Return sums with sums[i] = x[0] + .. + x[i-1] modulo 2**64, uint64 [len(x) + 1]."""
    sums = np.zeros(len(x) + 1, np.uint64)
    np.cumsum(x, dtype=np.uint64, out=sums[1:])
    return sums


@dataclass
class Interpreter:
    """Interpreter of one program on numbers.

    Attributes:
        plan: plan without parts.
        program: its program of `direction`.
        direction: "forward" or "backward".
        tiles: tiles of each rank.
        query_numbers, key_numbers: numbers of the tokens, uint64 [query tokens] and [key tokens].
        out: after `run`, the sums of the query rows of each rank.
        gradient: after `run`, the sums of the key rows of each rank and slot.
    """

    plan: Plan
    program: Program
    direction: str
    tiles: Sequence[np.ndarray]
    query_numbers: np.ndarray
    key_numbers: np.ndarray
    out: list[np.ndarray] = field(default_factory=list)
    gradient: list[list[np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        program, ranks = self.program, range(self.program.ranks)
        self._slot_tokens = [[np.full(rows, EMPTY) for rows in program.capacity[rank]] for rank in ranks]
        self.gradient = [[np.zeros(rows, np.uint64) for rows in program.capacity[rank]] for rank in ranks]
        self._query_tokens = [program.q_layout_compute.tokens(rank) for rank in ranks]
        self._query_sums = [prefix_sums(self.query_numbers[tokens]) for tokens in self._query_tokens]
        self._out_deltas = [
            np.zeros(len(sums), np.uint64) for sums in self._query_sums
        ]  # differences of `out` between rows
        self._in_flight: dict[tuple[str, int], np.ndarray] = {}
        self._content_cache: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for rank in ranks:
            self._slot_tokens[rank][0] = self.plan.kv_layout_compute.tokens(rank)

    def run(self) -> None:
        """Run all steps.

        Raises:
            PlanError: a slot does not hold what the plan says when it is computed.
        """
        program = self.program
        self.out = [np.zeros(int(rows), np.uint64) for rows in program.q_layout_compute.token_counts]
        step_tiles = [np.searchsorted(tiles["step"], np.arange(program.steps + 1)) for tiles in self.tiles]
        contents = [program.contents_of(rank) for rank in range(program.ranks)]
        for step in range(program.steps):
            for kind, messages, index in self._messages_at("start", step):
                self._post(kind, messages, index)
            for rank in range(program.ranks):
                tiles = self.tiles[rank][step_tiles[rank][step] : step_tiles[rank][step + 1]]
                for content in contents[rank][contents[rank]["step"] == step]:
                    (tokens, sums), first = self._check_content(rank, content), int(content["row"])
                    inside = (tiles["k_row"] >= first) & (tiles["k_row"] < first + len(tokens))
                    content_tiles = tiles[inside & (tiles["slot"] == content["slot"])]
                    self._check_positions(rank, content_tiles, tokens, first)
                    self._compute(rank, int(content["slot"]), content_tiles, sums, first)
            for kind, messages, index in self._messages_at("done", step):
                self._finish(kind, messages, index)
        for rank, deltas in enumerate(self._out_deltas):
            self.out[rank] += np.cumsum(deltas[:-1], dtype=np.uint64)

    def _messages_at(self, when: str, step: int) -> Iterator[tuple[str, Messages, int]]:
        """Yield the messages that start or are done (`when`) in a step, reduces first."""
        for kind, messages in (("reduce", self.program.reduce), ("fetch", self.program.fetch)):
            for index in np.flatnonzero(messages.items[when] == step):
                yield kind, messages, int(index)

    def _post(self, kind: str, messages: Messages, index: int) -> None:
        item, (src, dst) = messages.items[index], _rows(messages, index)
        source = self._slot_tokens if kind == "fetch" else self.gradient
        self._in_flight[kind, index] = source[item["src"]][item["src_slot"]][src].copy()
        if kind == "fetch":
            self._slot_tokens[item["dst"]][item["dst_slot"]][dst] = IN_FLIGHT

    def _finish(self, kind: str, messages: Messages, index: int) -> None:
        item, (_, dst) = messages.items[index], _rows(messages, index)
        payload = self._in_flight.pop((kind, index))
        gradient = self.gradient[item["dst"]][item["dst_slot"]]
        if kind == "reduce":
            np.add.at(gradient, dst, payload)  # type: ignore[arg-type]  # a slice serves as well
            return
        if (payload < 0).any():
            raise PlanError(
                f"{self.direction}: rank {item['src']}, step {item['start']}: {describe_message(kind, item)} sends "
                "rows that hold nothing or are still being received"
            )
        self._slot_tokens[item["dst"]][item["dst_slot"]][dst] = payload
        gradient[dst] = 0

    def _check_content(self, rank: int, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Check that the slot holds the tokens of the content; return them and the prefix sums of their numbers."""
        key = int(content["first"]), int(content["count"])
        if key not in self._content_cache:
            spans = self.program.spans_in(content)
            tokens = ragged_arange(spans["start"], spans["stop"] - spans["start"])
            self._content_cache[key] = tokens, prefix_sums(self.key_numbers[tokens])
        tokens, sums = self._content_cache[key]
        first = int(content["row"])
        held = self._slot_tokens[rank][int(content["slot"])][first : first + len(tokens)]
        if not np.array_equal(held, tokens):
            self._raise_wrong_content(rank, content, tokens, held)
        return tokens, sums

    def _check_positions(self, rank: int, tiles: np.ndarray, keys: np.ndarray, first: int) -> None:
        """Check document and position of the first row of each tile and, if positions matter, of its last row.

        Tokens ascend, so all rows between are then right.
        """
        exact, queries = self.program.attention.needs_positions, self._query_tokens[rank]
        for side, row, rows, tokens, documents, doc in (
            ("q_pos", tiles["q_row"], tiles["q_rows"], queries, self.program.q_layout_compute.documents, "doc"),
            ("k_pos", tiles["k_row"] - first, tiles["k_rows"], keys, self.program.kv_documents, "k_doc"),
        ):
            start = documents.offsets[tiles[doc]] + tiles[side] - documents.first_positions[tiles[doc]]
            wrong = (tokens[row] != start) | (exact & (tokens[row + rows - 1] != start + rows - 1))
            if wrong.any():
                tile = tiles[int(np.argmax(wrong))]
                raise PlanError(
                    f"{self.direction}: rank {rank}, step {tile['step']}: {describe_tile(tile)}: its {side} is "
                    f"{tile[side]} in document {tile[doc]}, but its rows are other tokens"
                )

    def _raise_wrong_content(self, rank: int, content: np.ndarray, tokens: np.ndarray, held: np.ndarray) -> None:
        where = f"{self.direction}: rank {rank}, step {content['step']}: slot {content['slot']}"
        first = int(content["row"])
        if len(tokens) > len(held):
            raise PlanError(f"{where} has {first + len(held)} rows, but the plan puts {first + len(tokens)} into it")
        row = int(np.argmax(held != tokens))
        names = {EMPTY: "nothing", IN_FLIGHT: "a row still being received"}
        actual = names.get(int(held[row]), f"token {held[row]}")
        raise PlanError(
            f"{where}, row {first + row}: the plan says token {tokens[row]}, but the messages leave {actual} there"
        )

    def _compute(self, rank: int, slot: int, tiles: np.ndarray, keys: np.ndarray, first: int) -> None:
        """Compute tiles that read rows of a slot from row `first` on; `keys` are the prefix sums of these rows.

        A full tile adds one number to a run of rows, which are two entries in an array of differences. A causal tile
        needs one number for each of its rows and keys.
        """
        if not len(tiles):
            return
        out, queries, out_deltas = self.out[rank], self._query_sums[rank], self._out_deltas[rank]
        seen_by = np.zeros(len(keys) - 1, np.uint64)  # sum of the query numbers, for each of these rows
        key_deltas = np.zeros(len(keys), np.uint64)
        full = tiles[tiles["mask"] == FULL]
        k = full["k_row"] - first
        _add_to_rows(out_deltas, full["q_row"], full["q_rows"], keys[k + full["k_rows"]] - keys[k])
        _add_to_rows(key_deltas, k, full["k_rows"], queries[full["q_row"] + full["q_rows"]] - queries[full["q_row"]])

        band = tiles[tiles["mask"] == BAND]  # one sum for each q row, and two differences of the key sums
        if len(band):
            low, high = visible_keys(band, self.program.attention)
            rows, k = ragged_arange(band["q_row"], band["q_rows"]), np.repeat(band["k_row"] - first, band["q_rows"])
            np.add.at(out, rows, keys[k + high] - keys[k + low])
            numbers = queries[rows + 1] - queries[rows]
            np.add.at(key_deltas, k + low, numbers)
            np.subtract.at(key_deltas, k + high, numbers)
        causal = tiles[tiles["mask"] == CAUSAL]
        q, n, k = causal["q_row"], causal["q_rows"], causal["k_row"] - first
        past = causal["k_rows"] - n  # number of keys that every query of the tile sees
        rows = ragged_arange(q, n)
        np.add.at(out, rows, keys[ragged_arange(k + past + 1, n)] - keys[np.repeat(k, n)])
        _add_to_rows(key_deltas, k, past, queries[q + n] - queries[q])
        np.add.at(seen_by, ragged_arange(k + past, n), queries[np.repeat(q + n, n)] - queries[rows])
        seen_by += np.cumsum(key_deltas[:-1], dtype=np.uint64)
        self.gradient[rank][slot][first : first + len(seen_by)] += seen_by * np.diff(keys)  # times the own numbers


def _rows(messages: Messages, index: int) -> tuple[np.ndarray | slice, np.ndarray | slice]:
    """Return the rows of a message at its source and at its target, as slices if they are one run."""
    if messages.items["count"][index] != 1:
        return messages.rows_of(index)
    src, dst, rows = map(int, messages.runs_of(index)[0])
    return slice(src, src + rows), slice(dst, dst + rows)


def _add_to_rows(deltas: np.ndarray, first: np.ndarray, rows: np.ndarray, value: np.ndarray) -> None:
    """Add value to rows first .. first + rows - 1, given as differences between rows."""
    np.add.at(deltas, first, value)
    np.subtract.at(deltas, first + rows, value)


# Explanations of wrong sums: the rank, step and tile that are wrong. Slow; they run only after a proof has failed.


def raise_wrong_query(plan: Plan, program: Program, direction: str, rank: int, row: int, tiles: np.ndarray) -> None:
    """Raise PlanError for a query row that does not see every visible key exactly once."""
    token = int(program.q_layout_compute.tokens(rank)[row])
    doc, position = _doc_and_position(plan.documents, token)
    keys = plan.kv_documents
    visible = _visible_keys_of(plan.documents, keys, program.attention, token)
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
                f"hides: {where}"
            )
        if len(seen_by) > 1:
            raise PlanError(
                f"{direction}: rank {rank}: {query} sees {_key(keys, key, doc)} {len(seen_by)} times: {where}"
            )
    missing = next((key for key in visible if key not in seen), None)
    if missing is None:  # the sums see another mask than this function
        raise PlanError(f"{direction}: rank {rank}: {query}: the sum of its keys is wrong")
    holder = next(r for r in range(plan.ranks) if missing in plan.kv_layout_compute.tokens(r))
    holding = [x for x in contents for span in program.spans_in(x) if span["start"] <= missing < span["stop"]]
    when = (
        f"step {holding[0]['step']}, where slot {holding[0]['slot']} holds it"
        if holding
        else "any step: it never arrives there"
    )
    raise PlanError(
        f"{direction}: rank {rank}: {query} does not see {_key(keys, missing, doc)}, owned by rank {holder}, in {when}"
    )


def _visible_keys_of(queries: Documents, keys: Documents, attention: AttentionConfig, token: int) -> list[int]:
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


def raise_wrong_gradient(plan: Plan, program: Program, rank: int, row: int) -> None:
    """Raise PlanError for a key row at its owner whose gradient is not the sum over the queries that see it."""
    doc, position = _doc_and_position(plan.kv_documents, int(plan.kv_layout_compute.tokens(rank)[row]))
    raise PlanError(
        f"backward: rank {rank}, step {program.steps - 1}: the gradient of its key {position} of document {doc} (row "
        f"{row}) is not the sum over the queries that see it; a reduce on the way to slot 0 is missing, doubled, or "
        "leaves another slot or other rows"
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
