"""Fourth part of the proof: both programs are run for all ranks on 64-bit numbers in place of tensors.

Every key token has a random odd number b, every query token a random number a. "Attention" is a sum modulo 2**64: a
query row adds the b of each key it is computed against, a key row's gradient adds a*b of itself and each such query. In
the end every query row must hold the sum over the keys that the mask lets it see, and every key row, at its owner, the
sum over the queries that see it, times its own number, so that two keys seen by the same queries still differ. A
missing, doubled, stale or misrouted row changes a sum; a wrong plan passes with probability about 2**-60 a row.

Tiles are read as a kernel reads them, by row numbers; what is expected comes from positions: so both are proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.layout import Documents, expand
from mindspeed_cp.plan.config import AttentionConfig
from mindspeed_cp.plan.program import Plan, Program
from mindspeed_cp.plan.records import BAND, CAUSAL, FULL, Messages
from mindspeed_cp.plan.tiles import visible_keys
from mindspeed_cp.plan.verify.structure import describe_message, describe_tile

EMPTY, IN_FLIGHT = -1, -2


def expected_sums(
    queries: Documents, keys: Documents, attention: AttentionConfig, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What every token must get, straight from positions and reach.

    Args:
        queries, keys: lengths of the queries and of the keys of each document.
        attention: its mask and window.
        a, b: numbers of the queries and of the keys, uint64 [query tokens] and [key tokens].

    Returns:
        For every query the sum of b over the keys that it sees; for every key the sum of a over the queries that see
        it, times its own number.
    """
    left, right = attention.reach
    return (
        _sums_in_reach(queries, keys, left, right, prefix_sums(b)),
        _sums_in_reach(keys, queries, right, left, prefix_sums(a)) * b,
    )


def _sums_in_reach(of: Documents, over: Documents, left: int, right: int, sums: np.ndarray) -> np.ndarray:
    """For every token of `of`, at position p, the sum over tokens p - left .. p + right of the same document of
    `over`, whose prefix sums are given."""
    doc = np.repeat(np.arange(len(of)), of.lengths)
    position = np.arange(of.tokens) - of.offsets[doc]
    first, length = over.offsets[doc], over.lengths[doc]
    low, high = np.clip(position - left, 0, length), np.clip(position + right + 1, 0, length)
    return sums[first + high] - sums[first + low]


def prefix_sums(x: np.ndarray) -> np.ndarray:
    """out[i] = x[0] + .. + x[i-1] modulo 2**64; one entry more than x."""
    out = np.zeros(len(x) + 1, np.uint64)
    np.cumsum(x, dtype=np.uint64, out=out[1:])
    return out


@dataclass
class Interpreter:
    """Runs one program on numbers.

    Attributes:
        plan, program, name: what is run.
        tiles: for every rank its tiles.
        a, b: numbers of the queries and of the keys, uint64 [tokens].
        out: after `run`, for every rank the sums of its query rows.
        gradient: after `run`, for every rank and slot the sums of its key rows.
    """

    plan: Plan
    program: Program
    name: str
    tiles: Sequence[np.ndarray]
    a: np.ndarray
    b: np.ndarray
    out: list[np.ndarray] = field(default_factory=list)
    gradient: list[list[np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        program, ranks = self.program, range(self.program.ranks)
        self._held = [[np.full(rows, EMPTY) for rows in program.capacity[rank]] for rank in ranks]
        self.gradient = [[np.zeros(rows, np.uint64) for rows in program.capacity[rank]] for rank in ranks]
        self._query_tokens = [program.q_layout.tokens(rank) for rank in ranks]
        self._queries = [prefix_sums(self.a[tokens]) for tokens in self._query_tokens]
        self._rise = [np.zeros(len(q), np.uint64) for q in self._queries]  # changes of `out` from one row to the next
        self._flying: dict[tuple[str, int], np.ndarray] = {}
        self._blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for rank in ranks:
            self._held[rank][0] = self.plan.kv_layout.tokens(rank)

    def run(self) -> None:
        """Run all steps.

        Raises:
            PlanError: a slot does not hold what the plan says when it is computed.
        """
        program = self.program
        self.out = [np.zeros(int(rows), np.uint64) for rows in program.q_layout.token_counts]
        cells = [np.searchsorted(t["step"], np.arange(program.steps + 1)) for t in self.tiles]
        contents = [program.contents_of(rank) for rank in range(program.ranks)]
        for step in range(program.steps):
            for kind, messages, index in self._at("start", step):
                self._post(kind, messages, index)
            for rank in range(program.ranks):
                tiles = self.tiles[rank][cells[rank][step] : cells[rank][step + 1]]
                mine = contents[rank]
                for content in mine[mine["step"] == step]:
                    (tokens, sums), first = self._check_content(rank, content), int(content["row"])
                    inside = (tiles["k_row"] >= first) & (tiles["k_row"] < first + len(tokens))
                    of = tiles[inside & (tiles["slot"] == content["slot"])]
                    self._check_positions(rank, of, tokens, first)
                    self._compute(rank, int(content["slot"]), of, sums, first)
            for kind, messages, index in self._at("done", step):
                self._finish(kind, messages, index)
        for rank, rise in enumerate(self._rise):
            self.out[rank] += np.cumsum(rise[:-1], dtype=np.uint64)

    def _at(self, when: str, step: int) -> Iterator[tuple[str, Messages, int]]:
        """Messages that start or are done in a step, reduces first."""
        for kind, messages in (("reduce", self.program.reduce), ("fetch", self.program.fetch)):
            for index in np.flatnonzero(messages.items[when] == step):
                yield kind, messages, int(index)

    def _post(self, kind: str, messages: Messages, index: int) -> None:
        item, (src, dst) = messages.items[index], _rows(messages, index)
        source = self._held if kind == "fetch" else self.gradient
        self._flying[kind, index] = source[item["src"]][item["src_slot"]][src].copy()
        if kind == "fetch":
            self._held[item["dst"]][item["dst_slot"]][dst] = IN_FLIGHT

    def _finish(self, kind: str, messages: Messages, index: int) -> None:
        item, (_, dst) = messages.items[index], _rows(messages, index)
        payload = self._flying.pop((kind, index))
        gradient = self.gradient[item["dst"]][item["dst_slot"]]
        if kind == "reduce":
            np.add.at(gradient, dst, payload)  # type: ignore[arg-type]  # a slice serves as well
            return
        if (payload < 0).any():
            raise PlanError(
                f"{self.name}: rank {item['src']}, step {item['start']}: {describe_message(kind, item)} sends "
                "rows that hold nothing or are still being received"
            )
        self._held[item["dst"]][item["dst_slot"]][dst] = payload
        gradient[dst] = 0

    def _check_content(self, rank: int, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that the content claims, and prefix sums of b over them, once the slot is seen to hold just them."""
        key = int(content["first"]), int(content["count"])
        if key not in self._blocks:
            spans = self.program.spans_in(content)
            tokens = expand(spans["start"], spans["stop"] - spans["start"])
            self._blocks[key] = tokens, prefix_sums(self.b[tokens])
        tokens, sums = self._blocks[key]
        first = int(content["row"])
        held = self._held[rank][int(content["slot"])][first : first + len(tokens)]
        if not np.array_equal(held, tokens):
            self._refuse_content(rank, content, tokens, held)
        return tokens, sums

    def _check_positions(self, rank: int, tiles: np.ndarray, keys: np.ndarray, first: int) -> None:
        """Document and positions of the first rows are those of the tokens there, and, where positions count, of the
        last rows too: tokens ascend, so all between are right."""
        exact, queries = self.program.attention.by_position, self._query_tokens[rank]
        for name, row, rows, tokens, documents in (
            ("q_pos", tiles["q_row"], tiles["q_rows"], queries, self.program.q_layout.documents),
            ("k_pos", tiles["k_row"] - first, tiles["k_rows"], keys, self.program.kv_documents),
        ):
            start = documents.offsets[tiles["doc"]] + tiles[name]
            wrong = (tokens[row] != start) | (exact & (tokens[row + rows - 1] != start + rows - 1))
            if wrong.any():
                tile = tiles[int(np.argmax(wrong))]
                raise PlanError(
                    f"{self.name}: rank {rank}, step {tile['step']}: {describe_tile(tile)}: its {name} is {tile[name]} "
                    f"in document {tile['doc']}, but its rows are other tokens"
                )

    def _refuse_content(self, rank: int, content: np.ndarray, tokens: np.ndarray, held: np.ndarray) -> None:
        where = f"{self.name}: rank {rank}, step {content['step']}: slot {content['slot']}"
        first = int(content["row"])
        if len(tokens) > len(held):
            raise PlanError(f"{where} has {first + len(held)} rows, but the plan puts {first + len(tokens)} into it")
        row = int(np.argmax(held != tokens))
        names = {EMPTY: "nothing", IN_FLIGHT: "a row still being received"}
        found = names.get(int(held[row]), f"token {held[row]}")
        raise PlanError(
            f"{where}, row {first + row}: the plan says token {tokens[row]}, but the messages leave {found} there"
        )

    def _compute(self, rank: int, slot: int, tiles: np.ndarray, keys: np.ndarray, first: int) -> None:
        """Tiles that read rows `first` and on of a slot, whose prefix sums are `keys`.

        A full tile adds one number to a run of rows: two entries of a table of changes. A causal tile needs one
        number for each of its rows and keys.
        """
        if not len(tiles):
            return
        out, queries, rise = self.out[rank], self._queries[rank], self._rise[rank]
        seen_by = np.zeros(len(keys) - 1, np.uint64)  # for each of these rows the sum of a over the queries
        rise_k = np.zeros(len(keys), np.uint64)
        full = tiles[tiles["mask"] == FULL]
        k = full["k_row"] - first
        _change(rise, full["q_row"], full["q_rows"], keys[k + full["k_rows"]] - keys[k])
        _change(rise_k, k, full["k_rows"], queries[full["q_row"] + full["q_rows"]] - queries[full["q_row"]])

        self._compute_bands(tiles[tiles["mask"] == BAND], out, queries, keys, first, rise_k)
        causal = tiles[tiles["mask"] == CAUSAL]
        q, n, k = causal["q_row"], causal["q_rows"], causal["k_row"] - first
        past = causal["k_rows"] - n  # keys that every query of the tile sees
        rows = expand(q, n)
        np.add.at(out, rows, keys[expand(k + past + 1, n)] - keys[np.repeat(k, n)])
        _change(rise_k, k, past, queries[q + n] - queries[q])
        np.add.at(seen_by, expand(k + past, n), queries[np.repeat(q + n, n)] - queries[rows])
        seen_by += np.cumsum(rise_k[:-1], dtype=np.uint64)
        self.gradient[rank][slot][first : first + len(seen_by)] += seen_by * np.diff(keys)  # the rows' own numbers

    def _compute_bands(
        self, band: np.ndarray, out: np.ndarray, queries: np.ndarray, keys: np.ndarray, first: int, rise_k: np.ndarray
    ) -> None:
        """A band tile needs two numbers for each of its rows, and for each row two changes of what its keys get."""
        if not len(band):
            return
        low, high = visible_keys(band, self.program.attention)
        rows = expand(band["q_row"], band["q_rows"])
        k = np.repeat(band["k_row"] - first, band["q_rows"])
        np.add.at(out, rows, keys[k + high] - keys[k + low])
        own = queries[rows + 1] - queries[rows]
        np.add.at(rise_k, k + low, own)
        np.subtract.at(rise_k, k + high, own)


def _rows(messages: Messages, index: int) -> tuple[np.ndarray | slice, np.ndarray | slice]:
    """Rows of a message at its source and at its target: slices where they are one run."""
    if messages.items["count"][index] != 1:
        return messages.rows_of(index)
    src, dst, rows = map(int, messages.runs_of(index)[0])
    return slice(src, src + rows), slice(dst, dst + rows)


def _change(rise: np.ndarray, first: np.ndarray, rows: np.ndarray, value: np.ndarray) -> None:
    """Add value to rows first .. first + rows - 1, as changes from row to row."""
    np.add.at(rise, first, value)
    np.subtract.at(rise, first + rows, value)
