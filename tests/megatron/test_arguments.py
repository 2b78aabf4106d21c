"""Every argument of Megatron that touches attention, positions, loss or batches is used, harmless or refused."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import ConfigError
from mindspeed_cp.convert import convert_script
from mindspeed_cp.convert.command_line import read_flags
from mindspeed_cp.convert.flag_table import ARITIES
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.arguments import ENTRIES, UNCONCERNED_GROUPS, VERSIONS, check_arguments, entry_of
from mindspeed_cp.megatron.arguments.entry import read_span, write_span
from mindspeed_cp.megatron.arguments.harmless_groups import HARMLESS_GROUPS
from mindspeed_cp.megatron.arguments.harmless_model import HARMLESS_MODEL
from mindspeed_cp.megatron.arguments.harmless_training import HARMLESS_TRAINING
from mindspeed_cp.megatron.arguments.refusals import ALL_RULES
from mindspeed_cp.megatron.arguments.refused import REFUSED_SPANS
from mindspeed_cp.megatron.arguments.used import USED
from mindspeed_cp.megatron.patches.imports import parse_version
from mindspeed_cp.schema.unsupported import unsupported
from tests.megatron.gpt import Suite

with megatron_imports():
    import megatron.core
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VERSION = parse_version(megatron.core.__version__)
FIELDS = {field.name for kind in (TransformerConfig, MLATransformerConfig) for field in fields(kind)}


def test_every_argument_is_in_the_table(megatron_parser: dict[str, tuple[str, list[str]]]) -> None:
    concerned = {name: group for name, (group, _) in megatron_parser.items() if group not in UNCONCERNED_GROUPS}
    assert len(concerned) > 300
    assert {name: group for name, group in concerned.items() if entry_of(name) is None} == {}


def test_every_field_of_the_transformer_config_is_in_the_table() -> None:
    assert {name for name in FIELDS if entry_of(name) is None} == set()


@pytest.mark.skipif(VERSION not in VERSIONS, reason=f"the table does not list Megatron {VERSION}")
def test_the_versions_of_the_table_are_those_that_have_the_argument(
    megatron_parser: dict[str, tuple[str, list[str]]],
) -> None:
    names = {*megatron_parser, *FIELDS}
    for entry in ENTRIES:
        assert (VERSION in entry.versions) == (entry.name in names), entry.name


def test_an_argument_has_one_entry() -> None:
    names = [entry.name for entry in ENTRIES]
    assert sorted(names) == sorted(set(names))


def test_an_entry_is_about_one_argument() -> None:
    assert [entry.name for entry in ENTRIES if not entry.name.isidentifier()] == []


def test_versions_are_given_for_what_is_refused_alone() -> None:
    refused = {entry.name for entry in ENTRIES if entry.verdict == "refused"}
    assert REFUSED_SPANS.keys() <= refused


#: The tables that are written by hand.
TEXTS = {
    "used": USED.values(),
    "harmless": [*HARMLESS_MODEL.values(), *HARMLESS_TRAINING.values(), *HARMLESS_GROUPS.values()],
}


def names_of(text: str) -> list[str]:
    return [word.partition(":")[0] for word in text.split()]


#: Arguments that a table calls used or harmless, and of which some values are refused.
PARTLY_REFUSED = {
    "mtp_num_layers", "mtp_use_repeated_layer", "mrope_section",
    "moe_router_enable_expert_bias", "no_rope_freq", "qk_layernorm", "rotary_interleaved", "transformer_impl",
}  # fmt: skip


def test_what_is_harmless_is_never_refused() -> None:
    rules = {rule.setting for rule in ALL_RULES}
    assert {name for text in TEXTS["harmless"] for name in names_of(text)} & rules == set()
    assert {name for text in TEXTS["used"] for name in names_of(text)} & rules == PARTLY_REFUSED


@pytest.mark.parametrize("span", ["", "0.14-", "-0.16", "0.14-0.16", "none"])
def test_a_span_is_what_it_was_read_from(span: str) -> None:
    assert write_span(read_span(span)) == ("" if span == "none" else span)
    assert {"": 4, "0.14-": 3, "-0.16": 3, "0.14-0.16": 2, "none": 0}[span] == len(read_span(span))


def arguments(**changes: Any) -> Namespace:
    """Arguments of a run with planned batches, as Megatron parses them."""
    values: dict[str, Any] = dict(
        context_parallel_size=2, tensor_model_parallel_size=1, sequence_parallel=False, expert_model_parallel_size=1,
        num_experts=None, multi_latent_attention=False, q_lora_rank=None, reset_position_ids=True,
        reset_attention_mask=True, create_attention_mask_in_dataloader=False, calculate_per_token_loss=True,
        apply_rope_fusion=False, cp_comm_type=["p2p"], position_embedding_type="rope", transformer_impl="local",
        tokenizer_type="NullTokenizer", attention_backend="auto", mock_data=True, moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    return Namespace(**{**values, **changes})


def test_arguments_of_a_planned_run_are_valid() -> None:
    check_arguments(arguments())
    check_arguments(arguments(reset_position_ids=False, reset_attention_mask=False))
    check_arguments(arguments(), Suite(context_parallel_size=2, algorithm="ulysses"))
    check_arguments(arguments(cp_comm_type=["a2a"]), Suite(context_parallel_size=2, algorithm="ulysses"))


#: Bad values of the arguments that TransformerConfig does not have, and words of the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(reset_position_ids=False), "reset_attention_mask is True.*attention would cross them.*or neither"),
    (dict(reset_attention_mask=False), "reset_attention_mask is False.*stays inside the documents"),
    (
        dict(reset_attention_mask=False, reset_position_ids=False, cp_plan_documents=True),
        "cp_plan_documents is True.*--reset-position-ids",
    ),
    (dict(create_attention_mask_in_dataloader=True), "pass --no-create-attention-mask-in-dataloader"),
    (dict(attention_backend="local"), "put its own attention over the spec's"),
    (dict(position_embedding_type="mrope"), "'rope', 'yarn', 'learned_absolute', 'none'"),
    (dict(mock_data=False, null_tokenizer_eod_id=None), "tokenizer_type is 'NullTokenizer'.*--null-tokenizer-eod-id"),
    (dict(transformer_impl="inference_optimized"), "'transformer_engine', 'local'"),
    (dict(use_legacy_models=True), "packed_seq_params"),
    (dict(mla_down_proj_fusion=True), "FusedMLASelfAttention"),
    (dict(heterogeneous_layers_config_path="x"), "layers of one kind"),
    (dict(heterogeneous_layers_config_encoded_json="{}"), "layers of one kind"),
    (dict(hybrid_attention_ratio=0.5), "state-space"),
    (dict(hybrid_mlp_ratio=0.5), "state-space"),
    (dict(hybrid_override_pattern="M*"), "state-space"),
    (dict(hybrid_layer_pattern="M*"), "state-space"),
    (dict(encoder_pipeline_model_parallel_size=1), "decoders"),
    (dict(encoder_tensor_model_parallel_size=1), "decoders"),
    (dict(pipeline_model_parallel_split_rank=1), "decoders"),
    (dict(use_custom_fsdp=True), "--use-distributed-optimizer"),
    (dict(use_megatron_fsdp=True), "--use-distributed-optimizer"),
    (dict(use_torch_fsdp2=True), "--use-distributed-optimizer"),
    (dict(perform_rl_step=True), "carry no plan"),
    (dict(logits_load_dir="x"), "language model's alone"),
    (dict(logits_save_dir="x"), "rows of a plan"),
    (dict(hierarchical_context_parallel_sizes=[2, 1]), "give it in context_parallel_suite"),
    (dict(max_seqlen_per_dp_cp_rank=4096), "give it in context_parallel_suite"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=["+".join(changes) for changes, _ in REFUSED])
def test_an_argument_that_planned_batches_contradict_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_arguments(arguments(**changes))


def test_every_rule_of_arguments_is_tested() -> None:
    tested = {str(name) for changes, _ in REFUSED for name in changes}
    tested |= {"tokenizer_type"}
    assert {rule.setting for rule in unsupported("arguments")} <= tested


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(calculate_per_token_loss=False), "pass --calculate-per-token-loss"),
        (dict(apply_rope_fusion=True), "pass --no-rope-fusion"),
        (dict(num_experts=4, expert_model_parallel_size=2), "pass --moe-token-dispatcher-type alltoall"),
        (dict(tp_comm_overlap=True), "unequal numbers of tokens"),
        (
            dict(num_experts=4, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"),
            "'deepep'.*takes as many tokens",
        ),
        (dict(num_experts=4, mlp_chunks_for_training=2), "fewer rows than chunks"),
        (dict(overlap_dispatch_backward_with_experts_wgrad=True), "has not been tried"),
        (dict(sequence_parallel=True, defer_embedding_wgrad_compute=True), "buffer of the first one's size"),
        (dict(fine_grained_activation_offloading=True), "every number of rows"),
        (dict(moe_router_load_balancing_type="quantile_balancing", num_experts=4), "'aux_loss'"),
    ],
)
def test_a_value_that_transformer_config_may_not_have_is_refused_with_the_flag_to_pass(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_arguments(arguments(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_experts=4, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep"),
        dict(num_experts=4, moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend="hybridep"),
        dict(
            num_experts=4,
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="hybridep",
            moe_hybridep_pad_uneven_dispatch_inputs=True,
        ),
        dict(mlp_chunks_for_training=2),
        dict(num_experts=4, mlp_chunks_for_training=1),
        dict(defer_embedding_wgrad_compute=True),
        dict(reset_attention_mask=False, cp_plan_documents=True),
    ],
)
def test_values_that_no_rank_waits_for_are_valid(changes: dict[str, Any]) -> None:
    check_arguments(arguments(**changes))


LAUNCHES = Path(__file__).parents[1] / "convert" / "launches"


def parsed(flags: tuple[str, ...]) -> dict[str, Any]:
    """Return flags as Megatron's parser names them: True without a value, numbers as such."""
    _, read = read_flags(flags, ARITIES)
    values = {}
    for flag in read:
        words = [int(word) if word.isdigit() else word for word in flag.values]
        values[flag.name.removeprefix("--").replace("-", "_")] = (
            True if not words else words if len(words) > 1 else words[0]
        )
    return values


@pytest.mark.parametrize("name", sorted(path.stem for path in LAUNCHES.glob("*.sh")))
def test_a_converted_launch_is_not_refused_when_it_starts(name: str) -> None:
    _, conversion = convert_script(LAUNCHES / f"{name}.sh")
    if conversion.refused:
        assert name in ("adaptive", "megatron_hybrid_cp", "ulysses_tune_pack")
        return
    given = parsed(conversion.flags)
    off = dict(
        reset_position_ids=False, reset_attention_mask=False, create_attention_mask_in_dataloader="no_create_attention_mask_in_dataloader" not in given,
        calculate_per_token_loss=False, apply_rope_fusion="no_rope_fusion" not in given and given.get("position_embedding_type") == "rope",
    )  # fmt: skip
    check_arguments(arguments(**{**off, **given}), conversion.suite)


def test_documents_that_the_data_set_marks_by_cu_seqlens_need_no_flag() -> None:
    for reset in (False, True):
        check_arguments(
            arguments(dataloader_inter_document_masking=True, reset_position_ids=reset, reset_attention_mask=False)
        )


@pytest.mark.parametrize("given", [["a2a"], ["p2p", "a2a"]])
def test_another_cp_comm_type_than_the_suites_algorithm_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave cp_comm_type at its default"):
        check_arguments(arguments(cp_comm_type=given), Suite(context_parallel_size=2, algorithm="hybrid"))


def test_the_default_cp_comm_type_does_not_choose_for_a_suite_without_algorithm() -> None:
    check_arguments(arguments(), Suite(context_parallel_size=2))  # ring, which p2p means


def test_another_size_than_the_suites_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size is 2 on the command line, but 4"):
        check_arguments(arguments(), Suite(context_parallel_size=4))
