"""Messages of a plan: what a rank gives another of q, k and v is one, if it is small."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.comm.in_memory import InMemoryTransport
from mindspeed_cp.layout import redistribution as layout_redistribution
from mindspeed_cp.layout.redistribution import PACKED_BYTES
from mindspeed_cp.plan.transfers import REDISTRIBUTION, transfers
from tests.engine.cases import Case, all_ranks, attend_here

LENGTHS = (300, 41, 0, 90)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids="of pairs: {}".format)
@pytest.mark.parametrize("kv_heads", [1, 4], ids="kv heads: {}".format)
def test_what_a_rank_gives_another_is_one_message_if_it_is_small(
    share: float, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many records as messages that are looked up pair by pair, of as many bytes, in both directions."""
    plan = build_plan(Documents(LENGTHS), Topology(1, 4), AttentionConfig(8, kv_heads, 16), "ulysses")
    q, kv = plan.q_redistribution, plan.kv_redistribution
    assert q is not None and kv is not None and kv.has_copies == (kv_heads == 1)
    for direction, kv_element in (("forward", 2), ("backward", 4 if kv.has_copies else 2)):
        sizes: list[Counter[tuple[int, int]]] = []
        for move, width in ((q, 16 * 2), (kv, 2 * 16 * kv_element)):
            sizes.append(
                Counter(
                    {
                        (int(pair["src"]), int(pair["dst"])): int(pair["rows"] * pair["heads"]) * width
                        for pair in move.remote_pairs
                    }
                )
            )
        together = sizes[0] + sizes[1]
        limit = int(np.quantile(list(together.values()), share)) if share else 0
        monkeypatch.setattr(layout_redistribution, "PACKED_BYTES", limit)
        expected: Counter[tuple[int, int, float]] = Counter()
        for pair, size in together.items():
            for part in [size] if size <= limit else [each[pair] for each in sizes if pair in each]:
                expected[(*pair, float(part))] += 1
        table = transfers(plan, direction)
        step = 0 if direction == "forward" else table["start"].max()
        ends = ("src", "dst") if direction == "forward" else ("dst", "src")
        actual = Counter(
            (int(record[ends[0]]), int(record[ends[1]]), float(record["bytes"]))
            for record in table[(table["start"] == step) & (table["kind"] == REDISTRIBUTION)]
        )
        assert actual == expected and len(together) <= sum(actual.values()) <= 2 * len(together)


@pytest.mark.parametrize("most", [0, PACKED_BYTES])
def test_so_many_are_posted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine: one for each record, and one more for each of k and v apart."""
    monkeypatch.setattr(layout_redistribution, "PACKED_BYTES", most)
    case = Case(LENGTHS, 4, 8, 4, algorithm="ulysses")
    plan, leaves, _ = all_ranks(case)
    posted: Counter[int] = Counter()
    post = InMemoryTransport.post

    def counting(self: InMemoryTransport, batch, all_to_all=False):  # type: ignore[no-untyped-def]
        posted[self.rank] += sum(transfer.sends for transfer in batch)
        return post(self, batch, all_to_all)

    monkeypatch.setattr(InMemoryTransport, "post", counting)
    attend_here(case, plan, leaves)
    table = transfers(plan, "forward", case.dtype.itemsize)
    assert (table["kind"] == REDISTRIBUTION).all()
    records = np.bincount(table["src"], minlength=4)
    peers = np.array([len(set(table["dst"][table["src"] == rank].tolist())) for rank in range(4)])
    tensors = records if most else records // 3 * 4  # q, k and v, and the output: 3 records of 4 tensors
    assert (records == (2 if most else 3) * peers).all()
    assert [posted[rank] for rank in range(4)] == tensors.tolist()
