"""Plans of trees: proved for random forests, tiles are what a walk along the path says, trees are placed as one, and a
plan for other documents, or one that leaves an ancestor out, is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, ConfigError, Documents, PlanError, Topology, build_plan, verify_plan
from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.layout import zigzag
from mindspeed_cp.plan import CAUSAL, FULL
from mindspeed_cp.plan.parts import combine, select_documents, select_layout
from mindspeed_cp.plan.problem import document_pairs
from mindspeed_cp.plan.tiles import count_pairs
from mindspeed_cp.simulate.tile_work import TileCounter
from tests.engine.cases import VARIANTS, Case
from tests.engine.draw import blocks, parents
from tests.plan.test_broken_plans import documents_everywhere

AGENT = Documents([6, 8, 5, 1, 9, 4, 7, 2, 10], [-1, 0, 1, 2, 2, 1, 5, 0, -1])


def visible(documents: Documents, left: int = 2**31) -> np.ndarray:
    """Whether query (row) sees key (column), token by token, by a walk from parent to parent; bool [tokens, tokens]."""
    doc = documents.document_of(np.arange(documents.tokens))
    out = np.zeros((documents.tokens, documents.tokens), bool)
    for query in range(documents.tokens):
        document, key, seen = int(doc[query]), query, 0
        while document >= 0 and seen <= left:
            while key >= documents.offsets[document] and seen <= left:
                out[query, key] = True
                key, seen = key - 1, seen + 1
            document = int(documents.parents[document])
            key = int(documents.offsets[document + 1]) - 1 if document >= 0 else 0
    return out


@st.composite
def forests(draw: st.DrawFn) -> Documents:
    lengths = draw(st.lists(st.integers(0, 40), min_size=2, max_size=14))
    return Documents(lengths, parents(len(lengths), Random(draw(st.integers(0, 10**9)))))


def attentions() -> st.SearchStrategy[AttentionConfig]:
    window = st.none() | st.tuples(st.integers(0, 30), st.just(0))
    return st.builds(lambda window, alibi: AttentionConfig(4, 2, 8, window=window, alibi=alibi), window, st.booleans())


@settings(max_examples=1000, deadline=None)
@given(forests(), st.integers(1, 7), attentions(), st.sampled_from(sorted(VARIANTS)))
def test_random_forests_are_proved(documents: Documents, ranks: int, attention: AttentionConfig, variant: str) -> None:
    case = Case(
        tuple(documents.lengths.tolist()), 1, 4, 2, 8, 8, window=attention.window, alibi=attention.alibi,
        parents=tuple(documents.parents.tolist()),
    ).on(ranks, variant)  # fmt: skip
    plan = case.plan()
    assert plan.documents == documents
    verify_plan(plan)
    pairs = visible(documents, attention.visible_range[0]).sum(1)
    by_document = np.bincount(documents.document_of(np.arange(documents.tokens)), pairs, len(documents))
    assert document_pairs(documents, documents, attention).tolist() == by_document.tolist()
    assert plan.work().sum() == 4 * pairs.sum()


@settings(max_examples=400, deadline=None)
@given(
    forests(),
    st.integers(1, 7),
    st.none() | st.tuples(st.integers(0, 30), st.just(0)),
    st.booleans(),
    st.sampled_from(sorted(VARIANTS)),
    st.randoms(use_true_random=False),
)
def test_random_blocks_are_proved(
    documents: Documents, ranks: int, window: tuple[int, int] | None, flat: bool, variant: str, rng: Random
) -> None:
    lengths = tuple(documents.lengths.tolist())
    case = Case(
        lengths, 1, 4, 2, 8, 8, window=window, blocks=blocks(lengths, rng),
        parents=None if flat else tuple(documents.parents.tolist()),
    ).on(ranks, variant)  # fmt: skip
    plan = case.plan()
    verify_plan(plan)
    assert plan.work().sum() == 4 * document_pairs(case.documents, case.documents, case.attention).sum()


def test_a_plan_without_the_blocks_is_refused() -> None:
    lengths = [40, 25]
    documents = Documents(lengths, None, [(10, 30), (50, 65)])
    plan = build_plan(Documents(lengths), Topology(1, 3), AttentionConfig(4), "ring", layout="contiguous")
    with pytest.raises(PlanError, match=r"query 10 of document 0 .* does not see key \d+ of its document"):
        verify_plan(documents_everywhere(plan, documents, documents))


@pytest.mark.parametrize("window", [None, (7, 0)])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_tiles_cover_just_the_visible_pairs(ranks: int, window: tuple[int, int] | None) -> None:
    attention = AttentionConfig(4, window=window)
    plan = build_plan(AGENT, Topology(1, ranks), attention, "ring")
    seen = np.zeros((AGENT.tokens, AGENT.tokens), int)
    for rank in range(ranks):
        queries, tiles = plan.layout.tokens(rank), plan.forward.tiles(rank)
        contents = {(c["step"], c["slot"]): plan.forward.spans_in(c) for c in plan.forward.contents_of(rank)}
        for tile in tiles:
            keys = np.concatenate([np.arange(s["start"], s["stop"]) for s in contents[tile["step"], tile["slot"]]])
            for i in range(tile["q_rows"]):
                first, stop = tile["k_row"], tile["k_row"] + tile["k_rows"]
                if tile["mask"] == CAUSAL:
                    stop -= tile["q_rows"] - 1 - i
                elif tile["mask"] != FULL:
                    ahead = tile["q_pos"] + i - tile["k_pos"]
                    first, stop = first + max(0, ahead - 7), min(stop, first + ahead + 1)
                seen[queries[tile["q_row"] + i], keys[first:stop]] += 1
        assert count_pairs(tiles, attention).sum() * 4 == plan.work_of(rank).sum()
    assert np.array_equal(seen, visible(AGENT, attention.visible_range[0]).astype(int))


def test_answers_side_by_side_share_the_tiles_of_their_prompt() -> None:
    documents = Documents([100, *[10] * 8], [-1, *[0] * 8])
    plan = build_plan(documents, Topology(1, 1), AttentionConfig(4), "ring")
    tiles = plan.forward.tiles(0)
    assert len(tiles) == 1 + 8 + 1
    shared = tiles[tiles["q_rows"] == 80]
    assert shared[["q_row", "k_row", "k_rows", "mask", "doc", "k_doc", "q_pos", "k_pos"]].tolist() == [
        (100, 0, 100, FULL, 1, 0, 100, 0)
    ]


@pytest.mark.parametrize("algorithm", ["ring", "direct", "ulysses", "hierarchical"])
def test_a_plan_for_separate_documents_is_refused(algorithm: str) -> None:
    attention, topology = AttentionConfig(4), Topology(1, 3)
    plan = build_plan(Documents(AGENT.lengths), topology, attention, algorithm)
    if plan.parts:
        pytest.skip(f"{algorithm} makes parts here")
    if algorithm != "ulysses":  # where heads are split, every rank has all keys of its heads, whatever the tree
        with pytest.raises(PlanError, match=r"does not see key|wrong|other tokens"):
            verify_plan(documents_everywhere(plan, AGENT, AGENT))
    verify_plan(build_plan(AGENT, topology, attention, algorithm))


def test_a_lost_ancestor_is_named() -> None:
    documents = Documents([30, 3, 3], [-1, 0, 0])
    plan = build_plan(documents, Topology(1, 3), AttentionConfig(4), "ring", layout="contiguous")
    forward = plan.forward
    contents = forward.contents[(forward.contents["rank"] != 0) | (forward.contents["step"] == 0)]
    says = r"rank 0: query 30 of document 1 \(row 10\) does not see key 10 of document 0, on its path, owned by rank 1"
    with pytest.raises(PlanError, match=says):
        verify_plan(replace(plan, forward=replace(forward, contents=contents)))


def test_parts_hold_whole_trees() -> None:
    attention, topology = AttentionConfig(4), Topology(1, 2)
    first = np.arange(len(AGENT)) < 4  # documents 4 to 7 are of the same tree
    layout = zigzag(AGENT, 2)
    parts = []
    for chosen in (first, ~first):
        documents = select_documents(AGENT, chosen)
        assert (documents.parents == AGENT.parents).all()
        parts.append(build_plan(documents, topology, attention, "ring"))
        assert parts[-1].layout.same_as(select_layout(layout, chosen))
    with pytest.raises(ConfigError, match="part 0 has documents of the tree of document 0, but not document 4"):
        combine("two", parts)
    whole = AGENT.roots == 0
    verify_plan(
        combine("two", [build_plan(select_documents(AGENT, x), topology, attention, "ring") for x in (whole, ~whole)])
    )


def test_parts_have_the_blocks_of_the_batch() -> None:
    attention, topology, first = AttentionConfig(2), Topology(1, 2), np.array([True, False])
    plain, mixed = Documents([4, 4]), Documents([4, 4], None, [(0, 4), (4, 8)])
    for documents, others in ((mixed, plain), (plain, mixed)):
        parts = [
            build_plan(select_documents(x, chosen), topology, attention, "ring")
            for x, chosen in ((documents, first), (others, ~first))
        ]
        with pytest.raises(ConfigError, match="part 1 has other blocks of documents than the plan"):
            combine("two", parts)


@pytest.mark.parametrize("keys", [Documents([5, 9], [-1, 0]), Documents([5, 9], None, [(1, 4)])])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_keys_have_no_parents_or_blocks_of_their_own(keys: Documents, mask: str) -> None:
    name = "parents" if keys.blocks is None else "blocks"
    with pytest.raises(ConfigError, match=f"documents have {name}, with keys of other {name}; valid: mask 'causal'"):
        build_plan(Documents([5, 9]), Topology(1, 2), AttentionConfig(2, mask=mask), "ring", keys)


@pytest.mark.parametrize("head_split", [True, False])
def test_hierarchical_plans_place_trees_as_one(head_split: bool) -> None:
    lengths = [300, 40, 60, 20] * 12
    documents = Documents(lengths, [x + 4 * i if x >= 0 else -1 for i in range(12) for x in (-1, 0, 0, 2)])
    plan = build_plan(documents, Topology(2, 2), AttentionConfig(8, 2, 64), "hierarchical", head_split=head_split)
    verify_plan(plan)
    held: dict[int, set[int]] = {}
    for span in plan.layout.spans:
        held.setdefault(int(documents.roots[span["doc"]]), set()).add(int(span["rank"]))
    if not head_split:
        assert all(len(ranks) == 1 for ranks in held.values())  # twelve equal trees on four ranks
    assert plan.layout.token_counts.tolist() == [documents.tokens // 4] * 4


def test_a_document_on_one_rank_fetches_from_ancestors_elsewhere() -> None:
    documents = Documents([400, 1, 1, 2, 1], [-1, 0, 0, 0, 3])
    options = {"head_split": False, "max_seqlen_per_dp_cp_rank": 110}
    plan = build_plan(documents, Topology(2, 2), AttentionConfig(8), "hierarchical", **options)
    holders = [len(np.unique(plan.layout.spans["rank"][plan.layout.spans["doc"] == doc])) for doc in range(5)]
    assert holders[0] == 4 and 1 in holders
    verify_plan(plan)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_simulator_counts_the_tiles_of_a_tree(algorithm: str) -> None:
    for documents in (AGENT, Documents([800, 100, 0, 100, 70], [-1, 0, 0, 0, -1])):
        for ranks in (1, 2, 3):
            plan = build_plan(documents, Topology(1, ranks), AttentionConfig(6, 6, 64), algorithm)
            for direction in ("forward", "backward"):
                work = TileCounter(plan).work(direction)
                assert work.pairs.sum() * 6 == pytest.approx(plan.work().sum(), rel=1e-12)
                assert (work.calls.sum(1) > 0).all() or documents is AGENT
