"""Groups of trajectories: files, rows of whole groups, dispatch by what trees cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Topology
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.data import (
    EOD,
    Dispatcher,
    DocumentCost,
    PoolModel,
    TrajectoryCorpus,
    TrajectoryGroup,
    TreeRow,
    check_learnable,
    corpus_digests,
    different_documents,
    open_stream,
    open_trajectories,
)
from mindspeed_cp.errors import ConfigError
from tests.data.corpora import epoch_of, law, same

ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=64, head_dim_v=64)
LAYER = LayerCost.for_attention(ATTENTION)


def list_groups(groups: list[list[list[int]]], weights: Any = None) -> Iterator[tuple[str, TrajectoryGroup]]:
    """Groups in memory, of weight 1 or of some weights of each token."""
    for number, group in enumerate(groups):
        listed = [np.array(tokens, np.int64) for tokens in group]
        of_group = [np.ones(len(tokens)) for tokens in listed] if weights is None else weights[number]
        yield f"group {number}", TrajectoryGroup(listed, [np.asarray(weight, float) for weight in of_group])


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
groups_of_tokens = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=12)


def trajectories_of(row: TreeRow) -> list[tuple[int, ...]]:
    return [tuple(row.tokens[path].tolist()) for path in row.trajectories.tree_tokens]


@law
@given(groups_of_tokens, st.integers(0, 3), st.integers(1, 3))
def test_every_trajectory_of_every_group_is_in_one_row_of_an_epoch(
    groups: list[list[list[int]]], seed: int, min_shared: int
) -> None:
    corpus = TrajectoryCorpus(list_groups(groups), min_shared)
    context = max(2, int(corpus.lengths.max()))
    stream, seen = open_stream(corpus, context, seed), Counter[tuple[int, ...]]()
    while (row := next(stream)) and epoch_of(stream) == 0:
        assert isinstance(row, TreeRow)
        seen.update(trajectories_of(row))
        assert 0 < row.documents.tokens == len(row.tokens) <= context
        assert row.flat_tokens == sum(map(len, trajectories_of(row)))
    assert seen == Counter(tuple(trajectory) for group in groups for trajectory in group)


@law
@given(groups_of_tokens, st.randoms(use_true_random=False))
def test_labels_weights_and_targets_are_those_of_the_trajectories(groups: list[list[list[int]]], random: Any) -> None:
    weights = [[[random.choice([0.0, 1.0, -0.5]) for _ in trajectory] for trajectory in group] for group in groups]
    corpus = TrajectoryCorpus(list_groups(groups, weights))
    row = next(open_stream(corpus, max(2, int(corpus.lengths.sum())), 0))
    assert isinstance(row, TreeRow)
    expected = Counter[tuple[int, ...]]()
    for trajectory, weight in zip(trajectories_of(row), row.weights, strict=True):
        for stop in range(1, len(trajectory)):
            expected[trajectory[: stop + 1]] += weight[stop]
    targets = row.trajectories.targets
    actual = Counter[tuple[int, ...]]()
    paths = {
        int(path[i]): tuple(row.tokens[path[: i + 1]].tolist())
        for path in row.trajectories.tree_tokens
        for i in range(len(path))
    }
    for source, token, weight in zip(targets.source, targets.token, targets.weights(row.weights), strict=True):
        actual[(*paths[int(source)], int(token))] += weight
    assert actual == expected
    first = targets.is_first
    assert len(np.unique(targets.source[first])) == first.sum() == len(np.unique(targets.source))
    np.testing.assert_array_equal(row.labels[targets.source[first]], targets.token[first])
    np.testing.assert_array_equal(row.loss_mask[targets.source[first]], targets.weights(row.weights)[first])
    assert not row.loss_mask[np.setdiff1d(np.arange(len(row.tokens)), targets.source)].any()


@law
@given(groups_of_tokens)
def test_documents_of_groups_are_those_of_their_rows(groups: list[list[list[int]]]) -> None:
    corpus = TrajectoryCorpus(list_groups(groups))
    numbers = np.arange(len(groups))[::-1]
    documents = corpus.documents(numbers)
    packed = [corpus.group(number)[0] for number in numbers.tolist()]
    assert documents.lengths.tolist() == [n for group in packed for n in group.documents.lengths.tolist()]
    assert len(documents.roots) and documents.tokens == corpus.lengths.sum()
    np.testing.assert_array_equal(corpus.sum_of_groups(numbers, documents.lengths), corpus.lengths[numbers])
    for number in numbers.tolist():
        assert corpus.documents(np.array([number])) == corpus.group(number)[0].documents


# files


def test_a_line_is_a_group_of_texts_or_token_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "ab", "trajectories": ["cé", "", [7, 8]], "weights": [1, -0.5, [0.25, 0]]},
        "",
        {"trajectories": [[1, 2, 3, 4], [1, 2, 5]]},
    )
    corpus = open_trajectories(str(path))
    packed, weights = corpus.group(0)
    listed = [packed.tokens[tree_tokens].tolist() for tree_tokens in packed.tree_tokens]
    assert listed == [[*b"abc\xc3\xa9", EOD], [*b"ab", EOD], [*b"ab", 7, 8]]
    assert [weight.tolist() for weight in weights] == [[0, 0, 1, 1, 1, 1], [0, 0, -0.5], [0, 0, 0.25, 0]]
    assert corpus.group(1)[0].documents == Documents([2, 2, 1], parents=[-1, 0, 0])
    assert (corpus.lengths.tolist(), corpus.flat_lengths.tolist()) == ([9, 5], [13, 7])
    assert (corpus.learned_tokens, corpus.most_repeated) == (6 + 5, 2)
    write(tmp_path / "b.jsonl", {"trajectories": ["x"]})
    assert len(open_trajectories(str(tmp_path))) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ([1], "is a JSON list; each line must be an object such as"),
        ({"text": "a"}, r"has the keys \['text'\]"),
        ({"trajectories": ["a"], "weight": [1]}, "unknown key 'weight'; valid: prompt, trajectories, weights"),
        ({"trajectories": []}, "valid: a list of one trajectory or more"),
        ({"trajectories": "ab"}, "trajectories is 'ab'"),
        ({"trajectories": [[]]}, r"trajectories\[0\] has no tokens"),
        (
            {"trajectories": [["a"]]},
            r"trajectories\[0\] has 'a'; valid: a text, or a list of token numbers from 0 to 256",
        ),
        ({"trajectories": [[257]]}, r"trajectories\[0\] has 257"),
        ({"trajectories": [[True]]}, r"trajectories\[0\] has True"),
        ({"trajectories": [3]}, r"trajectories\[0\] is 3; valid: a text"),
        ({"prompt": None, "trajectories": ["a"]}, "prompt is None"),
        ({"trajectories": ["\ud800"]}, "half a surrogate pair at character 0"),
        ({"trajectories": ["a"], "weights": [1, 1]}, r"weights is \[1, 1\]; valid: a list of 1"),
        ({"trajectories": ["a"], "weights": [[1]]}, r"weights\[0\] has 1 numbers; valid: one number, or 2"),
        ({"trajectories": ["a"], "weights": ["1"]}, r"weights\[0\] is '1'; valid: a finite number"),
        ('{"trajectories": ["a"], "weights": [NaN]}', r"weights\[0\] is nan"),
    ],
)
def test_the_error_of_a_bad_line_has_file_and_line(tmp_path: Path, line: Any, words: str) -> None:
    path = write(tmp_path / "a.jsonl", {"trajectories": ["a"]}, line)
    with pytest.raises(ConfigError, match=words) as error:
        open_trajectories(str(path))
    assert str(error.value).startswith(f"{path}:2: ")


def test_the_error_of_a_group_longer_than_the_context_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"trajectories": ["abc"]}, {"trajectories": ["abcd", "abcde"]})
    assert len(open_trajectories(str(path), context=7)) == 2
    with pytest.raises(
        ConfigError, match=r":2: has 7 tree tokens \(11 of its 2 trajectories\), and data\.seq_length = 6"
    ):
        open_trajectories(str(path), context=6)


def test_a_missing_file_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or folder; valid: a \.jsonl file"):
        open_trajectories(str(tmp_path / "none"))
    write(tmp_path / "a.txt", "x")
    with pytest.raises(ConfigError, match=r"suffix '\.txt' is not read"):
        open_trajectories(str(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match="has no group"):
        open_trajectories(str(write(tmp_path / "b.jsonl", "")))


def test_weights_of_nothing_cannot_be_learned() -> None:
    corpus = TrajectoryCorpus(list_groups([[[1, 2, 3], [1, 4]]], [[[1, 0, 0], [1, 0]]]))
    with pytest.raises(ConfigError, match="no token of its 1 groups is predicted with a weight other than 0"):
        check_learnable(corpus, "a.jsonl")
    check_learnable(TrajectoryCorpus(list_groups([[[1, 2]]])), "a.jsonl")


# dispatch


def tree_cost(ranks: int = 2) -> DocumentCost:
    return DocumentCost(load_cluster("a3"), ((ATTENTION, LAYER),) * 2, ranks, whole_documents=True)


def generated(turns: int = 1) -> TrajectoryCorpus:
    """24 groups of 4 answers a turn, to a prompt of 20 to 900 tokens; a turn's answers continue the first of the one before."""
    random = np.random.default_rng(5)
    groups = []
    for _ in range(24):
        path, group = random.integers(0, 250, random.integers(20, 900)).tolist(), []
        for _ in range(turns):
            answers = [path + random.integers(0, 250, random.integers(8, 300)).tolist() for _ in range(4)]
            path, *others = answers
            group += others
        groups.append([*group, path])
    return TrajectoryCorpus(list_groups(groups))


def test_a_group_costs_what_its_trees_cost() -> None:
    corpus, cost = generated(turns=2), tree_cost()
    dispatcher = Dispatcher("time", 2, 4096, cost, cost.per_micro_batch, trees=corpus)
    stream = open_stream(corpus, 4096, 0)
    batch = stream.next_batch(1, Dispatcher("none", 1, 4096, cost, trees=corpus))
    chunks = batch.dispatched.chunks
    for chunk, seconds in zip(chunks, dispatcher._seconds(chunks), strict=True):
        documents = corpus.group(int(chunk["document"]))[0].documents
        assert seconds == pytest.approx(cost(documents).sum())
        assert seconds > cost(documents.lengths).sum(), "answers see their prompt"
        flat = cost(np.array([len(path) for path in corpus.group(int(chunk["document"]))[0].tree_tokens])).sum()
        assert seconds < flat


@pytest.mark.parametrize("balance", ["none", "time", "pool"])
@pytest.mark.parametrize("keeps", [False, True], ids=["packed anew", "numbers of documents kept"])
def test_replicas_share_the_groups_of_a_batch(balance: str, keeps: bool) -> None:
    corpus, cost = generated(), tree_cost()
    model = PoolModel(Topology(1, 2), Topology(1, 4), ATTENTION, LAYER, layers=2)
    dispatcher = Dispatcher(
        balance, 2, 4096, cost, cost.per_micro_batch, keeps_document_numbers=keeps, pool=model, trees=corpus
    )
    alone = open_stream(corpus, 4096, 7)
    streams = [open_stream(corpus, 4096, 7, replica, 2) for replica in range(2)]
    for _ in range(3):
        expected = Counter(trajectory for row in islice(alone, 4) for trajectory in trajectories_of(row))  # type: ignore[arg-type]
        batches = [stream.next_batch(4, dispatcher) for stream in streams]
        assert len({batch.dispatched.digest for batch in batches}) == 1
        rows = [row for batch in batches[: 1 if batches[0].dispatched.pooled else 2] for row in batch.rows]
        assert sum((Counter(trajectories_of(row)) for row in rows), Counter()) == expected  # type: ignore[arg-type]
        if keeps and balance != "none":
            assert len({len(row.documents) for row in rows}) == 1, "documents keep their numbers in the batch"
            ends = [row.documents.lengths > 0 for row in rows]
            assert (np.sum(ends, 0) == 1).all()


def test_time_balances_better_than_tokens() -> None:
    """Groups of equal tokens and very different work."""
    long, short = [[*range(200)]], [[*range(8), 8 + i] for i in range(192)]
    corpus, cost = TrajectoryCorpus(list_groups([long, long, short, short])), tree_cost()
    assert corpus.lengths.tolist() == [200] * 4
    by_time = Dispatcher("time", 2, 400, lambda documents: documents.lengths * 1.0 * documents.lengths, trees=corpus)
    dispatched = open_stream(corpus, 400, 0).next_batch(2, Dispatcher("none", 1, 400, cost, trees=corpus)).dispatched
    balanced = by_time([dispatched.chunks[:2], dispatched.chunks[2:]])
    assert balanced.imbalance < 1.001
    kinds = [sorted(dispatched.chunks["document"][np.concatenate(numbers)] < 2) for numbers in balanced.micro_batches]
    assert kinds == [[False, True]] * 2


def test_a_state_resumes_and_other_contents_are_refused() -> None:
    groups = [[[1, 2, 3], [1, 2, 4]], [[5, 6]], [[7, 8, 9], [7, 1]], [[2]]]
    corpus = TrajectoryCorpus(list_groups(groups))
    digests = corpus_digests(corpus)
    stream = open_stream(corpus, 5, 1, contents=digests)
    next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [next(stream) for _ in range(4)]
    again = open_stream(TrajectoryCorpus(list_groups(groups)), 5, 1, contents=digests)
    again.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(expected, islice(again, 4), strict=True))
    moved = [[[1, 2, 3], [1, 4, 2]], *groups[1:]]  # other trees
    reweighted = [[[1] * len(t) for t in group] for group in groups]
    reweighted[2][1][1] = 3
    for other in (list_groups([[[1, 2, 3], [1, 2, 9]], *groups[1:]]), list_groups(groups, reweighted)):
        changed = TrajectoryCorpus(other)
        own = corpus_digests(changed)
        assert different_documents(digests, own, 4) is not None
        with pytest.raises(ConfigError, match=r"data\.corpus: has other contents than the saved run had"):
            open_stream(changed, 5, 1, contents=own).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.corpus: has other documents than the saved run had"):
        open_stream(TrajectoryCorpus(list_groups(moved)), 5, 1).load_state_dict(state)


def test_rows_of_other_weights_have_another_digest() -> None:
    def digest(weights: Any) -> int:
        corpus = TrajectoryCorpus(list_groups([[[1, 2, 3], [1, 4]]], [weights]))
        return (
            open_stream(corpus, 8, 0).next_batch(1, Dispatcher("none", 1, 8, tree_cost(), trees=corpus)).content_digest
        )

    assert digest([[1, 1, 1], [1, 1]]) == digest([[0, 1, 1], [0, 1]]), "the first is not used"
    assert digest([[1, 1, 1], [1, 1]]) != digest([[1, 1, 1], [1, 0]])
