"""Trees of documents: what follows from parents, against a walk from parent to parent; trajectories; bad input."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.layout import Roll, zigzag
from tests.engine.draw import parents

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def ancestors(parent_of: tuple[int, ...], doc: int) -> list[int]:
    """Ancestors from the root down."""
    return [] if parent_of[doc] < 0 else [*ancestors(parent_of, parent_of[doc]), parent_of[doc]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.randoms(use_true_random=False))
def test_paths_depths_roots_and_positions_follow_from_the_parents(lengths: list[int], rng: Random) -> None:
    parent_of = parents(len(lengths), rng)
    documents = Documents(lengths, parent_of)
    trees = documents.trees
    assert trees is not None
    for doc in range(len(lengths)):
        above = ancestors(parent_of, doc)
        assert trees.path(doc).tolist() == [*above, doc]
        assert trees.depths[doc] == len(above)
        assert documents.roots[doc] == [*above, doc][0]
        assert documents.first_positions[doc] == sum(lengths[i] for i in above)
        assert (doc in trees.leaves) == (doc not in parent_of)
    drawn = np.array([rng.randrange(len(lengths)) for _ in range(5)])
    index, seen = documents.seen_documents(drawn)
    assert [list(seen[index == i]) for i in range(5)] == [[*ancestors(parent_of, doc), doc] for doc in drawn.tolist()]
    assert documents.tree_sums(documents.lengths).tolist() == [
        int(documents.lengths[documents.roots == root].sum()) for root in np.unique(documents.roots)
    ]
    layout = zigzag(documents, 3)
    for rank in range(3):
        tokens = layout.tokens(rank)
        doc = documents.document_of(tokens)
        expected = tokens - documents.offsets[doc] + documents.first_positions[doc]
        assert (layout.positions(rank) == expected).all()


def test_parents_tell_batches_apart() -> None:
    flat, tree, chain = Documents([3, 2, 4]), Documents([3, 2, 4], [-1, 0, 0]), Documents([3, 2, 4], [-1, 0, 1])
    assert len({flat, tree, chain}) == 3
    assert tree == Documents([3, 2, 4], np.array([-1, 0, 0])) != chain
    assert Documents([3, 2], [-1, -1]) == Documents([3, 2]) and Documents([3, 2], [-1, -1]).trees is None
    assert repr(tree) == "Documents([3, 2, 4], parents=[-1, 0, 0], tokens=9)"
    assert tree.with_lengths(np.array([1, 1, 1])).parents.tolist() == [-1, 0, 0]


@settings(max_examples=150, deadline=None)
@given(token_lists, st.integers(1, 3))
def test_trajectories_are_paths_and_prefixes_are_stored_once(trajectories: list[list[int]], least: int) -> None:
    packed = Documents.from_trajectories(trajectories, min_shared=least, must_share=False)
    documents = packed.documents
    prefixes = {tuple(t[: i + 1]) for t in trajectories for i in range(len(t))}
    if least == 1:
        assert documents.tokens == len(prefixes)
    assert sum(map(len, trajectories)) >= documents.tokens == len(packed.tokens)
    positions, doc_of = zigzag(documents, 1).positions(0), documents.document_of(np.arange(documents.tokens))
    for trajectory, tokens in zip(trajectories, packed.tree_tokens, strict=True):
        assert packed.tokens[tokens].tolist() == trajectory
        assert positions[tokens].tolist() == list(range(len(trajectory)))
        path = [doc_of[tokens[-1]]] if documents.trees is None else documents.trees.path(int(doc_of[tokens[-1]]))
        assert tokens.tolist() == [t for doc in path for t in range(documents.offsets[doc], documents.offsets[doc + 1])]


@settings(max_examples=100, deadline=None)
@given(token_lists, st.randoms(use_true_random=False))
def test_weighted_targets_are_those_of_all_trajectories(trajectories: list[list[int]], rng: Random) -> None:
    packed = Documents.from_trajectories(trajectories, must_share=False)
    targets = packed.targets
    weights = [[rng.random() for _ in trajectory] for trajectory in trajectories]
    expected: dict[tuple[tuple[int, ...], int], float] = {}
    for trajectory, of_tokens in zip(trajectories, weights, strict=True):
        for i in range(1, len(trajectory)):
            key = tuple(trajectory[:i]), trajectory[i]
            expected[key] = expected.get(key, 0.0) + of_tokens[i]
    prefix_of = {
        int(token): tuple(trajectory[: i + 1])
        for trajectory, tokens in zip(trajectories, packed.tree_tokens, strict=True)
        for i, token in enumerate(tokens)
    }
    got = {
        (prefix_of[source], token): weight
        for source, token, weight in zip(
            targets.source.tolist(), targets.token.tolist(), targets.weights(weights).tolist(), strict=True
        )
    }
    assert got.keys() == expected.keys() and len(got) == len(targets)
    assert all(abs(got[key] - expected[key]) < 1e-12 for key in got)
    for trajectory, numbers in zip(trajectories, targets.of_trajectories, strict=True):
        assert targets.token[numbers].tolist() == trajectory[1:]
    assert (targets.weights([1.0] * len(trajectories)) == targets.weights()).all()


def test_ranks_have_the_targets_of_their_rows() -> None:
    packed = Documents.from_trajectories([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7]])
    layout, seen = zigzag(packed.documents, 3), []
    for rank in range(3):
        numbers, rows = packed.targets.of_rows(layout.tokens(rank))
        assert (layout.tokens(rank)[rows] == packed.targets.source[numbers]).all()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(len(packed.targets)))
    assert [len(part) for part in packed.targets.of_rows(np.zeros(0, np.int64))] == [0, 0]


@pytest.mark.parametrize(
    ("lengths", "parent_of", "says"),
    [
        ([3, 2], [0], r"parents has 1 entries for 2 documents; valid: one for each document"),
        ([3, 2], [0, -1], r"parents\[0\] is 0; valid: -1: the first document continues none"),
        ([3, 2], [-1, 1], r"parents\[1\] is 1; valid: -1, or the number of an earlier document \(0 to 0\)"),
        ([3, 2, 1], [-1, 2, 1], r"parents\[1\] is 2; valid: .* a parent comes before the documents that continue it"),
        ([3, 2], [-1, -2], r"parents\[1\] is -2; valid"),
        (
            [1] * 4,
            [-1, 0, -1, 0],
            r"parents\[3\] is 0, but document 2, before it, is not of the tree .* valid: preorder",
        ),
        ([1] * 4, [-1, 0, 0, 1], r"parents\[3\] is 1, but document 2, before it, is not of the tree below document 1"),
        ([3, 2], [-1.0, 0.0], r"parents is float64 of shape \[2\]; valid: integers of one dimension"),
        ([3, 2], 0, r"parents is int64 of shape \[\]; valid: integers of one dimension"),
        ([3, 2], [[-1, 0]], r"parents is int64 of shape \[1, 2\]; valid: integers of one dimension"),
    ],
)
def test_parents_that_make_no_trees_are_refused(lengths: list[int], parent_of: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Documents(lengths, parent_of)


@pytest.mark.parametrize(
    ("trajectories", "options", "says"),
    [
        ([], {}, "trajectories is empty; valid"),
        ([[1, 2], []], {}, r"trajectories\[1\] has no tokens; valid: 1 token or more"),
        ([[1, 2], [1.5]], {}, r"trajectories\[1\] is float64 of shape \[1\]; valid: integers"),
        ([[1, 2], ["a"]], {}, r"trajectories\[1\] is .* valid: integers"),
        ([[1, 2], [[1, 2]]], {}, r"trajectories\[1\] is int64 of shape \[1, 2\]"),
        ([[1, 2], [3, 2]], {}, r"no two of the 2 begin with the same token; valid: .* Documents\(lengths\)"),
        ([[1, 2, 3], [1, 4]], {"min_shared": 2}, "begin with the same 2 tokens; valid"),
        ([[1, 2], [1, 3]], {"min_shared": 0}, "min_shared"),
    ],
)
def test_trajectories_that_make_no_trees_are_refused(trajectories: list, options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Documents.from_trajectories(trajectories, **options)


def test_rows_of_trees_are_not_rolled() -> None:
    layout = zigzag(Documents([3, 2, 4], [-1, 0, 0]), 2)
    with pytest.raises(ConfigError, match=r"roll: documents have parents, .* valid: documents without parents"):
        Roll(layout, -1)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0], "weights has 1 entries; valid: one for each of the 2 trajectories"),
        ([1.0, float("nan")], r"weights\[1\] has values that are not finite"),
        ([1.0, [1.0, 1.0]], r"weights\[1\] has shape \[2\]; valid: one number, or \[3\], one for each token"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: list, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Documents.from_trajectories([[1, 2, 3], [1, 2, 4]]).targets.weights(weights)
