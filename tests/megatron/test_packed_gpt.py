"""A GPT that gets Megatron's plain PackedSeqParams: the same loss and gradients as with every document alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.megatron.gpt import Case, Outcome, on_ranks, one_rank, planned
from tests.megatron.models import FULL, LATENT, SELECTIVE
from tests.megatron.oracle import plain
from tests.megatron.ranks import MegatronRanks
from tests.megatron.test_gpt import MORE, RAGGED, assert_equal, has_oracle
from tests.processes import RankError

EQUAL = ((48, 24, 0, 72), (24, 24, 48))  # each sequence divides by 2 * cp, for cp 2, 3 and 4
ANY = ((37, 0, 5, 1, 64, 2, 35), (3, 50, 1, 1, 0, 41))  # the row does
FULL_DOCUMENTS = ((37, 5, 1, 64), (3, 50, 1, 1, 7))  # no empty one: dropout depends on a document's number

CASES = {
    "documents": Case(EQUAL, packed="document"),
    "documents, ulysses": Case(EQUAL, packed="document", algorithm="ulysses"),
    "padded": Case((RAGGED, MORE), packed="padded"),
    "padded, direct": Case((RAGGED, MORE), packed="padded", algorithm="direct", options={"layout": "balanced"}),
    "row": Case(ANY, packed="row"),
    "row, hierarchical": Case(ANY, packed="row", algorithm="hierarchical"),
    "row, ulysses, full recompute": Case(ANY, packed="row", algorithm="ulysses", config=FULL),
    "padded, latent": Case((RAGGED, MORE), packed="padded", config=LATENT),
    "row, latent, full recompute": Case(ANY, packed="row", config={**LATENT, **FULL}),
    "documents, selective recompute": Case(EQUAL, packed="document", config=SELECTIVE),
    "padded, window in every other layer": Case(
        (RAGGED, MORE), packed="padded", algorithm="direct", config=dict(window_size=(9, 0), window_attn_skip_freq=2)
    ),
    "documents, learned positions": Case(
        EQUAL, packed="document", model=dict(position_embedding_type="learned_absolute")
    ),
    "whole": Case((RAGGED, MORE), packed="whole"),
    "whole, ulysses, window in every other layer": Case(
        (RAGGED, MORE), packed="whole", algorithm="ulysses", config=dict(window_size=(9, 0), window_attn_skip_freq=2)
    ),
    "whole, hierarchical, dropout": Case(
        FULL_DOCUMENTS, packed="whole", algorithm="hierarchical", config=dict(attention_dropout=0.3)
    ),
    "padded, optimizer": Case((RAGGED, MORE), packed="padded", optimizer="distributed", steps=2),
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Every case on one rank, as it is on several."""
    with one_rank():
        return {name: planned(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def parallel(ranks: MegatronRanks) -> Callable[[int], list[dict[str, Outcome]]]:
    """Every case on cp ranks, run once for all tests: the outcomes of every rank."""
    done: dict[int, list[dict[str, Outcome]] | RankError] = {}

    def run(cp: int) -> list[dict[str, Outcome]]:
        if cp not in done:
            try:
                outcomes = ranks.run(cp, on_ranks, 1, cp, list(CASES.values()))
                done[cp] = [dict(zip(CASES, each, strict=True)) for each in outcomes]
            except RankError as error:
                done[cp] = error
        result = done[cp]
        if isinstance(result, RankError):
            raise result
        return result

    return run


@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_documents_alone(name: str, reference: dict[str, Outcome]) -> None:
    with one_rank():
        case = replace(CASES[name], packed=None, algorithm="ring", options={})
        assert_equal(reference[name], plain(case) if has_oracle(case) else planned(case))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cp", [2, pytest.param(3, marks=pytest.mark.thorough), 4])
def test_any_number_of_ranks_equals_one(
    cp: int, name: str, parallel: Callable[[int], list[dict[str, Outcome]]], reference: dict[str, Outcome]
) -> None:
    for outcomes in parallel(cp):
        assert_equal(outcomes[name], reference[name])


@pytest.mark.thorough
def test_sequence_parallel_ranks_share_the_rows(ranks: MegatronRanks, reference: dict[str, Outcome]) -> None:
    names = ["documents", "padded", "row", "whole"]
    cases = [replace(CASES[name], config=dict(sequence_parallel=True)) for name in names]
    for outcomes in ranks.run(4, on_ranks, 2, 2, cases):
        for name, outcome in zip(names, outcomes, strict=True):
            assert_equal(outcome, reference[name])


def test_the_cases_can_tell_ways_to_cut_apart(reference: dict[str, Outcome]) -> None:
    """The comparisons would be worth nothing if the borders of documents hardly counted."""
    with one_rank():
        merged = planned(Case(tuple((sum(lengths),) for lengths in EQUAL)))
    assert abs(merged.loss - reference["documents"].loss) > 1e-3
