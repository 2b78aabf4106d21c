"""A GPT that gets Megatron's plain PackedSeqParams, or planned_batch_from's batches, on ranks.

It has the same loss and gradients as with every document alone, and tells what is out of step.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import install, install_model, megatron_imports
from tests.megatron.gpt import (
    VOCABULARY,
    Case,
    Suite,
    available,
    build,
    layer_spec,
    megatron,
    named,
    one_rank,
    planned,
    transformer_config,
)
from tests.megatron.models import FULL, LATENT, SELECTIVE
from tests.megatron.oracle import plain
from tests.megatron.packed import cut_batch, zigzag_rows
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import LAYOUTS, Runs, assert_equal, equal_to_one_rank
from tests.megatron.test_gpt import MORE, RAGGED, has_oracle

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

EQUAL = ((48, 24, 0, 72), (24, 24, 48))  # each sequence divides by 2 * cp, for cp 2, 3 and 4
ANY = ((37, 0, 5, 1, 64, 2, 35), (3, 50, 1, 1, 0, 41))  # the row does
FULL_DOCUMENTS = ((37, 5, 1, 64), (3, 50, 1, 1, 7))  # no empty one: dropout depends on a document's number

ALL_CASES = {
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
CASES = available(ALL_CASES)


@pytest.fixture(scope="module")
def runs(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, CASES)


@pytest.mark.parametrize("name", named(ALL_CASES))
def test_one_rank_equals_documents_alone(name: str, runs: Runs) -> None:
    expected = runs.alone(name)
    with one_rank():
        case = replace(CASES[name], packed=None, algorithm="ring", options={})
        assert_equal(expected, plain(case) if has_oracle(case) else planned(case))


@pytest.mark.parametrize("name", named(ALL_CASES))
@pytest.mark.parametrize("layout", [pytest.param("cp3", marks=pytest.mark.thorough), "cp4"])
def test_any_number_of_ranks_equals_one(layout: str, name: str, runs: Runs) -> None:
    runs.check(name, LAYOUTS[layout])


@pytest.mark.thorough
def test_sequence_parallel_ranks_share_the_rows(ranks: MegatronRanks) -> None:
    names = ["documents", "padded", "row", "whole"]
    cases = {name: (replace(CASES[name], config=dict(sequence_parallel=True)), CASES[name]) for name in names}
    equal_to_one_rank(ranks, (2, 2), cases)


def test_the_cases_can_tell_ways_to_cut_apart(runs: Runs) -> None:
    """The comparisons would be worth nothing if the borders of documents hardly counted."""
    documents = runs.alone("documents")
    with one_rank():
        merged = planned(Case(tuple((sum(lengths),) for lengths in EQUAL)))
    assert abs(merged.loss - documents.loss) > 1e-3


def interleaved(rank: int, group: None, cp: int, sizes: list[list[int]], recompute: bool) -> list[bool]:
    """Two micro-batches in flight at once, then each alone: are gradients the same, bit for bit?"""
    with megatron(cp=cp):
        config = transformer_config(cp=cp, **(FULL if recompute else {}))
        model = install_model(build(config, install(layer_spec(config), Suite(context_parallel_size=cp))))
        batches = []
        for number, lengths in enumerate(sizes):
            tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(number))
            batches.append(cut_batch({"tokens": tokens, "labels": tokens}, lengths, "document", cp, rank))

        def loss(number: int) -> torch.Tensor:
            batch, params = batches[number]
            out: torch.Tensor = model(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params
            )
            return out.sum()

        def gradients(*numbers: int) -> list[torch.Tensor]:
            for number in numbers:
                model.zero_grad()
                (in_flight[number] if number in in_flight else loss(number)).backward()
                results[number] = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
            return [grad for number in sorted(results) for grad in results[number]]

        results: dict[int, list[torch.Tensor]] = {}
        in_flight = {0: loss(0), 1: loss(1)}
        together = gradients(0, 1)
        in_flight.clear()
        apart = gradients(1, 0)
        return [torch.equal(a, b) and bool(a.any()) for a, b in zip(together, apart, strict=True)]


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_in_flight_keep_their_documents(ranks: MegatronRanks, recompute: bool) -> None:
    for same in ranks.run(2, interleaved, 2, [[16, 8, 4], [4, 12, 4, 8]], recompute):
        assert same and all(same)


def cut_otherwise(rank: int, group: None) -> str:
    with megatron(cp=2):
        config = transformer_config(cp=2)
        model = install_model(build(config, install(layer_spec(config), Suite(context_parallel_size=2))))
        batch, params = cut_batch({"tokens": torch.zeros(32, dtype=torch.int64)}, [8, 24], "row", 2, rank)
        with pytest.raises(ConfigError) as error:
            model(batch["tokens"], batch["position_ids"], None, labels=batch["tokens"], packed_seq_params=params)
        return str(error.value)


def test_a_model_looks_at_its_positions(ranks: MegatronRanks) -> None:
    for text in ranks.run(2, cut_otherwise):
        assert text.startswith("packed_cut is 'document', but position_ids are those of a batch cut by row")


def megatrons_rows(rank: int, group: None) -> list[int]:
    """Rows that Megatron itself gives a rank, without sequences: those of a document need Transformer Engine."""
    with megatron(cp=2):
        others = {"cp_group": parallel_state.get_context_parallel_group(), "is_hybrid_cp": False}
        taken = inspect.signature(get_batch_on_this_cp_rank).parameters  # neither in 0.12
        others = {name: value for name, value in others.items() if name in taken}
        batch = get_batch_on_this_cp_rank({"tokens": torch.arange(32)[None]}, **others)
        rows: list[int] = batch["tokens"][0].tolist()
        return rows


def test_the_rows_of_these_tests_are_megatrons(ranks: MegatronRanks) -> None:
    for rank, rows in enumerate(ranks.run(2, megatrons_rows)):
        assert rows == zigzag_rows(0, 32, 2, rank)
