"""The three batches, the slots of links, and the memory that is asked for."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Topology
from mindspeed_cp.cluster_check.batches import BATCHES, check_memory, make_batches, needed_bytes
from mindspeed_cp.cluster_check.link_slots import link_slots, tournament
from mindspeed_cp.errors import ConfigError


@pytest.mark.parametrize("tokens, ranks", [(128, 2), (2048, 4), (65536, 16)])
def test_batches_are_full_and_what_they_are_called(tokens: int, ranks: int) -> None:
    batches = make_batches(tokens, ranks)
    assert tuple(batches) == BATCHES and make_batches(tokens, ranks) == batches
    long, uneven, short = batches.values()
    assert long == [tokens] and sum(uneven) == sum(short) == tokens
    assert all(length > 0 for length in uneven + short)
    assert max(uneven) > 2 * np.mean(uneven) and max(short) < 2 * np.mean(short)
    assert len(short) > ranks


@pytest.mark.parametrize("count", range(1, 9))
def test_a_tournament_has_every_pair_once_in_disjoint_rounds(count: int) -> None:
    rounds = list(tournament(count))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= count


@pytest.mark.parametrize("nodes, per_node", [(1, 2), (2, 1), (2, 2), (3, 4), (4, 3)])
def test_slots_use_a_link_once_and_no_rank_twice(nodes: int, per_node: int) -> None:
    slots = link_slots(nodes, per_node)
    pairs = {
        kind: [pair for slot in slots if slot.kind == kind for pair in slot.pairs] for kind in ("in_node", "network")
    }
    assert len(set(pairs["in_node"])) == len(pairs["in_node"]) == nodes * per_node * (per_node - 1) // 2
    assert len(set(pairs["network"])) == len(pairs["network"]) == per_node * nodes * (nodes - 1) // 2
    assert all(a // per_node == b // per_node for a, b in pairs["in_node"])
    assert all(a % per_node == b % per_node and a // per_node != b // per_node for a, b in pairs["network"])
    for slot in slots:
        used = [rank // per_node for pair in slot.pairs for rank in pair]
        assert len(set(used)) == len(used) // (2 if slot.kind == "in_node" else 1)  # one pair, or one NIC, of a node


def test_memory_is_asked_for_where_it_is_shared() -> None:
    attention, topology = AttentionConfig(8, 8, 64), Topology(2, 2)
    largest, needed = needed_bytes(make_batches(4096, 4), topology, attention, 4)
    assert largest and (needed > 4096 // 4 * 8 * 64 * 4 * 4).all()  # q, k, v and out at least
    size = int(needed.max())
    check_memory(needed, largest, [2 * size] * 4, ["a", "b", "c", "d"], 1024)
    with pytest.raises(ConfigError, match=rf"--tokens-per-rank 1024: {largest} needs .* on rank 0, 1, .*at most about"):
        check_memory(needed, largest, [2 * size] * 4, ["a", "a", "b", "c"], 1024)
