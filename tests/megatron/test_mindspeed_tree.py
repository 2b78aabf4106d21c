"""The table of what MindSpeed replaces, against the tree of MindSpeed that the environment variable MINDSPEED names."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_cp.megatron.mindspeed_compat import MINDSPEED_RULES, replacements

#: Modules of Megatron in which every attribute that MindSpeed replaces must have a row.
WATCHED = (
    "megatron.core.transformer.attention.",
    "megatron.core.transformer.dot_product_attention.",
    "megatron.core.transformer.multi_latent_attention.",
    "megatron.core.transformer.multi_token_prediction.",
    "megatron.core.recompute.",
    "megatron.core.models.common.embeddings.rope_utils.",
    "megatron.core.models.common.embeddings.rotary_pos_embedding.",
    "megatron.core.models.gpt.gpt_model.",
    "megatron.core.datasets.gpt_dataset.",
    "megatron.core.pipeline_parallel.p2p_communication.",
    "megatron.training.utils.get_batch",
    "megatron.core.utils.get_batch",
    "megatron.core.packed_seq_params.",
)

#: Arguments of MindSpeed-LLM, of development, or of Megatron that a rule looks at only beside MindSpeed.
NOT_OF_THE_TREE = {
    *("position_embedding_type", "reset_attention_mask", "rope_scaling_type", "attn_logit_softcapping"),
    *("query_pre_attn_scalar", "interleave_sliding_window", "sliding_window_size", "enable_mla_absorb"),
    *("partial_rotary_factor", "use_glm_rope"),
}

#: Arguments of the rules that a line of MindSpeed lacks.
LACKING = {
    "0.12": {"use_batch_invariant_ops"},
    "0.16": {"fix_sub_seq_length", "moe_alltoall_mc2", "fix_router"},
    "0.18": {
        *(
            "use_fused_ring_attention_update",
            "megatron_cp_in_bnsd",
            "use_ulysses_allgather_kv",
            "attention_mask_on_cpu",
        ),
        *("adaptive_cp_manually_set_mask_list", "adaptive_cp_dynamic_attn_mask", "adaptive_cp_only_reschedule"),
        *("adaptive_cp_without_coarse", "context_parallel_kv_cache_policy", "use_batch_invariant_ops"),
    },
}


@pytest.fixture(scope="module")
def tree() -> Path:
    if "MINDSPEED" not in os.environ:
        pytest.skip("MINDSPEED names no source tree of MindSpeed")
    return Path(os.environ["MINDSPEED"])


def calls(tree: Path, name: str) -> Iterator[list[str]]:
    """The strings among the arguments of each call of a function in the features."""
    for file in sorted((tree / "mindspeed" / "features_manager").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == name:
                yield [
                    word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)
                ]


def line_of(tree: Path) -> str:
    """The line of a tree, by features that not all lines have."""
    folder = tree / "mindspeed" / "features_manager" / "context_parallel"
    if not (folder / "context_parallel_kv_cache.py").exists():
        return "0.18"
    return "0.16" if (folder / "gated_delta_net.py").exists() else "0.12"


def test_every_replaced_attribute_near_attention_has_a_row(tree: Path) -> None:
    replaced = {words[0] for words in calls(tree, "register_patch") if words}
    assert len(replaced) > 150
    rows = {name for row in replacements() for name in row.names}
    assert {name for name in replaced if name.startswith(WATCHED)} - rows == set()


def test_a_row_is_about_what_the_tree_replaces(tree: Path) -> None:
    """Each row names this tree's line exactly if the tree replaces one of its attributes."""
    line = line_of(tree)
    replaced = {words[0] for words in calls(tree, "register_patch") if words}
    wrong = [row.names[0] for row in replacements() if (line in row.lines) != bool(replaced.intersection(row.names))]
    assert wrong == []


def test_every_refused_argument_is_one_of_mindspeeds(tree: Path) -> None:
    flags = {word for words in calls(tree, "add_argument") for word in words if word.startswith("--")}
    names = {flag[2:].replace("-", "_") for flag in flags}
    assert len(names) > 100
    assert {rule.setting for rule in MINDSPEED_RULES} - names - NOT_OF_THE_TREE == LACKING[line_of(tree)]
