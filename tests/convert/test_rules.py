"""The table of flags agrees with the rest of the package, and every row of it can apply."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mindspeed_cp.algorithms import ALIASES
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.suite import read_algorithm
from mindspeed_cp.convert import Change, convert_flags
from mindspeed_cp.convert.flag_table import (
    ADDED_FLAGS,
    ANOTHER_MODEL,
    ARITIES,
    LLM_FLAGS,
    MINDSPEED_FLAGS,
    MODEL_FLAGS,
    OTHER_FLAGS,
    OWN_ROWS,
    RULES,
    SUITE_FILE,
    Given,
    Outcome,
    flag_of,
    read_flags,
)
from mindspeed_cp.convert.launch import Launch
from mindspeed_cp.convert.translate import convert_launch
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.unsupported import Unsupported, unsupported
from tools.megatron_arguments import entries

BASE = ["--context-parallel-size", "8"]
ROPE = ["--position-embedding-type", "rope"]
PP = ["--pipeline-model-parallel-size", "2"]


def row_of(flag: str, *flags: str) -> Change:
    """Convert flags, and return what became of one of them."""
    changes = convert_flags([*BASE, *flags]).changes
    (change,) = (change for change in changes if change.flag.split()[0].partition("=")[0] == flag)
    return change


@pytest.mark.parametrize(("sizes", "ranks"), [((4, 1, 32), 128), ((4, 2, 3), 24), ((4, 2, 8), None), ((1, 1, 1), None)])
def test_sizes_that_do_not_divide_the_launch_are_named(sizes: tuple[int, ...], ranks: int | None) -> None:
    names = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    words = [word for name, size in zip(names, sizes, strict=True) for word in (name, str(size))]
    launch = Launch(("torchrun", "--nnodes=8", "--nproc_per_node", "8"), "pretrain_gpt.py", tuple(words))
    rows = [row.reason for row in convert_launch(launch).changes if row.flag == "torchrun"]
    assert [f"= {ranks} ranks, which do not divide the 64 of the launch" in row for row in rows] == [True] * bool(ranks)


@pytest.mark.parametrize("flag", ["--context-parallel-algo", "--cp-comm-type"])
def test_algorithms_are_those_of_the_settings(flag: str) -> None:
    names = {
        rule.value: dict(rule.settings)["algorithm"]
        for rule in RULES
        if rule.flag == flag and rule.settings and not rule.when
    }
    adaptive = {"adaptive_cp_algo", "hybrid_adaptive_cp_algo"}
    assert all(
        name == ("direct" if value in adaptive else read_algorithm("algorithm", value)) for value, name in names.items()
    )
    refused = {rule.value for rule in RULES if rule.flag == flag and rule.outcome is Outcome.REFUSED}
    known = {*ALIASES} if flag == "--context-parallel-algo" else set()
    assert {name for name in known if name.endswith("_cp_algo")} <= {*names, *refused}


def test_settings_are_keys_of_the_section() -> None:
    keys = {key for rule in RULES for key, _ in rule.settings}
    assert keys <= set(SuiteSettings.key_names()) and len(keys) > 5


def test_rows_are_sentences_and_refusals_have_an_alternative() -> None:
    for rule in RULES:
        assert rule.reason and not rule.reason.endswith("."), rule
        assert bool(rule.becomes) == (rule.outcome in (Outcome.REFUSED, Outcome.REPLACED, Outcome.BY_HAND)), rule
        assert rule.flag.startswith("--")
    assert len({(rule.flag, rule.arity) for rule in RULES}) == len(ARITIES)


def test_no_row_hides_a_later_one() -> None:
    """A row without value and condition is the last of its flag, and no two rows are for the same."""
    for flag in ARITIES:
        rows = [rule for rule in RULES if rule.flag == flag]
        keys = [(rule.value, rule.when) for rule in rows]
        assert len(set(keys)) == len(keys), flag
        general = [number for number, key in enumerate(keys) if key == (None, "")]
        assert general in ([], [len(rows) - 1]), flag


LLAMA3 = ["--rope-scaling-type", "llama3", "--rope-scaling-factor", "8", "--low-freq-factor", "1.0",
          "--high-freq-factor", "4.0", "--original-max-position-embeddings", "8192"]  # fmt: skip

#: Flags, one of them, and its outcome, or what it became; None: no row, and it stays.
CASES: list[tuple[list[str], str, Outcome | str | None]] = [
    (["--cp-window-size", "4"], "--cp-window-size", "algorithm: double_ring, cp_window_size: 4"),
    (["--cp-window-size", "4", "--cp-comm-type", "p2p"], "--cp-comm-type", "algorithm: double_ring"),
    (["--cp-window-size", "1"], "--cp-window-size", Outcome.REMOVED),
    (["--cp-window-size", "4", "--cp-comm-type", "a2a"], "--cp-window-size", Outcome.REMOVED),
    (["--cp-window-size", "2", "--cp-comm-type", "a2a+p2p"], "--cp-window-size", Outcome.REMOVED),
    (["--cp-comm-type", "a2a", "a2a"], "--cp-comm-type", "algorithm: ulysses"),
    (["--cp-comm-type", "a2a", "p2p"], "--cp-comm-type", Outcome.REFUSED),
    (["--cp-comm-type", "p2p", "--context-parallel-algo", "ulysses_cp_algo"], "--cp-comm-type", Outcome.REMOVED),
    (["--context-parallel-algo", "other"], "--context-parallel-algo", Outcome.REFUSED),
    (["--ulysses-degree-in-cp", "2"], "--ulysses-degree-in-cp", Outcome.REMOVED),
    (["--hierarchical-context-parallel-sizes", "2", "4"], "--hierarchical-context-parallel-sizes", Outcome.REMOVED),
    (["--max-seqlen-per-dp-cp-rank", "9"], "--max-seqlen-per-dp-cp-rank", Outcome.REMOVED),
    (["--reset-position-ids"], "--reset-position-ids", Outcome.REFUSED),
    (["--reset-position-ids", "--reset-attention-mask"], "--reset-position-ids", Outcome.STAYS),
    ([*ROPE, "--reset-attention-mask"], "--reset-attention-mask", Outcome.STAYS),
    ([*ROPE, "--reset-attention-mask"], "--reset-position-ids", Outcome.ADDED),
    ([*ROPE, "--reset-attention-mask"], "--cp-plan-documents", None),
    ([*ROPE, "--reset-attention-mask", "--use-fused-rmsnorm"], "--reset-attention-mask", Outcome.REMOVED),
    ([*ROPE, "--reset-attention-mask", "--use-fused-rmsnorm"], "--reset-position-ids", Outcome.ADDED),
    ([*ROPE, "--reset-attention-mask", "--use-fused-rmsnorm"], "--cp-plan-documents", Outcome.ADDED),
    ([*ROPE, "--reset-attention-mask", "--neat-pack"], "--reset-attention-mask", Outcome.REMOVED),
    ([*ROPE, "--reset-attention-mask", "--neat-pack"], "--cp-plan-documents", None),
    ([*ROPE, "--reset-attention-mask", "--neat-pack"], "--reset-position-ids", None),
    ([*ROPE, "--reset-attention-mask", "--reset-position-ids", "--neat-pack"], "--cp-plan-documents", Outcome.ADDED),
    (["--reset-attention-mask"], "--reset-attention-mask", Outcome.REFUSED),
    (["--reset-attention-mask", "--use-rotary-position-embeddings"], "--reset-attention-mask", Outcome.STAYS),
    (["--reset-attention-mask", "--reset-position-ids"], "--reset-attention-mask", Outcome.STAYS),
    (["--attention-mask-type", "general"], "--attention-mask-type", Outcome.REFUSED),
    (["--cp-attention-mask-type", "general"], "--cp-attention-mask-type", Outcome.REFUSED),
    (["--attention-mask-type", "general", "--reset-attention-mask"], "--attention-mask-type", Outcome.REMOVED),
    (["--cp-attention-mask-type", "general", "--pack"], "--cp-attention-mask-type", Outcome.REMOVED),
    (["--dataloader-inter-document-masking", "--reset-position-ids"], "--reset-position-ids", Outcome.STAYS),
    (["--position-embedding-type", "alibi"], "--spec", Outcome.BY_HAND),
    (["--position-embedding-type", "alibi"], "--position-embedding-type", Outcome.REPLACED),
    (["--position-embedding-type", "mrope"], "--position-embedding-type", Outcome.REFUSED),
    (["--position-embedding-type", "rope"], "--no-rope-fusion", Outcome.ADDED),
    (["--position-embedding-type", "rope", "--no-rope-fusion"], "--no-rope-fusion", Outcome.STAYS),
    (["--pre-tockens", "100", "--seq-length", "200"], "--pre-tockens", Outcome.REFUSED),
    (["--pre-tockens", "200", "--seq-length", "200"], "--pre-tockens", Outcome.REMOVED),
    (["--next-tockens", "0"], "--next-tockens", Outcome.REMOVED),
    (["--next-tockens", "1"], "--next-tockens", Outcome.REFUSED),
    (["--sparse-mode", "4"], "--sparse-mode", Outcome.REFUSED),
    (["--moe-token-dispatcher-type", "allgather"], "--moe-token-dispatcher-type", Outcome.STAYS),
    (["--moe-token-dispatcher-type", "allgather", *PP], "--moe-token-dispatcher-type", Outcome.REPLACED),
    (["--moe-token-dispatcher-type", "alltoall_seq", *PP], "--moe-token-dispatcher-type", Outcome.REPLACED),
    (["--moe-token-dispatcher-type", "alltoall", *PP], "--moe-token-dispatcher-type", Outcome.STAYS),
    (["--expert-model-parallel-size", "2"], "--moe-token-dispatcher-type", Outcome.ADDED),
    (PP, "--moe-token-dispatcher-type", Outcome.ADDED),
    (["--num-experts", "8"], "--moe-token-dispatcher-type", None),
    (["--num-experts", "8"], "--spec", Outcome.BY_HAND),
    (["--num-experts", "0"], "--spec", Outcome.ADDED),
    (["--context-parallel-algo", "mamba_cp_algo"], "--context-parallel-algo", Outcome.REFUSED),
    (["--stage", "sft"], "algorithm", "algorithm: ring"),
    (["--tokenizer-name-or-path", "x", "--cp-window-size", "4"], "algorithm", None),
    (["--use-fused-rmsnorm"], "algorithm", "algorithm: ring"),
    (["--mtp-num-layers", "0"], "--mtp-num-layers", None),
    (["--mtp-num-layers", "1"], "--mtp-num-layers", Outcome.BY_HAND),
    (["--mtp-num-layers", "2", "--mtp-use-repeated-layer"], "--mtp-use-repeated-layer", Outcome.REFUSED),
    (["--mtp-num-layers", "2", "--mtp-use-repeated-layer", "--attention-dropout", "0.0"], "--mtp-use-repeated-layer", None),
    (["--mrope-section", "16", "24", "24"], "--mrope-section", Outcome.REFUSED),
    (["--moe-fb-overlap"], "--moe-fb-overlap", Outcome.REFUSED),
    (["--cp-plan-pool"], "--cp-plan-pool", Outcome.REFUSED),
    (["--attn-logit-softcapping", "50.0"], "--attn-logit-softcapping", Outcome.REFUSED),
    (["--query-pre-attn-scalar", "144", "--kv-channels", "128"], "--query-pre-attn-scalar", Outcome.REFUSED),
    (["--query-pre-attn-scalar", "144"], "--query-pre-attn-scalar", Outcome.REFUSED),
    (["--query-pre-attn-scalar", "256", "--kv-channels", "256"], "--query-pre-attn-scalar", Outcome.REMOVED),
    (["--interleave-sliding-window", "4096"], "--interleave-sliding-window", Outcome.REFUSED),
    (["--is-pairwise-dataset"], "--is-pairwise-dataset", Outcome.REFUSED),
    (["--hybrid-context-parallel"], "--hybrid-context-parallel", "algorithm: hierarchical"),
    (["--dynamic-context-parallel", "--cp-comm-type", "a2a"], "--cp-comm-type", Outcome.REMOVED),
    (["--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank", "9"], "--max-seqlen-per-dp-cp-rank", "max_seqlen_per_dp_cp_rank: 9"),
    (["--context-parallel-algo", "adaptive_cp_algo"], "--context-parallel-algo", "algorithm: direct"),
    (["--fix-sub-seq-length", "512"], "--fix-sub-seq-length", Outcome.REFUSED),
    *((LLAMA3, flag, Outcome.REFUSED) for flag in LLAMA3[::2]),
    (["--low-freq-factor", "1"], "--low-freq-factor", Outcome.STAYS),
    (["--rope-scaling-type", "yarn"], "--rope-scaling-type", Outcome.REFUSED),
    (["--first-k-dense-replace", "3"], "--first-k-dense-replace", Outcome.REFUSED),
    (["--first-k-dense-replace", "-1"], "--first-k-dense-replace", Outcome.STAYS),
    (["--dynamic-factor", "6"], "--dynamic-factor", Outcome.REFUSED),
    (["--dynamic-factor", "1.0"], "--dynamic-factor", Outcome.STAYS),
    (["--moe-device-level-aux-loss-coeff", "0.05"], "--moe-device-level-aux-loss-coeff", Outcome.REFUSED),
    (["--moe-comm-aux-loss-coeff", "0.02"], "--moe-comm-aux-loss-coeff", Outcome.REFUSED),
    (["--moe-device-level-aux-loss-coeff", "0."], "--moe-device-level-aux-loss-coeff", Outcome.STAYS),
    (["--moe-comm-aux-loss-coeff", "0."], "--moe-comm-aux-loss-coeff", Outcome.STAYS),
    *((["--moe-router-load-balancing-type", kind], "--moe-router-load-balancing-type", Outcome.REFUSED)
      for kind in ("group_limited_greedy", "softmax_topk", "pai_megatron_aux_loss", "sparsemixer_topk")),
    (["--position-embedding-type", "alibi", "--spec", "a", "b"], "--spec", Outcome.BY_HAND),
    (["--num-experts", "8", "--moe-aux-loss-coeff", "0.01", "--cp-plan-pool"], "--cp-plan-pool", Outcome.REFUSED),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "flag", "expected"), CASES)
def test_a_flag_becomes_what_the_other_flags_say(flags: list[str], flag: str, expected: Outcome | str | None) -> None:
    if expected is None:
        conversion = convert_flags([*BASE, *flags])
        assert (flag in conversion.kept) == (flag in flags) and flag not in conversion.added
        assert not any(change.flag.split()[0] == flag for change in conversion.changes)
        return
    row = row_of(flag, *flags)
    assert expected == (row.outcome if isinstance(expected, Outcome) else row.became)


EXPERTS = ["--num-experts", "8", "--moe-aux-loss-coeff"]
SCHEDULERS = ["--hybrid-context-parallel", "--dynamic-context-parallel"]


@pytest.mark.parametrize(
    ("flags", "expected", "added"),
    [
        ([], Outcome.STAYS, True),
        ([*EXPERTS, "0.0"], Outcome.STAYS, True),
        ([*EXPERTS, "0", "0"], Outcome.STAYS, True),
        ([*EXPERTS, "0.01", "--moe-router-load-balancing-type", "none"], Outcome.STAYS, True),
        ([*EXPERTS, "0.01"], Outcome.REFUSED, False),
        ([*EXPERTS, "0", "0.01", "--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"], Outcome.REFUSED, False),
        ([*EXPERTS, "unknown"], Outcome.REFUSED, False),
        (["--mtp-num-layers", "1"], Outcome.REFUSED, False),
        (["--mtp-num-layers", "0"], Outcome.STAYS, True),
    ],
)  # fmt: skip
def test_the_pool_stays_and_is_added_where_its_training_does_not_change(
    flags: list[str], expected: Outcome, added: bool
) -> None:
    for scheduler in SCHEDULERS:
        assert row_of("--cp-plan-pool", *flags, scheduler, "--cp-plan-pool").outcome is expected
        conversion = convert_flags([*BASE, *flags, scheduler])
        assert scheduler not in conversion.kept and ("--cp-plan-pool" in conversion.added) == added
        again = convert_flags([*BASE, *flags, scheduler, "--cp-plan-pool"])
        assert "--cp-plan-pool" not in again.added, "a flag that is given is not added"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-parallel-size", "eight"], '--context-parallel-size eight: context_parallel_suite.context_parallel_size = "eight": must be an integer'),
        (["--context-parallel-size"], "--context-parallel-size: has no value"),
        ([*BASE, "--cp-window-size", "3"], "--cp-window-size 3: context_parallel_suite.cp_window_size = 3"),
        ([*BASE, "--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "3", "2"], "--hierarchical-context-parallel-sizes 3 2: "),
        ([*BASE, "--context-parallel-algo", "hybrid_cp_algo", "--ulysses-degree-in-cp", "3"], "--ulysses-degree-in-cp 3: "),
        (["--bf16"], "no flag of context parallelism"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named_with_its_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_flags(flags)
    assert str(caught.value).startswith(message)


def test_added_flags_end_with_the_settings() -> None:
    assert (ADDED_FLAGS[-1].flag, ADDED_FLAGS[-1].value) == ("--cp-plan", SUITE_FILE)
    conversion = convert_flags(BASE, output="my suite.yaml")
    assert conversion.added[-2:] == ("--cp-plan", "my suite.yaml")


WORDS = [*ARITIES, *(rule.value for rule in RULES if rule.value), "4", "2", "-1", "0", "x", "", "--", "-", "--a=b", "é", "1" * 30,
         "--cp-comm-type=a2a", "--context-parallel-size=4", "--context-parallel-size", "a b", "\n", "--set", "1e9"]  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=20))
@example(["--cp-comm-type", "--"])
@example(["--cp-comm-type", "a2a", "--"])
def test_any_words_give_a_result_or_a_line(words: list[str]) -> None:
    try:
        conversion = convert_flags(words)
    except ConfigError as error:
        assert "\n" not in str(error) or "\n" in "".join(words)
        return
    assert (conversion.settings is None) == bool(conversion.refused)
    if conversion.suite is not None:
        assert SuiteSettings(**(conversion.settings or {})) == conversion.suite
    kept = list(conversion.kept)
    for word in words:  # what is unknown stays
        if word.startswith("--") and word.partition("=")[0] not in ARITIES:
            assert word in kept


def read_values(flags: list[str]) -> dict[str, tuple[str, ...]]:
    _, read = read_flags([*BASE, *flags], ARITIES)
    return {flag.name: flag.values for flag in read}


def test_every_condition_holds_for_some_flags_and_not_for_others() -> None:
    launches = [read_values(flags) for flags, _, _ in CASES]
    launches += [read_values([*flags, flag_of(name), *BAD.get(flag_of(name), ())]) for name, flags in BESIDE.items()]
    givens = [Given(values) for values in launches]
    rows = [*RULES, *ADDED_FLAGS]
    conditions = {row.when for row in rows if row.when}
    undecided = {}
    for row in rows:
        if row.when:
            bad = [Given({**given.values, row.flag: BAD.get(row.flag, ("1",))}) for given in givens]
            results = {row.holds(given) for given in (*givens, *bad)}
            if results != {True, False}:
                undecided[row.flag, row.when] = results
    assert not undecided and len(conditions) > 20


def test_scaled_rotations_name_the_flags_of_megatron_with_the_same_frequencies() -> None:
    assert row_of("--rope-scaling-type", *LLAMA3).became.startswith("--use-rope-scaling of Megatron")
    for other in (["--low-freq-factor", "2"], ["--original-max-position-embeddings", "4096"]):
        assert row_of("--rope-scaling-type", *LLAMA3, *other).became == ANOTHER_MODEL
    assert row_of("--rope-scaling-type", "--rope-scaling-type", "yarn").became == ANOTHER_MODEL


def test_a_flag_of_the_model_without_a_rule_has_a_row() -> None:
    flags = ["--swiglu", "--moe-router-group-topk", "4", "--num-layers", "2", "--mystery", "1", "--lr", "1e-4"]
    conversion = convert_flags([*BASE, *flags])
    rows = {row.flag: row for row in conversion.changes}
    assert rows["--swiglu"].outcome is rows["--num-layers 2"].outcome is Outcome.STAYS
    assert "function of each token" in rows["--moe-router-group-topk 4"].reason
    assert rows["--mystery 1"].outcome is Outcome.UNKNOWN and conversion.exit_code == 3
    assert not any("--lr" in flag for flag in rows) and list(conversion.kept) == [*BASE, *flags]


def test_no_flag_stands_in_two_tables() -> None:
    assert not (MODEL_FLAGS.keys() | OTHER_FLAGS - MINDSPEED_FLAGS - LLM_FLAGS) & ARITIES.keys()
    assert not MODEL_FLAGS.keys() & OTHER_FLAGS


def test_every_argument_of_megatron_is_known() -> None:
    known = {*ARITIES, *MODEL_FLAGS, *OTHER_FLAGS, *(rule.flag for rule in ADDED_FLAGS)}
    names = {entry.name for entry in entries() if not entry.name.startswith("_")}
    assert {f"--{name.replace('_', '-')}" for name in names} - known == set()


SHARED = (*unsupported("model"), *unsupported("arguments"))

#: Other flags with which a setting is refused.
BESIDE = {
    "defer_embedding_wgrad_compute": ["--sequence-parallel"],
    "rotary_interleaved": ["--multi-latent-attention"],
    "no_rope_freq": ["--multi-latent-attention"],
    "qk_layernorm": ["--multi-latent-attention", "--q-lora-rank", "8", "--tensor-model-parallel-size", "2"],
    "moe_flex_dispatcher_backend": ["--num-experts", "8", "--moe-token-dispatcher-type", "flex"],
    "mlp_chunks_for_training": ["--num-experts", "8"],
    "mtp_use_repeated_layer": ["--mtp-num-layers", "2"],
    "moe_router_load_balancing_type": ["--num-experts", "8"],
}

#: A refused value of each setting that is no switch, and a valid one that a launch may give.
VALUES = {
    "experimental_attention_variant": ("dsa", None),
    "cuda_graph_impl": ("local", "none"),
    "gtp_weight_remat_size": ("2", "1"), "expert_gtp_weight_remat_size": ("2", "1"), "no_rope_freq": ("4", None),
    "moe_flex_dispatcher_backend": ("hybridep", "deepep"), "mlp_chunks_for_training": ("2", "1"),
    "moe_expert_capacity_factor": ("1.5", None), "moe_expert_rank_capacity_factor": ("2", None),
    "moe_router_load_balancing_type": ("aux_loss sinkhorn", "aux_loss seq_aux_loss"),
    "transformer_impl": ("inference_optimized", "local"), "heterogeneous_layers_config_path": ("x", None),
    "heterogeneous_layers_config_encoded_json": ("{}", None), "hybrid_attention_ratio": ("0.5", "0.0"),
    "hybrid_mlp_ratio": ("0.5", "0.0"), "hybrid_override_pattern": ("M*", None), "hybrid_layer_pattern": ("M*", None),
    "encoder_pipeline_model_parallel_size": ("1", "0"), "encoder_tensor_model_parallel_size": ("1", "0"),
    "pipeline_model_parallel_split_rank": ("1", None), "logits_load_dir": ("x", None), "logits_save_dir": ("x", None),
}  # fmt: skip

#: Refused values by flag.
BAD = {flag_of(name): tuple(refused.split()) for name, (refused, _) in VALUES.items()}


def is_refused(setting: str, words: list[str], *beside: str) -> bool:
    """Convert a flag, and return True if it is refused; else it must stay as it is."""
    conversion = convert_flags(["--context-parallel-size", "8", *beside, flag_of(setting), *words])
    outcomes = {change.outcome for change in conversion.changes if change.flag.split()[0] == flag_of(setting)}
    assert outcomes <= {Outcome.REFUSED} or flag_of(setting) in conversion.kept
    return Outcome.REFUSED in outcomes


@pytest.mark.parametrize(
    "rule", [rule for rule in SHARED if rule.setting not in OWN_ROWS], ids=lambda rule: rule.setting
)
def test_a_conversion_refuses_what_a_start_refuses(rule: Unsupported) -> None:
    beside = BESIDE.get(rule.setting, [])
    refused, valid = VALUES.get(rule.setting, ("", None))
    assert (refused == "") == (rule.valid == "False"), "a value that is refused, or none for a switch"
    assert is_refused(rule.setting, refused.split(), *beside)
    row = row_of(flag_of(rule.setting), *beside, flag_of(rule.setting), *refused.split())
    assert (row.became == ANOTHER_MODEL) == rule.another_model
    if valid is not None:
        assert not is_refused(rule.setting, valid.split(), *beside)
    if beside:
        assert not is_refused(rule.setting, refused.split())


def test_a_setting_with_rows_of_its_own_has_a_row_or_an_added_flag() -> None:
    added = {"calculate_per_token_loss", "apply_rope_fusion", "create_attention_mask_in_dataloader",
             "cp_plan_documents", "tokenizer_type"}  # fmt: skip
    settings = {rule.setting for group in ("model", "arguments", "mindspeed") for rule in unsupported(group)}
    assert set(OWN_ROWS) <= settings
    assert {setting for setting in OWN_ROWS if flag_of(setting) not in ARITIES} == added
