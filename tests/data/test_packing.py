"""Packing: which pieces make up each row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_cp.data.stream import Packer, chunk_documents, epoch_order
from tests.data.corpora import law

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)
packers = st.builds(
    Packer,
    lengths_lists.map(lambda lengths: np.array(lengths, np.int64)),
    context=st.integers(1, 24),
    seed=st.integers(0, 3),
    lookahead=st.integers(1, 20),
)


def pieces_of_epoch(packer: Packer, epoch: int) -> list[tuple[int, int, int]]:
    pieces = chunk_documents(packer.lengths, packer.context)
    return [tuple(piece) for piece in pieces[epoch_order(len(pieces), packer.seed, epoch)].tolist()]


@law
@given(st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_of_an_epoch_is_a_permutation(documents: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(documents, seed, epoch).tolist()) == list(range(documents))


def test_the_order_depends_on_seed_and_epoch_and_never_changes_between_releases() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@law
@given(lengths_lists, st.integers(1, 24))
def test_pieces_are_the_documents_cut_at_the_context(lengths: list[int], context: int) -> None:
    expected = [
        (document, start, min(context, lengths[document] - start))
        for document in range(len(lengths))
        for start in range(0, lengths[document], context)
    ]
    assert [tuple(piece) for piece in chunk_documents(np.array(lengths), context).tolist()] == expected


@law
@given(packers)
def test_a_row_begins_with_the_oldest_piece_and_no_piece_that_waits_would_still_fit(packer: Packer) -> None:
    ages = {piece: age for age, piece in enumerate(pieces_of_epoch(packer, 0))}
    ordered = list(ages)
    left = set(ages)
    while left:
        row = [tuple(piece) for piece in packer.next_row().tolist()]
        assert row[0] == min(left, key=ages.__getitem__)
        left -= set(row)
        room = packer.context - sum(piece[2] for piece in row)
        waiting = [ordered[age] for age in packer.state_dict()["waiting"]]
        assert set(waiting) == set(sorted(left, key=ages.__getitem__)[: len(waiting)])
        assert all(piece[2] > room for piece in waiting)
        assert len(waiting) == min(packer.lookahead, len(left))


@law
@given(packers)
def test_each_further_piece_is_the_longest_that_fits_among_those_that_wait(packer: Packer) -> None:
    left = pieces_of_epoch(packer, 0)  # by age
    while left:
        row = [tuple(piece) for piece in packer.next_row().tolist()]
        left.remove(row[0])
        room = packer.context - row[0][2]
        for piece in row[1:]:
            fitting = [other for other in left[: packer.lookahead] if other[2] <= room]
            assert piece == max(fitting, key=lambda other: other[2])  # the oldest of equal ones: max takes the first
            left.remove(piece)
            room -= piece[2]
