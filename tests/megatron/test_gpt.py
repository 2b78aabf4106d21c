"""A GPT with planned attention: the same loss, gradients and steps on any number of ranks, and as plain Megatron.

One table has cases of all that a model, a batch and a plan may have. Each is compared with Megatron's own attention on one
rank, every document alone, and on the ranks of every layout with one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.algorithms.linear_layout import LINEAR_LAYOUT_MODES
from mindspeed_cp.megatron.patches import versions
from tests.megatron.gpt import Case, available, named, on_ranks, one_rank, planned, transformer_config
from tests.megatron.models import EXPERTS, FULL, LATENT, LATENT_YARN, SELECTIVE, SIX_HEADS, YARN
from tests.megatron.oracle import plain
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import LAYOUTS, Runs, assert_equal, on_layouts
from tools.megatron_arguments import entry_of

RAGGED = (37, 0, 5, 1, 23)  # divisible by nothing, empty, shorter than the ranks
MORE = (3, 26, 1, 0)
ODD = (RAGGED, (1, 2, 1))  # under sequence parallelism some ranks get rows of padding, one nothing else
LONG = (90, 3, 5, 1, 0, 14, 2)  # balanced by work, four ranks hold between 22 and 30 of these tokens
EQUAL = ((24, 0, 48), (24, 24))  # each sequence divides by 2 * cp, for cp 2, 3 and 4
ROPE = dict(rotary_percent=0.5, rotary_base=500, rope_scaling=True, seq_len_interpolation_factor=2.0)
DROPOUT = dict(attention_dropout=0.3)
WINDOWS = dict(window_size=(9, 0), window_attn_skip_freq=2)
LEARNED = dict(position_embedding_type="learned_absolute")
BALANCED: dict[str, Any] = dict(algorithm="direct", options={"layout": "balanced"})
ON: dict[str, Any] = dict(options={"latents": "on"})
MROPE: dict[str, Any] = dict(model=dict(position_embedding_type="mrope"), config=dict(mrope_section=[1, 1, 2]))
TWO: dict[str, Any] = dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.7)

#: Settings that docs/megatron_arguments.yaml calls ignored, away from the values of the tests' model.
IGNORED: dict[str, dict[str, Any]] = {
    "linear layers": dict(
        add_bias_linear=True, gated_linear_unit=True, activation_func=functional.silu, bias_activation_fusion=False,
        layernorm_epsilon=1e-3, init_method_std=0.1, ffn_hidden_size=40,
    ),
    "residuals": dict(apply_residual_connection_post_layernorm=True, add_qkv_bias=True, activation_func=functional.relu),
    "sums": dict(attention_softmax_in_fp32=False, masked_softmax_fusion=True),
    "experts": {
        **EXPERTS, "moe_router_topk_scaling_factor": 1.5, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid",
    },
}  # fmt: skip

ALL_CASES = {
    "packed": Case((RAGGED,)),
    "two micro-batches": Case((RAGGED, MORE)),
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
    "latent, fully recomputed": Case((RAGGED,), config={**LATENT, **FULL}),
    "YaRN": Case((RAGGED,), model=dict(position_embedding_type="yarn"), config=YARN),
    "dropout": Case((RAGGED, MORE), config=DROPOUT),
    "dropout, selective recompute": Case((RAGGED, MORE), config={**DROPOUT, **SELECTIVE}),
    "dropout, full recompute": Case((RAGGED, MORE), config={**DROPOUT, **FULL}),
    "float32 optimizer": Case((RAGGED, MORE), optimizer="float32"),
    "distributed optimizer": Case((RAGGED, MORE), optimizer="distributed", steps=3),
    **{name: Case((RAGGED,), config=config) for name, config in IGNORED.items()},
    **{f"algorithm {name}": Case((RAGGED, MORE), algorithm=name) for name in ALGORITHMS if name != "ring"},
    "balanced, three ahead": Case((RAGGED, MORE), algorithm="direct", options={"layout": "balanced", "prefetch": 3}),
    "ALiBi, window, dropout, ulysses": Case(
        (RAGGED, MORE), alibi=True, algorithm="ulysses", config=dict(**SIX_HEADS, window_size=(11, 0), **DROPOUT)
    ),
    "latent, ulysses": Case((RAGGED, MORE), algorithm="ulysses", config=LATENT),
}
#: Latents travel, whatever the cost model says.
ALL_CASES |= {
    f"latents: {name}": replace(case, config={**LATENT, **case.config}, options=ON["options"])
    for name, case in {
        "packed": Case((RAGGED, MORE)),
        "queries not compressed, latents normed": Case((RAGGED,), config={"q_lora_rank": None, "qk_layernorm": True}),
        "YaRN": Case((RAGGED,), config=LATENT_YARN),
        "core attention recomputed": Case((RAGGED,), config=SELECTIVE),
        "fully recomputed": Case((RAGGED,), config=FULL),
        "hierarchical": Case((RAGGED, MORE), algorithm="hierarchical"),
        "dropout, fully recomputed": Case((RAGGED,), config={**FULL, **DROPOUT}),
        "distributed optimizer": Case((RAGGED, MORE), optimizer="distributed", steps=2),
    }.items()
}
#: Linear layers have a layout of their own: q, k and v move, or hidden states.
ALL_CASES |= {
    f"{mode} moves: {name}": replace(case, remap=mode)
    for mode in LINEAR_LAYOUT_MODES
    for name, case in {
        "grouped queries": Case((LONG, MORE), **BALANCED),
        "ring": Case((LONG, MORE), algorithm="ring", options={"layout": "balanced"}),
        "ranks without tokens": Case(((1, 1), (1, 2, 1), LONG), **BALANCED),
        "latent": Case((LONG,), **BALANCED, config=LATENT),
        "window in every other layer": Case((LONG,), algorithm="direct", config=WINDOWS),
    }.items()
} | {
    "qkv moves: split heads": Case((LONG,), algorithm="hybrid", options={"layout": "balanced"}, remap="qkv"),
    "hidden moves: full recompute": Case((LONG, MORE), **BALANCED, remap="hidden", config=FULL),
    "hidden moves: selective recompute, dropout": Case(
        (LONG,), **BALANCED, remap="hidden", config={**SELECTIVE, **DROPOUT}
    ),
    "hidden moves: learned positions": Case((LONG,), **BALANCED, remap="hidden", model=LEARNED),
    "hidden moves: optimizer": Case((LONG, MORE), **BALANCED, remap="hidden", optimizer="distributed", steps=2),
}
#: Plain PackedSeqParams of a data loader, or planned_batch_from's batches (tests.megatron.packed).
ALL_CASES |= {
    f"loader: {name}": case
    for name, case in {
        "documents": Case(EQUAL, packed="document"),
        "documents, ulysses, full recompute": Case(EQUAL, packed="document", algorithm="ulysses", config=FULL),
        "documents, hierarchical": Case(EQUAL, packed="document", algorithm="hierarchical"),
        "documents, selective recompute": Case(EQUAL, packed="document", config=SELECTIVE),
        "documents, learned positions": Case(EQUAL, packed="document", model=LEARNED),
        "padded": Case((RAGGED, MORE), packed="padded"),
        "padded, direct": Case((RAGGED, MORE), packed="padded", **BALANCED),
        "padded, latent, full recompute": Case((RAGGED, MORE), packed="padded", config={**LATENT, **FULL}),
        "padded, windows": Case((RAGGED, MORE), packed="padded", algorithm="direct", config=WINDOWS),
        "padded, optimizer": Case((RAGGED, MORE), packed="padded", optimizer="distributed", steps=2),
        "whole": Case((RAGGED, MORE), packed="whole"),
        "whole, ulysses, windows": Case((RAGGED, MORE), packed="whole", algorithm="ulysses", config=WINDOWS),
        "whole, hierarchical, dropout": Case(
            ((37, 5, 1, 64), (3, 50, 1, 1, 7)), packed="whole", algorithm="hierarchical", config=DROPOUT
        ),
    }.items()
}
ALL_CASES |= {
    f"mrope: {name}": case
    for name, case in {
        "zig-zag": Case((RAGGED, MORE), **MROPE),
        "balanced, linear layout": Case((RAGGED, MORE), **MROPE, remap="hidden", **BALANCED),
        "hierarchical": Case((RAGGED,), **MROPE, algorithm="hierarchical"),
        "ranks without tokens": Case(((1, 1), (1, 2, 1)), **MROPE),
        "cut by a data loader": Case(EQUAL, packed="document", **MROPE),
        "padded by a data loader": Case((RAGGED,), packed="padded", **MROPE),
        "planned from cu_seqlens": Case((RAGGED,), packed="whole", **MROPE),
        "full recompute": Case((RAGGED,), model=MROPE["model"], config={**MROPE["config"], **FULL}),
        "later tokens": Case((RAGGED,), model=MROPE["model"], config={**MROPE["config"], **TWO}),
    }.items()
}
#: Multi-token prediction.
LATER_CASES = {
    f"later tokens: {name}": replace(case, config={**TWO, **case.config})
    for name, case in {
        "one layer": Case((RAGGED, MORE), config=dict(mtp_num_layers=1)),
        "two layers, balanced": Case((RAGGED, MORE), **BALANCED),
        "three layers, hierarchical": Case((RAGGED,), config=dict(mtp_num_layers=3), algorithm="hierarchical"),
        "linear layout": Case((RAGGED, MORE), remap="hidden", **BALANCED),
        "uneven mask": Case((RAGGED, MORE), masked=0.6),
        "nothing counts": Case((RAGGED,), masked=1.0),
        "ranks without tokens": Case(((1, 1), (1, 2, 1))),
        "learned positions": Case((RAGGED,), model=LEARNED),
        "cut by a data loader": Case(EQUAL, packed="document"),
        "planned from cu_seqlens": Case((RAGGED,), packed="whole"),
        "latent": Case((RAGGED,), config=LATENT),
        "dropout, selective recompute": Case((RAGGED,), config={**SELECTIVE, **DROPOUT}),
        "full recompute": Case((RAGGED,), config=FULL),
        "a layer for all depths": Case((RAGGED,), config={"mtp_use_repeated_layer": True}),
        "detached heads": Case((RAGGED,), config={"mtp_detach_heads": True}),
        "window in every other layer": Case((RAGGED, MORE), config=WINDOWS),
    }.items()
}
ALL_CASES |= LATER_CASES
CASES = available(ALL_CASES)
#: Experts need sequence parallelism there (tests/megatron/test_experts.py); halves of gated layers would be put together
#: in another order.
NOT_ON_TENSOR_RANKS = ("experts", "linear layers")
ON_BOTH = ("packed", "learned sinks", "latents: packed", "later tokens: one layer")


def is_of_the_model(name: str, case: Case) -> bool:
    """True if a case is about what the model computes, not about who holds which tokens."""
    if case.algorithm != "ring" or case.remap or case.packed or name in NOT_ON_TENSOR_RANKS:
        return False
    return bool(case.config or case.model or case.alibi or case.optimizer)


#: By default a case runs where it may fail: of the model, where tensor-parallel ranks share it, too; of tokens, on an odd
#: number of ranks. --thorough has every case on every layout.
DEFAULT = {
    "cp3": [name for name, case in CASES.items() if name in ON_BOTH or not is_of_the_model(name, case)],
    "tp2 x cp2": [name for name, case in CASES.items() if name in ON_BOTH or is_of_the_model(name, case)],
    "cp4": [],
}


@pytest.fixture(scope="module")
def runs(ranks: MegatronRanks) -> Runs:
    return Runs(ranks, CASES)


@pytest.fixture(scope="module")
def oracle(ranks: MegatronRanks) -> Runs:
    """Every case by Megatron's own attention and rotary positions, each document alone."""
    return Runs(ranks, {name: case for name, case in CASES.items() if has_oracle(case)}, plain)


def has_oracle(case: Case) -> bool:
    """False for what only planned attention has, windows in Megatron 0.12 too, and for experts and multi-token prediction,
    whose losses are means over the tokens of a micro-batch."""
    if versions.IS_0_12 and "window_size" in case.config:
        return False
    names = ("attention_dropout", "num_moe_experts", "mtp_num_layers")
    return not (case.optimizer or any(case.config.get(name) for name in names))


@pytest.mark.parametrize("name", named({name: case for name, case in ALL_CASES.items() if has_oracle(case)}))
def test_one_rank_equals_megatrons_own_attention(name: str, runs: Runs, oracle: Runs) -> None:
    assert_equal(runs.alone(name), oracle.alone(name))


@pytest.mark.parametrize(("layout", "name", "among"), on_layouts(ALL_CASES, DEFAULT, NOT_ON_TENSOR_RANKS))
def test_any_layout_equals_one_rank(layout: str, name: str, among: tuple[str, ...], runs: Runs) -> None:
    runs.check(name, LAYOUTS[layout], among)


@pytest.mark.parametrize("name", named({name: ALL_CASES[name] for name in IGNORED}))
def test_settings_that_are_called_ignored_change_the_model(name: str) -> None:
    default, other = transformer_config(), transformer_config(**IGNORED[name])
    for setting in IGNORED[name].keys() - EXPERTS.keys():
        entry = entry_of(setting)
        assert entry is not None and entry.verdict == "ignored", setting
    assert len([setting for setting in IGNORED[name] if getattr(default, setting) != getattr(other, setting)]) >= 2


#: Cases without sequence parallelism, in which ranks get rows of padding.
SHARED = available(
    {
        "packed": Case(ODD),
        "latent": Case(ODD, config={**LATENT, "qk_layernorm": True}),
        "latents": Case(ODD, config={**LATENT, "qk_layernorm": True}, **ON),
        "dropout, full recompute": Case(ODD, config={**DROPOUT, **FULL}),
        "qkv moves": Case((LONG, (1, 2, 1)), **BALANCED, remap="qkv"),
        **{
            f"hidden moves, {name}": Case((LONG, (1, 2, 1)), **BALANCED, remap="hidden", config=config)
            for name, config in {"dense": {}, "latent": LATENT, "dropout, full": {**DROPOUT, **FULL}}.items()
        },
        **{f"loader, {name}": ALL_CASES[f"loader: {name}"] for name in ("padded", "whole")},
        "later tokens": Case(ODD, config=TWO),
    }
)


@pytest.fixture(scope="module")
def shared(ranks: MegatronRanks) -> Runs:
    cases = {name: replace(case, config={**case.config, "sequence_parallel": True}) for name, case in SHARED.items()}
    return Runs(ranks, cases, reference=Runs(ranks, SHARED))


@pytest.mark.parametrize(
    ("layout", "name", "among"), on_layouts(SHARED, {"tp2 x cp2": ("packed", "latents", "hidden moves, latent")})
)
def test_sequence_parallelism_pads_each_rank_not_each_document(
    layout: str, name: str, among: tuple[str, ...], shared: Runs
) -> None:
    shared.check(name, LAYOUTS[layout], among)


def test_data_parallel_replicas_with_unequal_counts_share_one_mean(runs: Runs) -> None:
    names = ("two micro-batches", "uneven mask", "distributed optimizer")
    for name in names:
        runs.check(name, (1, 2, 1, 4), names)


def test_bf16_differs_by_its_rounding_alone(ranks: MegatronRanks, runs: Runs) -> None:
    bf16 = Case((RAGGED,), config=dict(bf16=True, params_dtype=torch.bfloat16))
    expected = runs.alone("packed")
    for outcomes in ranks.run(2, on_ranks, 1, 2, [bf16]):
        assert outcomes[0].loss != expected.loss
        assert outcomes[0].loss == pytest.approx(expected.loss, rel=2e-3)
        for name, tensor in expected.tensors.items():
            assert np.abs(outcomes[0].tensors[name] - tensor).max() <= 0.05 * np.abs(tensor).max(), name


def test_nothing_that_counts_gives_zeros(runs: Runs) -> None:
    outcome = runs.alone("nothing counts")
    assert (outcome.loss, outcome.tokens) == (0.0, 0)
    assert all(not tensor.any() for tensor in outcome.tensors.values())


def test_the_cases_can_tell_positions_and_borders_apart(runs: Runs) -> None:
    """The comparisons above would be worth nothing if the model hardly looked at positions or other tokens."""
    packed, both = runs.alone("packed").loss, runs.alone("two micro-batches").loss
    for name in {"every option of RoPE", "layers without RoPE", "YaRN"} & CASES.keys():
        assert abs(runs.alone(name).loss - packed) > 1e-3
    for name in ("dropout", "sliding window"):
        assert abs(runs.alone(name).loss - both) > 1e-3
    for name in {"window in every other layer"} & CASES.keys():
        assert abs(runs.alone("sliding window").loss - runs.alone(name).loss) > 1e-3
    alibi, yarn, documents = runs.alone("ALiBi"), runs.alone("latent, YaRN"), runs.alone("loader: documents")
    for name in ("zig-zag", "hierarchical"):  # height and width are seen
        assert abs(runs.alone(f"mrope: {name}").loss - (both if name == "zig-zag" else packed)) > 1e-3
    with one_rank():
        merged = planned(Case(((sum(RAGGED),),)))
        uncut = planned(Case(tuple((sum(lengths),) for lengths in EQUAL)))
        unrotated = planned(Case((RAGGED, MORE), model=dict(position_embedding_type="none"), config=SIX_HEADS))
        unscaled = planned(Case((RAGGED, MORE), config=LATENT))
    assert abs(merged.loss - packed) > 1e-3
    assert abs(uncut.loss - documents.loss) > 1e-3
    assert abs(alibi.loss - unrotated.loss) > 1e-3
    assert abs(yarn.loss - unscaled.loss) > 1e-4
