"""Arguments of Megatron that touch attention, positions, loss or batches: used, ignored or unsupported, and which are
refused when a script starts."""

from __future__ import annotations

from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import ConfigError
from mindspeed_cp.convert import convert_script
from mindspeed_cp.convert.flag_table import ARITIES, read_flags
from mindspeed_cp.megatron.adaptors.settings import ALL_RULES, check_arguments
from mindspeed_cp.megatron.patches.imports import parse_version
from mindspeed_cp.schema.unsupported import Unsupported, unsupported
from tests.megatron.gpt import VERSION, Suite
from tools.megatron_arguments import (
    FILE,
    config_fields,
    entries,
    entry_of,
    read_span,
    table,
    text_of,
    updated,
    write_span,
)

AT_HAND = ".".join(map(str, parse_version(VERSION)))
FIELDS = config_fields()


@pytest.mark.skipif(AT_HAND not in table()["versions"], reason=f"the file does not list Megatron {AT_HAND}")
def test_the_file_is_what_the_tool_writes_of_the_megatron_at_hand(
    megatron_parser: dict[str, tuple[str, list[str]]],
) -> None:
    assert len(megatron_parser) > 300
    data = deepcopy(table())
    updated(data, AT_HAND, megatron_parser, FIELDS)
    assert data["unknown"] == "" and text_of(data) == FILE.read_text("utf-8")


def test_every_field_of_the_transformer_config_is_in_the_file_with_its_versions() -> None:
    assert {name for name in FIELDS if entry_of(name) is None} == set()
    if AT_HAND in table()["versions"]:
        assert {name for name in FIELDS if AT_HAND not in entry_of(name).versions} == set()  # type: ignore[union-attr]


def test_a_new_argument_is_listed_as_unknown() -> None:
    data = deepcopy(table())
    updated(data, "0.19", {"seq_length": ("", []), "new": ("", []), "log": ("logging", [])}, {"newer"})
    assert data["unknown"] == "new newer"
    row = next(row for row in data["used"] if "micro_batch_size" in row["arguments"])
    assert "seq_length reset_position_ids:-0.16" in row["arguments"]


def test_an_argument_has_one_entry_and_one_verdict() -> None:
    names = [entry.name for entry in entries()]
    assert sorted(names) == sorted(set(names)) and all(name.isidentifier() for name in names)
    rules = {rule.setting for rule in ALL_RULES}
    assert {entry.name for entry in entries() if entry.verdict == "ignored"} & rules == set()
    assert {entry.name for entry in entries() if entry.verdict == "used"} & rules == PARTLY_REFUSED
    spans = {word.partition(":")[0] for word in table()["unsupported"].split()}
    assert spans <= {entry.name for entry in entries() if entry.verdict == "unsupported"}


#: Arguments that the file calls used, and of which some values are refused.
PARTLY_REFUSED = {
    "mtp_num_layers", "mtp_use_repeated_layer", "mrope_section",
    "moe_router_enable_expert_bias", "no_rope_freq", "qk_layernorm", "rotary_interleaved", "transformer_impl",
}  # fmt: skip


@pytest.mark.parametrize(
    ("span", "count"), [("", 3), ("0.16-", 2), ("-0.16", 2), ("0.16-0.16", 1), ("none", 0), ("-0.12", 1)]
)
def test_a_span_is_what_it_was_read_from(span: str, count: int) -> None:
    versions = table()["versions"]
    assert len(read_span(span, versions)) == count and write_span(read_span(span, versions), versions) == span


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


def test_arguments_that_fit_the_suite_are_valid() -> None:
    check_arguments(arguments(), Suite(context_parallel_size=2))  # ring, which p2p, the default, means
    check_arguments(arguments(), Suite(context_parallel_size=2, algorithm="ulysses"))
    check_arguments(arguments(cp_comm_type=["a2a"]), Suite(context_parallel_size=2, algorithm="ulysses"))


#: Values of arguments that depend on others, or that another value than True contradicts, and words of the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(reset_position_ids=False), "reset_attention_mask is True.*attention would cross them.*or neither"),
    (dict(reset_attention_mask=False), "reset_attention_mask is False.*stays inside the documents"),
    (
        dict(reset_attention_mask=False, reset_position_ids=False, cp_plan_documents=True),
        "cp_plan_documents is True.*--reset-position-ids",
    ),
    (  # Megatron-core 0.12 has neither with plans
        dict(cp_plan_pool=True, mtp_num_layers=1),
        "cp_plan_pool is True; .*multi-token prediction counts tokens|mtp_num_layers is 1; .*use megatron-core 0.16",
    ),
    (
        dict(
            cp_plan_pool=True, num_experts=4, moe_aux_loss_coeff=[0.0, 0.1], moe_router_load_balancing_type=["aux_loss"]
        ),
        "cp_plan_pool is True; .*losses of experts.*'none'|moe_aux_loss_coeff is .*use megatron-core 0.16",
    ),
    (dict(create_attention_mask_in_dataloader=True), "pass --no-create-attention-mask-in-dataloader"),
    (dict(attention_backend="local"), "put its own attention over the spec's"),
    (dict(position_embedding_type="mrope"), "'rope', 'yarn', 'learned_absolute', 'none'"),
    (dict(mock_data=False, null_tokenizer_eod_id=None), "tokenizer_type is 'NullTokenizer'.*--null-tokenizer-eod-id"),
    (dict(transformer_impl="inference_optimized"), "'transformer_engine', 'local'"),
]
#: Rules of arguments that must be off, whatever else is set.
ARGUMENT_RULES = unsupported("arguments")
SIMPLE = [
    rule
    for rule in ARGUMENT_RULES
    if not (rule.only or rule.never or rule.must_be_on or rule.when) and rule.setting not in str(REFUSED)
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=["+".join(changes) for changes, _ in REFUSED])
def test_an_argument_that_planned_batches_contradict_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_arguments(arguments(**changes))


@pytest.mark.parametrize("rule", SIMPLE, ids=lambda rule: rule.setting)
def test_an_argument_that_must_be_off_is_refused(rule: Unsupported) -> None:
    with pytest.raises(ConfigError, match=f"^{rule.setting} is True; valid with planned attention: {rule.valid} "):
        check_arguments(arguments(**{rule.setting: True}))


def test_every_rule_of_arguments_is_tested() -> None:
    tested = {str(name) for changes, _ in REFUSED for name in changes} | {rule.setting for rule in SIMPLE}
    assert {rule.setting for rule in ARGUMENT_RULES} <= tested | {"tokenizer_type"} and len(SIMPLE) > 15


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
        dict(),
        dict(reset_position_ids=False, reset_attention_mask=False),
        dict(reset_position_ids=False, reset_attention_mask=False, dataloader_inter_document_masking=True),
        dict(reset_attention_mask=False, dataloader_inter_document_masking=True),
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
def test_other_values_are_valid(changes: dict[str, Any]) -> None:
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
        assert name == "ulysses_tune_pack"
        return
    given = parsed(conversion.flags)
    off = dict(
        reset_position_ids=False, reset_attention_mask=False, create_attention_mask_in_dataloader="no_create_attention_mask_in_dataloader" not in given,
        calculate_per_token_loss=False, apply_rope_fusion="no_rope_fusion" not in given and given.get("position_embedding_type") == "rope",
    )  # fmt: skip
    check_arguments(arguments(**{**off, **given}), conversion.suite)


@pytest.mark.parametrize("given", [["a2a"], ["p2p", "a2a"]])
def test_another_cp_comm_type_than_the_suites_algorithm_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="leave cp_comm_type at its default"):
        check_arguments(arguments(cp_comm_type=given), Suite(context_parallel_size=2, algorithm="hybrid"))


def test_another_size_than_the_suites_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size is 2 on the command line, but 4"):
        check_arguments(arguments(), Suite(context_parallel_size=4))
