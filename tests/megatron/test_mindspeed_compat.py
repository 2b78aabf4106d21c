"""Planned attention beside MindSpeed's patches (a double of them, on the CPU): exact, and what contradicts it is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.convert.flag_table import RULES as FLAG_RULES
from mindspeed_cp.convert.flag_table import Outcome as FlagOutcome
from mindspeed_cp.megatron import install, install_model, megatron_imports
from mindspeed_cp.megatron.adaptors.settings import check_arguments
from mindspeed_cp.megatron.mindspeed_compat import LINES, MINDSPEED_RULES, check_mindspeed, replacements
from tests.limits import HANG
from tests.megatron.gpt import (
    Case,
    Outcome,
    Suite,
    available,
    build,
    layer_spec,
    on_ranks,
    one_rank,
    planned,
    transformer_config,
)
from tests.megatron.mindspeed_double import FOLDER, beside_mindspeed
from tests.megatron.models import EXPERTS, FULL, LATENT
from tests.megatron.ranks import MegatronRanks
from tests.megatron.runs import assert_equal
from tests.megatron.test_arguments import arguments
from tests.megatron.test_gpt import MORE, RAGGED

with megatron_imports():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.attention import Attention, SelfAttention
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

SWIGLU: dict[str, Any] = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
UP_PROJECTION: dict[str, Any] = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
CASES = available(
    {
        "rotary": Case((RAGGED, MORE), config=SWIGLU),
        "interleaved": Case((RAGGED,), model=dict(rotary_percent=0.5), config={**FULL, "rotary_interleaved": True}),
        "optimizer": Case((RAGGED,), optimizer="float32"),
        "latent": Case((RAGGED,), config=LATENT),
        "latent, recomputed": Case((RAGGED,), config={**LATENT, **UP_PROJECTION}),
    }
)
FUSED = ("--use-fused-rotary-pos-emb", "--use-fused-rmsnorm", "--use-fused-swiglu")
BASE = ("--context-parallel-size", "2", "--multi-latent-attention")


def planned_beside(
    rank: int, group: Any, flags: tuple[str, ...], cases: list[Case], tp: int = 1
) -> list[tuple[Outcome, Counter[str]]]:
    """On a rank: the outcome of each case beside MindSpeed, and its calls."""
    results = []
    with beside_mindspeed(*flags) as calls:
        for case in cases:
            calls.clear()
            if "gated_linear_unit" in case.config:  # Megatron would compile its own fused one
                case = replace(case, config={**case.config, "bias_activation_fusion": True})
            (outcome,) = on_ranks(rank, group, tp, 2, [case])
            results.append((outcome, Counter(calls)))
    return results


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    """Every case on one rank, without MindSpeed; multi-latent attention as MindSpeed's layers scale it."""
    scale = {"mscale_all_dim": MLATransformerConfig.mscale}
    with one_rank():
        return {
            name: planned(replace(case, config={**case.config, **(scale if "q_lora_rank" in case.config else {})}))
            for name, case in CASES.items()
        }


@pytest.mark.parametrize("fused", [FUSED, ()], ids=["fused", "not fused"])
def test_attention_is_exact_and_mindspeeds_operators_stay(
    fused: tuple[str, ...], ranks: MegatronRanks, reference: dict[str, Outcome]
) -> None:
    cases = {name: case for name, case in CASES.items() if fused or name in ("rotary", "latent")}
    for results in ranks.run(2, planned_beside, (*BASE, *fused), list(cases.values())):
        for (name, case), (outcome, calls) in zip(cases.items(), results, strict=True):
            assert_equal(outcome, reference[name])
            assert calls["norm"] and calls["groups"] == 1 and calls["Attention.__init__"] == 2
            assert bool(calls["swiglu"]) == ("gated_linear_unit" in case.config)
            assert bool(calls["rotary"]) == bool(fused)
            assert calls["Megatron's rotation"] == 0
            assert calls["optimizer"] == (case.optimizer is not None)
            assert calls["MultiLatentAttention.__init__"] == 2 * ("q_lora_rank" in case.config)


def test_its_norms_serve_sequence_parallelism(ranks: MegatronRanks, reference: dict[str, Outcome]) -> None:
    """Each tensor-parallel rank has a share of the rows, and Megatron sums the gradients of norms that say so."""
    case = CASES["interleaved"]
    case = replace(case, config={**case.config, "sequence_parallel": True})
    for ((outcome, calls),) in ranks.run(4, planned_beside, (*BASE, *FUSED), [case], 2):
        assert_equal(outcome, reference["interleaved"])
        assert calls["norm"] and calls["rotary"]


RECOMPUTATION = getattr(TransformerBlock, "_checkpointed_forward", None)  # a function of a module of its own in 0.19


@pytest.mark.skipif(
    RECOMPUTATION is None or "padding_mask" not in signature(RECOMPUTATION).parameters,
    reason="layers of this Megatron-core take no padding_mask, or it recomputes them elsewhere",
)
def test_routers_of_layers_that_it_recomputes_count_no_padding(ranks: MegatronRanks) -> None:
    """Its recomputation calls layers without padding_mask; one rank has no token here, and a row of padding."""
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    case = Case(((1,), (5, 1)), config={**EXPERTS, **block})
    with one_rank():
        expected = planned(case)
    flags = ("--context-parallel-size", "2", "--recompute-method", "block")
    for ((outcome, calls),) in ranks.run(2, planned_beside, flags, [case]):
        assert_equal(outcome, expected)
        assert calls["recomputation"] == 4


LLM = "mindspeed_llm.core.context_parallel.adaptor"
ROTARY = "mindspeed_llm.core.models.common.embeddings.rotary_pos_embedding"
CORE = "mindspeed.core"
REARRANGED = "mindspeed.features_manager.transformer.module_rearrange.mcore_model_rearrange"


def wrapped_in(module: str, function: Any) -> Any:
    """A wrapper of a function whose code is one of a module."""
    names: dict[str, Any] = {"__name__": module, "wraps": wraps, "function": function}
    exec("@wraps(function)\ndef wrapper(*args, **kwargs):\n    return function(*args, **kwargs)\n", names)
    return names["wrapper"]


@pytest.mark.parametrize(
    ("owner", "name", "modules", "words"),
    [
        (Attention, "forward", [f"{CORE}.transformer.flash_attention.reset_attention_mask.adaptor"],
         r"Attention\.forward is replaced by mindspeed\.core\.\S+; .*leave out --reset-attention-mask "
         r"\(pass --reset-position-ids --cp-plan-documents\)"),
        (Attention, "__init__", [f"{CORE}.transformer.attention"],
         r"Attention\.__init__ is replaced by mindspeed\.core\.transformer\.attention; .*--unaligned-linear"),
        (SelfAttention, "__init__", [f"{CORE}.tensor_parallel.tp_2d", REARRANGED],
         r"SelfAttention\.__init__ is replaced by mindspeed\.core\.tensor_parallel\S+; .*leave out --tp-2d"),
    ],
    ids=["--reset-attention-mask", "--unaligned-linear", "--tp-2d"],
)  # fmt: skip
def test_what_mindspeed_replaced_is_refused(
    owner: Any, name: str, modules: list[str], words: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under wrappers that change nothing, too, and by a model that was built before."""
    model = build(transformer_config(), install(layer_spec(transformer_config()), Suite()))
    with beside_mindspeed(), monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(owner, name, wrapped_in(module, getattr(owner, name)))
        with pytest.raises(ConfigError, match=words):
            install(layer_spec(transformer_config()), Suite())
        with pytest.raises(ConfigError, match=words):
            install_model(model)


def test_what_only_mindspeed_llm_replaces_is_refused_with_its_name(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wrapper of attention does nothing with its default algorithm; it replaces rotary positions in every launch."""
    spec = layer_spec(transformer_config())
    with beside_mindspeed("--context-parallel-size", "2"):
        monkeypatch.setattr(Attention, "__init__", wrapped_in(LLM, Attention.__init__))
        install(spec, Suite())
        monkeypatch.setattr(RotaryEmbedding, "forward", wrapped_in(ROTARY, RotaryEmbedding.forward))
        with pytest.raises(ConfigError, match=rf"{ROTARY}, whatever the flags.*in place of mindspeed_llm's adaptor"):
            install(spec, Suite())
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-parallel-algo", "ulysses_cp_algo"], "context_parallel_algo is 'ulysses_cp_algo'.*algorithm"),
        (["--cp-window-size", "2"], "cp_window_size is 2; .*double_ring"),
        (["--moe-fb-overlap"], "moe_fb_overlap is True"),
        (["--position-embedding-type", "alibi"], "position_embedding_type is 'alibi'.*alibi=True"),
    ],
)
def test_layers_refuse_mindspeeds_arguments_in_their_config(flags: list[str], message: str, alone: None) -> None:
    """MindSpeed puts its arguments into the config, so that a user's own spec is checked, too."""
    with beside_mindspeed("--context-parallel-size", "2", *flags):
        config = transformer_config()
        with pytest.raises(ConfigError, match=message):
            build(config, install(layer_spec(config), Suite()))


def test_mindspeed_after_this_package_is_refused() -> None:
    with beside_mindspeed(first=False), pytest.raises(ConfigError, match=r"imported after mindspeed_cp\.megatron"):
        check_mindspeed()


def test_mindspeed_before_this_package_is_valid() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv += ['--context-parallel-size', '2']\n"
        "import mindspeed.megatron_adaptor\n"
        "from mindspeed_cp.megatron import PlannedAttention, install, megatron_imports\n"
        "from mindspeed_cp.config import SuiteSettings\n"
        "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec\n"
        "spec = install(get_gpt_layer_local_spec(), SuiteSettings())\n"
        "print(spec.submodules.self_attention.submodules.core_attention.module is PlannedAttention)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=HANG,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


#: Valid values of the arguments that MindSpeed adds, as it parses them without flags.
DEFAULTS: dict[str, Any] = dict(
    context_parallel_algo="megatron_cp_algo", ulysses_degree_in_cp=None, cp_window_size=1, attention_mask_type="causal",
    context_parallel_kv_cache_policy=None, fix_sub_seq_length=-1, pre_tockens=65536, next_tockens=0, sparse_mode=0,
    alibi_fusion_attn_type=None, schedules_method=None, rope_scaling_type=None, seq_length=4096,
    position_embedding_type="rope",
)  # fmt: skip
#: A value that is refused, where it is not True.
BAD: dict[str, Any] = dict(
    context_parallel_algo="hybrid_cp_algo", ulysses_degree_in_cp=2, cp_window_size=4, attention_mask_type="general",
    context_parallel_kv_cache_policy="full", fix_sub_seq_length=512, pre_tockens=4095, next_tockens=1, sparse_mode=4,
    alibi_fusion_attn_type=2, schedules_method="dualpipev", rope_scaling_type="yarn",
    position_embedding_type="alibi",
)  # fmt: skip
#: Of one line of MindSpeed; it has a test of its own.
RECOMPUTED_NORM = "recompute_norm"
NAMES = [rule.setting for rule in MINDSPEED_RULES if rule.setting != RECOMPUTED_NORM]


def mindspeed_arguments(**changes: Any) -> Namespace:
    """Arguments of a planned run beside MindSpeed."""
    switches = {name: False for name in NAMES if name not in DEFAULTS}
    documents = dict(reset_position_ids=True, reset_attention_mask=False, cp_plan_documents=True)
    return Namespace(**{**vars(arguments()), **switches, **DEFAULTS, **documents, **changes})


def test_mindspeeds_defaults_are_valid() -> None:
    with beside_mindspeed("--context-parallel-size", "2"):
        check_arguments(mindspeed_arguments())
        check_arguments(mindspeed_arguments(context_parallel_algo=None))  # 0.18
        check_arguments(mindspeed_arguments(sparse_mode=2, pre_tockens=4096))


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_of_mindspeed_is_refused_by_name(name: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(beside_mindspeed("--context-parallel-size", "2"))
        with pytest.raises(ConfigError) as caught:
            check_arguments(mindspeed_arguments(**{name: BAD.get(name, True)}))
    assert re.match(rf"{name} is .+; valid with planned attention: .+ \(.+\)", str(caught.value))


def test_a_layers_forward_without_the_padding_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of MindSpeed for Megatron 0.16 takes none; earlier Megatrons hand none to it."""

    def forward(self: Any, hidden_states: Any, attention_mask: Any = None, packed_seq_params: Any = None) -> None:
        raise AssertionError("never called")

    given = mindspeed_arguments(**{RECOMPUTED_NORM: True})
    with beside_mindspeed("--context-parallel-size", "2"):
        check_arguments(given)
        monkeypatch.setattr(TransformerLayer, "forward", forward)
        check_arguments(mindspeed_arguments(**{RECOMPUTED_NORM: False}))
        if "padding_mask" not in signature(TransformerBlock.forward).parameters:
            check_arguments(given)
            return
        with pytest.raises(ConfigError, match=r"recompute_norm is True; valid.*no padding_mask.*modules layernorm"):
            check_arguments(given)


def test_convert_knows_every_flag_that_is_refused() -> None:
    known = {rule.flag for rule in FLAG_RULES if rule.outcome is not FlagOutcome.STAYS}
    missing = {f"--{name.replace('_', '-')}" for name in NAMES} - known
    assert missing == set()


def test_rows_of_the_table_are_sentences() -> None:
    for row in replacements():
        assert row.reason and not row.reason.endswith(".") and row.flag, row
        assert set(row.lines) <= set(LINES) and row.lines
        assert row.verdict in ("kept", "unused", "unsupported") and (not row.kept or row.verdict == "unsupported")
    names = [name for row in replacements() for name in row.names]
    assert sorted(names) == sorted(set(names))
