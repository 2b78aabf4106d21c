"""A GPT with planned attention: the same loss, gradients and steps on any number of ranks, and as plain Megatron."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mindspeed_cp.megatron.patches.imports import parse_version
from tests.megatron.gpt import VERSION, Case, Outcome, available, named, on_ranks, one_rank, planned
from tests.megatron.models import FULL, LATENT, LATENT_YARN, SELECTIVE, SIX_HEADS, YARN
from tests.megatron.oracle import plain
from tests.megatron.ranks import MegatronRanks
from tests.processes import RankError

RAGGED = (37, 0, 5, 1, 64, 2, 23, 11)  # divisible by nothing, empty, shorter than the ranks
MORE = (3, 50, 1, 1, 0, 7)
ROPE = dict(rotary_percent=0.5, rotary_base=500, rope_scaling=True, seq_len_interpolation_factor=2.0)

DROPOUT = dict(attention_dropout=0.3)

ALL_CASES = {
    "packed": Case((RAGGED,)),
    "two micro-batches": Case((RAGGED, MORE)),
    "sbhd": Case(((29, 29),), qkv_format="sbhd"),
    "sbhd without parameters": Case(((24, 24),), qkv_format="sbhd", carried=False),
    "selective recompute": Case((RAGGED,), config=SELECTIVE),
    "full recompute": Case((RAGGED,), config=FULL),
    "uneven mask": Case((RAGGED, MORE), masked=0.6),
    "nothing counts": Case((RAGGED,), masked=1.0),
    "ranks without tokens": Case(((1, 1), (1, 2, 1), RAGGED)),
    "every option of RoPE": Case((RAGGED,), model=ROPE, config=dict(rotary_interleaved=True)),
    "layers without RoPE": Case((RAGGED,), config=dict(no_rope_freq=[0, 1])),
    "learned positions": Case((RAGGED,), model=dict(position_embedding_type="learned_absolute")),
    "sliding window": Case((RAGGED, MORE), config=dict(window_size=(9, 0))),
    "window in every other layer": Case((RAGGED, MORE), config=dict(window_size=(9, 0), window_attn_skip_freq=2)),
    "learned sinks": Case((RAGGED, MORE), config=dict(softmax_type="learnable")),
    "sinks fixed at 0, windows": Case((RAGGED, MORE), config=dict(softmax_type="off-by-one", window_size=(9, 0))),
    "learned sinks, fully recomputed, dropout": Case(
        (RAGGED,), config=dict(softmax_type="learnable", **FULL, **DROPOUT)
    ),
    "ALiBi": Case((RAGGED, MORE), alibi=True, config=SIX_HEADS),
    "latent": Case((RAGGED, MORE), config={**LATENT, "q_lora_rank": None}),
    "latent, YaRN": Case((RAGGED, MORE), config={**LATENT, **LATENT_YARN}),
    "latent, sbhd": Case(((29, 29),), qkv_format="sbhd", config=LATENT),
    "latent, one sequence, fully recomputed": Case(((29,),), qkv_format="sbhd", config={**LATENT, **FULL}),
    "YaRN": Case((RAGGED,), model=dict(position_embedding_type="yarn"), config=YARN),
    "dropout": Case((RAGGED, MORE), config=DROPOUT),
    "dropout, selective recompute": Case((RAGGED, MORE), config={**DROPOUT, **SELECTIVE}),
    "dropout, full recompute": Case((RAGGED, MORE), config={**DROPOUT, **FULL}),
    "float32 optimizer": Case((RAGGED, MORE), optimizer="float32"),
    "distributed optimizer": Case((RAGGED, MORE), optimizer="distributed", steps=3),
}
CASES = available(ALL_CASES)
ODD = (RAGGED, MORE, (1, 2, 1))  # under sequence parallelism some ranks get rows of padding, one nothing else
SEQUENCE_PARALLEL = {
    "packed": {},
    "latent": {**LATENT, "qk_layernorm": True},
    "dropout, full recompute": {**DROPOUT, **FULL},
}
LAYOUTS = {"cp2": (1, 2), "cp3": (1, 3), "tp2 x cp2": (2, 2)}


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Every case on one rank, with planned attention."""
    with one_rank():
        return {name: planned(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def oracle() -> dict[str, Outcome]:
    """Every case by Megatron's own attention and rotary positions, each document alone."""
    with one_rank():
        return {name: plain(case) for name, case in CASES.items() if has_oracle(case)}


def has_oracle(case: Case) -> bool:
    """False for what only planned attention has; Megatron 0.12 has no windows of its own."""
    windowed = "window_size" in case.config and parse_version(VERSION) < (0, 16)
    return case.optimizer is None and not case.config.get("attention_dropout") and not windowed


@pytest.fixture(scope="module")
def parallel(ranks: MegatronRanks) -> Callable[[str], list[dict[str, Outcome]]]:
    """Every case on the ranks of a layout, run once for all tests: the outcomes of every rank."""
    done: dict[str, list[dict[str, Outcome]]] = {}
    failed: dict[str, RankError] = {}

    def run(layout: str) -> list[dict[str, Outcome]]:
        if layout in failed:
            raise failed[layout]
        if layout not in done:
            tp, cp = LAYOUTS[layout]
            try:
                outcomes = ranks.run(tp * cp, on_ranks, tp, cp, list(CASES.values()))
            except RankError as error:
                failed[layout] = error
                raise
            done[layout] = [dict(zip(CASES, each, strict=True)) for each in outcomes]
        return done[layout]

    return run


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    """Same count, loss, gradients or weights, each tensor to 1e-5 of its largest element."""
    assert actual.tokens == expected.tokens
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_allclose(
            actual.tensors[name], tensor, rtol=0, atol=1e-5 * max(1e-8, float(np.abs(tensor).max())), err_msg=name
        )


@pytest.mark.parametrize("name", named({name: case for name, case in ALL_CASES.items() if has_oracle(case)}))
def test_one_rank_equals_megatrons_own_attention(
    name: str, reference: dict[str, Outcome], oracle: dict[str, Outcome]
) -> None:
    assert_equal(reference[name], oracle[name])


@pytest.mark.parametrize("name", named(ALL_CASES))
@pytest.mark.parametrize("layout", [pytest.param("cp2", marks=pytest.mark.thorough), "cp3", "tp2 x cp2"])
def test_any_layout_equals_one_rank(
    layout: str,
    name: str,
    parallel: Callable[[str], list[dict[str, Outcome]]],
    reference: dict[str, Outcome],
) -> None:
    for outcomes in parallel(layout):
        assert_equal(outcomes[name], reference[name])


def test_sequence_parallelism_pads_each_rank_not_each_document(ranks: MegatronRanks) -> None:
    cases = [Case(ODD, config={**config, "sequence_parallel": True}) for config in SEQUENCE_PARALLEL.values()]
    with one_rank():
        expected = [planned(Case(ODD, config=config)) for config in SEQUENCE_PARALLEL.values()]
    for outcomes in ranks.run(4, on_ranks, 2, 2, cases):
        for outcome, expected_outcome in zip(outcomes, expected, strict=True):
            assert_equal(outcome, expected_outcome)


def test_data_parallel_replicas_with_unequal_counts_share_one_mean(
    ranks: MegatronRanks, reference: dict[str, Outcome]
) -> None:
    names = ["two micro-batches", "uneven mask", "distributed optimizer"]
    for outcomes in ranks.run(4, on_ranks, 1, 2, [CASES[name] for name in names]):
        for name, outcome in zip(names, outcomes, strict=True):
            assert_equal(outcome, reference[name])


def test_bf16_differs_by_its_rounding_alone(ranks: MegatronRanks, reference: dict[str, Outcome]) -> None:
    bf16 = Case((RAGGED,), config=dict(bf16=True, params_dtype=torch.bfloat16))
    for outcomes in ranks.run(2, on_ranks, 1, 2, [bf16]):
        assert outcomes[0].loss != reference["packed"].loss
        assert outcomes[0].loss == pytest.approx(reference["packed"].loss, rel=2e-3)
        for name, tensor in reference["packed"].tensors.items():
            assert np.abs(outcomes[0].tensors[name] - tensor).max() <= 0.05 * np.abs(tensor).max(), name


def test_nothing_that_counts_gives_zeros(reference: dict[str, Outcome]) -> None:
    outcome = reference["nothing counts"]
    assert (outcome.loss, outcome.tokens) == (0.0, 0)
    assert all(not tensor.any() for tensor in outcome.tensors.values())


def test_the_cases_can_tell_positions_and_borders_apart(reference: dict[str, Outcome]) -> None:
    """The comparisons above would be worth nothing if the model hardly looked at positions or other tokens."""
    packed, both = reference["packed"].loss, reference["two micro-batches"].loss
    assert abs(reference["every option of RoPE"].loss - packed) > 1e-3
    for name in {"layers without RoPE", "YaRN"} & CASES.keys():
        assert abs(reference[name].loss - packed) > 1e-3
    assert abs(reference["dropout"].loss - both) > 1e-3
    assert abs(reference["sliding window"].loss - both) > 1e-3
    for name in {"window in every other layer"} & CASES.keys():
        assert abs(reference["sliding window"].loss - reference[name].loss) > 1e-3
    with one_rank():
        merged = planned(Case(((sum(RAGGED),),)))
        unrotated = planned(Case((RAGGED, MORE), model=dict(position_embedding_type="none"), config=SIX_HEADS))
        unscaled = planned(Case((RAGGED, MORE), config=LATENT))
    assert abs(merged.loss - packed) > 1e-3
    assert abs(reference["ALiBi"].loss - unrotated.loss) > 1e-3
    assert abs(reference["latent, YaRN"].loss - unscaled.loss) > 1e-4
