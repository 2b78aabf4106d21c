"""The sizes of a launch's model, as sections of the settings that `plan` and `simulate` read."""

from __future__ import annotations

import json
import re
from typing import Any

from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.config.settings import make_settings
from mindspeed_cp.convert.rules import Given
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
    _complete(model, given)
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
        if (frequency := _pattern(given.value("--window-attn-skip-freq"))) is not None:
            model["window_attn_skip_freq"] = frequency
    if "num_moe_experts" in model and (frequency := _pattern(given.value("--moe-layer-freq"))) is not None:
        model["moe_layer_freq"] = frequency
    if given.value("--softmax-type") in ("off-by-one", "learnable"):
        model["softmax_type"] = given.value("--softmax-type")
    kind = given.value("--position-embedding-type")
    model["position_embedding_type"] = "alibi" if kind == "alibi" else "rope" if kind in ("rope", "mrope") else "none"


def _pattern(text: str) -> int | list[int] | None:
    """Return a frequency of layers: N, or a list, also as a sum of ([0]*1+[1]*3), as Megatron takes it."""
    if text.isascii() and text.isdigit() and len(text) < 6:
        return int(text)
    if not re.fullmatch(r"[\[\]()*+, 0-9]{3,200}", text):
        return None
    parts = [part.strip().strip("()") for part in text.split("+")]
    values: list[int] = []
    for part in parts:
        match = re.fullmatch(r"(\[[01, ]*\])(?:\*(\d{1,3}))?", part.replace(" ", ""))
        if match is None:
            return None
        values += json.loads(match[1]) * int(match[2] or 1)
    return values
