"""Random plans are proved, tiles are what a brute-force mask says, and plans have the shapes that docs/algorithms.md promises."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms import ALGORITHMS, algorithm_name
from mindspeed_cp.algorithms.derived_backward import derive_backward
from mindspeed_cp.layout import TOKEN_SPAN
from mindspeed_cp.plan import CAUSAL, FULL, alibi_slopes, peak_bytes
from mindspeed_cp.plan.tiles import count_pairs, tiles_between
from tests.plan.forests import forest_plan

lengths = st.lists(st.integers(0, 70), max_size=8)
ranks = st.integers(1, 9)
masks = st.sampled_from(["causal", "full"])


@settings(max_examples=400, deadline=None)
@given(lengths, ranks, masks, st.sampled_from(["zigzag", "contiguous"]))
def test_random_rings_are_proved(lengths, ranks, mask, layout):
    verify_plan(build_plan(Documents(lengths), Topology(1, ranks), AttentionConfig(4, mask=mask), layout=layout))


@settings(max_examples=200, deadline=None)
@given(lengths, ranks, masks, st.integers(0, 10**6))
def test_random_forests_and_their_derived_backward_are_proved(lengths, ranks, mask, seed):
    verify_plan(forest_plan(lengths, ranks, AttentionConfig(4, mask=mask), seed))


def test_a_zigzag_ring_needs_one_tile_per_document_and_step():
    plan = build_plan(Documents([640, 320]), Topology(1, 4), AttentionConfig(4))
    for rank in range(4):
        tiles = plan.forward.tiles(rank)
        assert tiles["step"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (tiles["mask"] == CAUSAL).tolist() == [True, True] + [False] * 6


def test_a_zigzag_ring_is_balanced_in_every_step():
    work = build_plan(Documents([4096]), Topology(1, 8), AttentionConfig(4)).work()
    assert (work.max(0) - work.min(0) <= 0.01 * work.mean(0)).all()


def test_tiles_cut_queries_that_lie_partly_in_the_slot():
    documents = Documents([20])
    q, k = np.array([(0, 0, 4, 16)], TOKEN_SPAN), np.array([(0, 0, 0, 8)], TOKEN_SPAN)
    for attention in (AttentionConfig(4), AttentionConfig(4, alibi=True)):
        tiles = tiles_between(q, k, documents, attention)
        assert [tuple(t)[2:] for t in tiles.tolist()] == [
            (0, 4, 0, 8, CAUSAL, 0, 0, 4, 0), (4, 8, 0, 8, FULL, 0, 0, 8, 0)
        ]  # fmt: skip


def test_blocks_stop_after_the_last_rank_that_sees_them():
    # One-token documents live on one rank each: nothing has to travel.
    plan = build_plan(Documents([1] * 7), Topology(1, 4), AttentionConfig(4))
    assert len(plan.forward.fetch) == len(plan.backward.reduce) == 0
    verify_plan(plan)


def test_the_ring_refuses_the_derived_backward_for_want_of_slots():
    plan = build_plan(Documents([64]), Topology(1, 5), AttentionConfig(4))
    with pytest.raises(PlanError, match="needs another slot"):
        derive_backward(plan.forward)


def test_peak_bytes_count_slots_gradients_and_staging():
    plan = build_plan(Documents([64]), Topology(1, 4), AttentionConfig(8, 2, 16, 32))
    width, rows = 2 * (16 + 32), 16
    forward, backward = peak_bytes(plan, "forward")[0], peak_bytes(plan, "backward")[0]
    assert (forward["kv"], forward["gradients"], forward["staging"]) == (2 * rows * width * 2, 0, 0)
    assert (backward["kv"], backward["gradients"], backward["staging"]) == (
        2 * rows * width * 2,
        3 * rows * width * 4,
        rows * width * 4,
    )
    verify_plan(plan, max_bytes=int(backward["total"]))
    with pytest.raises(PlanError, match="backward: rank 0: communication buffers take"):
        verify_plan(plan, max_bytes=int(backward["total"]) - 1)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), algorithm="rings"), "algorithm is 'rings': unknown algorithm; did you mean ring? valid: ring"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), window=3), "algorithm 'ring' has no option 'window'; valid: layout"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), layout="striped"), "valid: one of zigzag, contiguous, balanced"),
        (lambda: AttentionConfig(6, 4), "kv_heads is 4; valid: a divisor of attention.heads, which is 6"),
        (lambda: AttentionConfig(0), "heads is 0; valid: a whole number, 1 or more"),
        (lambda: AttentionConfig(4, mask="sparse"), "mask is 'sparse'; valid: causal, full"),
        (lambda: AttentionConfig(4, window=(3, 1)), "window is (3, 1), but under mask 'causal' no key to the right"),
        (lambda: AttentionConfig(4, window=(3, -2)), "window is (3, -2); valid: (left, right)"),
        (lambda: AttentionConfig(4, window=3), "window is 3; valid: (left, right)"),
        (lambda: AttentionConfig(4, alibi=[0.5, 0.25]), "alibi is (0.5, 0.25); valid: True, False, or one finite slope for each of the 4 heads"),
        (lambda: AttentionConfig(2, alibi=[0.5, float("inf")]), "one finite slope for each"),
        (lambda: AttentionConfig(2, alibi="yes"), "alibi is 'yes'; valid: True, False, or one slope"),
        (lambda: AttentionConfig(4, dropout=1.0), "dropout is 1.0; valid: a number from 0 to below 1"),
        (lambda: AttentionConfig(4, dropout=-0.1), "dropout is -0.1; valid"),
        (lambda: AttentionConfig(4, first_head=-1), "first_head is -1; valid"),
        (lambda: AttentionConfig(4, alibi=True, first_head=4), "attention.alibi is True with first_head = 4"),
        (lambda: AttentionConfig(4, scale=True), "scale is True; valid"),
        (lambda: Topology(True, 4), "Topology.nodes is True; valid"),
        (lambda: build_plan([4], Topology(1, 2), AttentionConfig(4)), "documents is [4]; valid: Documents(...)"),
        (lambda: build_plan(Documents([4]), 2, AttentionConfig(4)), "topology is 2; valid: Topology(...)"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), kv_documents=[9]), "kv_documents is [9]; valid: Documents(...)"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "hybrid", ulysses_degree=4), "ulysses_degree is 4; valid: a divisor of the 6 ranks: 1, 2, 3, 6"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "double_ring", cp_window_size=0), "cp_window_size is 0; valid: a divisor of the 6 ranks"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "direct", prefetch=0), "prefetch is 0; valid: a whole number of rounds >= 1"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "ulysses", layout="zigzag"), "algorithm 'ulysses' has no option 'layout'; valid: reduce_dtype"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), kv_documents=Documents([5])), "attention.mask is 'causal' with keys of other lengths than queries"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4, mask="full"), kv_documents=Documents([5, 6])), "kv_documents has 2 documents, documents 1"),
        (lambda: AttentionConfig(4, scale=float("nan")), "scale is nan"),
        (lambda: AttentionConfig(4, scale=0.0), "scale is 0.0; valid: a finite number above 0"),
        (lambda: AttentionConfig(4.0), "heads is 4.0; valid: a whole number"),
        (lambda: Topology(0, 4), "Topology.nodes is 0"),
        (lambda: AttentionConfig(2, alibi=("a", "b")), "alibi is ('a', 'b'); valid: True, False, or one slope"),
        (lambda: AttentionConfig(2, alibi=["0.5", "0.25"]), "alibi is ['0.5', '0.25']; valid: True"),
        (lambda: AttentionConfig(2, alibi=((0.5,), (0.25,))), "alibi is ((0.5,), (0.25,)); valid: True"),
        (lambda: AttentionConfig(2, alibi=(0.5, 1j)), "alibi is (0.5, 1j); valid: True"),
        (lambda: AttentionConfig(2, alibi=(True, False)), "alibi is (True, False); valid: True"),
        (lambda: AttentionConfig(2, alibi=np.array([True, False])), "alibi is array([ True, False]); valid: True"),
        (lambda: AttentionConfig(2, alibi=None), "alibi is None; valid: True"),
        (lambda: AttentionConfig(2, alibi=(0.5, 1e39)), "alibi is (0.5, 1e+39); valid: True, False, or one finite slope for each of the 2 heads, in fp32 too"),
        (lambda: AttentionConfig(1, alibi=(10**400,)), "valid: slopes that fp32 holds"),
        (lambda: AttentionConfig(4, scale=1e39), "scale is 1e+39; valid: a finite number above 0, in fp32 too"),
        (lambda: AttentionConfig(4, scale=10**400), "valid: a finite number above 0, in fp32 too"),
        (lambda: AttentionConfig(2**80), "heads is 1208925819614629174706176; valid: a whole number, 1 or more, at most 1000000000"),
        (lambda: AttentionConfig(4, first_head=2**80), "valid: a whole number, 0 or more, at most 1000000000"),
        (lambda: Topology(1, 2**80), "Topology.ranks_per_node is 1208925819614629174706176; valid: a whole number, 1 or more, at most 1000000"),
        (lambda: Topology(2**15, 2**15), "Topology.nodes * ranks_per_node is 1073741824; valid"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "direct", prefetch=2**80), "prefetch is 1208925819614629174706176; valid: a whole number of rounds >= 1, at most"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "direct", prefetch=None), "prefetch is None; valid"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "direct", layout=np.array(["zigzag", "balanced"])), "layout is array("),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "hybrid", ulysses_degree=2**80), "valid: a divisor of the 6 ranks"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "double_ring", cp_window_size=[2]), "cp_window_size is [2]; valid: a divisor"),
        (lambda: build_plan(Documents([4]), Topology(1, 6), AttentionConfig(4), "hybrid", ulysses_degree=1.5), "ulysses_degree is 1.5; valid: a divisor"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), "auto"), "algorithm is 'auto': auto does not build a plan; it chooses"),
        (lambda: build_plan(Documents([4]), Topology(1, 2), AttentionConfig(4), None), "algorithm is None: must be a name; valid: ring"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(build, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        build()


def test_many_rounds_ahead_are_all_rounds():
    plan = build_plan(Documents([64]), Topology(1, 4), AttentionConfig(4), "direct", prefetch=2**20)
    assert plan.forward.capacity.shape == (4, 4)
    verify_plan(plan)


def test_algorithms_answer_to_megatrons_and_mindspeeds_names():
    assert [algorithm_name(n) for n in ("ring", "p2p", "megatron_cp_algo")] == ["ring"] * 3
    assert [algorithm_name(n) for n in ("a2a", "ulysses_cp_algo")] == ["ulysses"] * 2
    assert [algorithm_name(n) for n in ("a2a+p2p", "hybrid_cp_algo")] == ["hybrid"] * 2
    assert [algorithm_name(n) for n in ("all_gather", "allgather", "kvallgather_cp_algo")] == ["all_gather"] * 3


def test_the_first_rank_of_a_causal_ring_sends_only_what_others_see():
    plan = build_plan(Documents([64]), Topology(1, 4), AttentionConfig(4))
    sent = plan.forward.fetch.items
    assert sent["rows"][(sent["src"] - sent["start"]) % 4 == 0].tolist() == [8, 8, 8]  # block 0: its first chunk
    assert sent["rows"][(sent["src"] - sent["start"]) % 4 != 0].tolist() == [16] * 9


def test_half_of_the_own_block_waits_for_the_last_gradients():
    for lengths in ([4096], [700, 20, 3000, 5, 900]):
        for mask in ("causal", "full"):
            backward = build_plan(Documents(lengths), Topology(1, 4), AttentionConfig(4, mask=mask)).backward
            for rank in range(4):
                tiles = backward.tiles(rank)
                pairs, is_own = count_pairs(tiles, AttentionConfig(4)), tiles["slot"] == 0
                late = pairs[is_own & (tiles["step"] == backward.steps - 1)].sum()
                assert set(tiles["step"][is_own]) == {0, backward.steps - 1}
                assert 0.3 * pairs[is_own].sum() < late < 0.7 * pairs[is_own].sum()


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [(1, [8]), (2, [4, 8]), (8, [1, 2, 3, 4, 5, 6, 7, 8]), (6, [2, 4, 6, 8, 1, 3]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
)  # fmt: skip
def test_slopes_of_alibi_are_those_of_the_paper(heads, exponents):
    """And where heads are no power of two, those of the authors' code."""
    assert alibi_slopes(heads).tolist() == pytest.approx([2.0**-exponent for exponent in exponents], rel=1e-15)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_integers_of_numpy_plan_what_those_of_python_do(algorithm):
    documents, four, eight = Documents([100, 2000, 30]), np.int64(4), np.int32(8)
    for attention, same in (
        (AttentionConfig(eight, four, four, alibi=True), AttentionConfig(8, 4, 4, alibi=True)),
        (AttentionConfig(eight, head_dim=eight, latent=(eight, four)), AttentionConfig(8, head_dim=8, latent=(8, 4))),
    ):
        plan = build_plan(documents, Topology(np.int64(2), four), attention, algorithm)
        verify_plan(plan)
        expected = build_plan(documents, Topology(2, 4), same, algorithm)
        assert repr((plan.attention, plan.topology)) == repr((expected.attention, expected.topology))
