"""The sizes of a launch's model, as sections of the settings that `plan` and `simulate` read."""

from __future__ import annotations

import ast
import re
from typing import Any

from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.config.settings import make_settings
from mindspeed_cp.convert.flag_table import Given
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.yaml_file import SettingsFile

#: Whole numbers: flag -> section and key.
_NUMBERS = {
    **{
        f"--{key.replace('_', '-')}": ("model", key)
        for key in (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
            *("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_ffn_hidden_size"),
            *("moe_router_topk", "moe_shared_expert_intermediate_size"),
        )
    },
    "--qk-nope-head-dim": ("model", "qk_head_dim"),
    "--qk-rope-head-dim": ("model", "qk_pos_emb_head_dim"),
    "--moe-intermediate-size": ("model", "moe_ffn_hidden_size"),
    "--num-experts": ("model", "num_moe_experts"),
    "--tensor-model-parallel-size": ("train", "tensor_model_parallel_size"),
    "--seq-length": ("data", "seq_length"),
}
#: Keys that are valid only beside another one.
_LATENT = frozenset({"kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"})
_EXPERTS = frozenset({"moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"})


def read_sizes(given: Given, suite: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the sections model, train and data, and a remark; without sections if the sizes cannot be known.

    Args:
        given: the flags of the launch.
        suite: section context_parallel_suite, with which the sections must be valid.
    """
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "data": {}}
    for flag, (section, key) in _NUMBERS.items():
        number = given.number(flag, 0) if given.has(flag) else None
        if number:
            sections[section][key] = number
    model = sections["model"]
    missing = [flag for flag, (_, key) in list(_NUMBERS.items())[:3] if key not in model]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return {}, f"no sizes of the model are written for plan and simulate: {', '.join(missing)} {verb} not given"
    try:
        _complete(model, given)
    except ConfigError as error:
        return {}, f"no sizes of the model are written for plan and simulate: {error}"
    sections["train"]["bf16"] = given.has("--bf16") or given.has("--fp16")
    if given.has("--sequence-parallel") and "tensor_model_parallel_size" in sections["train"]:
        sections["train"]["sequence_parallel"] = True
    note = "fp16 is modelled as bf16, which is as wide" if given.has("--fp16") else ""
    sections = {name: keys for name, keys in sections.items() if keys}
    try:
        make_settings(SettingsFile("the flags", {SUITE_SECTION: suite, **sections}))
    except ConfigError as error:
        return {}, f"no sizes of the model are written for plan and simulate: {error}"
    return sections, note


def _complete(model: dict[str, Any], given: Given) -> None:
    """Add what is no single number, and leave out what only other models read."""
    latent = given.has("--multi-latent-attention") or given.has("--multi-head-latent-attention")
    if latent:
        model["multi_latent_attention"] = True
    if not given.has("--group-query-attention") or latent:  # Megatron reads the groups only with this flag
        model.pop("num_query_groups", None)
    absent = (frozenset() if latent else _LATENT) | (frozenset() if "num_moe_experts" in model else _EXPERTS)
    for key in absent & model.keys():
        del model[key]
    if latent:
        model.pop("kv_channels", None)
    model["swiglu"] = given.has("--swiglu")
    if "ffn_hidden_size" not in model and model["swiglu"]:
        model["ffn_hidden_size"] = int(4 * model["hidden_size"] * 2 / 3 / 64) * 64  # as Megatron's arguments
    if re.fullmatch(r"\d{1,9},0", text := given.value("--window-size").replace(" ", ",")):
        model["window_size"] = [int(text.split(",")[0]), 0]
        if given.has("--window-attn-skip-freq"):
            model["window_attn_skip_freq"] = _pattern("--window-attn-skip-freq", given)
    if "num_moe_experts" in model and given.has("--moe-layer-freq"):
        model["moe_layer_freq"] = _pattern("--moe-layer-freq", given)
    if given.value("--softmax-type") in ("off-by-one", "learnable"):
        model["softmax_type"] = given.value("--softmax-type")
    kind = given.value("--position-embedding-type")
    model["position_embedding_type"] = "alibi" if kind == "alibi" else "rope" if kind in ("rope", "mrope") else "none"


def _pattern(flag: str, given: Given) -> int | list[int]:
    """Return a frequency of layers: N, or a list, also as sums and multiples of lists ([0]*1+[1]*3).

    Raises:
        ConfigError: it is no such text.
    """
    text = given.value(flag)
    try:
        if re.fullmatch(r"[\[\]()*+, 0-9]{1,200}", text):
            value = _evaluate(ast.parse(text, mode="eval").body)
            if isinstance(value, int) or all(isinstance(x, int) for x in value):
                return value
    except (SyntaxError, ValueError, TypeError):
        pass
    raise ConfigError(f"{flag} {text}: is not understood here")


def _evaluate(node: ast.AST) -> Any:
    """Return the value of lists and whole numbers with + and *, without more than 10,000 layers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Mult):
        raise ValueError
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if not isinstance(left, list) or not 0 <= right * len(left) <= 10_000:
        raise ValueError
    return left * right
