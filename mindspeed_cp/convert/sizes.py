"""The sizes of a launch's model, as sections of the settings that `plan` and `simulate` read."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.config.settings import make_settings
from mindspeed_cp.convert.flag_table import Given, flag_of
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.yaml_file import SettingsFile

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
#: Keys that are valid only beside another one.
_LATENT = frozenset({"kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"})
_EXPERTS = frozenset({"moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size"})
#: Whole numbers: flag -> section and key.
_NUMBERS = {
    **{
        flag_of(key): ("model", key)
        for key in (*_NEEDED, "num_query_groups", "kv_channels", "ffn_hidden_size", *sorted(_LATENT | _EXPERTS))
    },
    "--qk-nope-head-dim": ("model", "qk_head_dim"),
    "--qk-rope-head-dim": ("model", "qk_pos_emb_head_dim"),
    "--moe-intermediate-size": ("model", "moe_ffn_hidden_size"),
    "--num-experts": ("model", "num_moe_experts"),
    "--tensor-model-parallel-size": ("train", "tensor_model_parallel_size"),
    "--seq-length": ("data", "seq_length"),
}
MAX_LAYERS = 10_000


def read_sizes(given: Given, suite: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the sections model, train and data, and a remark; without sections if the sizes cannot be known.

    Args:
        given: the flags of the launch.
        suite: section context_parallel_suite, with which the sections must be valid.
    """
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "data": {}}
    for flag, (section, key) in _NUMBERS.items():
        number = given.number(flag, 0)
        if number:
            sections[section][key] = number
    model, train = sections["model"], sections["train"]
    try:
        missing = [flag_of(key) for key in _NEEDED if key not in model]
        if missing:
            raise ConfigError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given")
        _complete(model, given)
        train["bf16"] = given.has("--bf16", "--fp16")
        if given.has("--sequence-parallel") and "tensor_model_parallel_size" in train:
            train["sequence_parallel"] = True
        sections = {name: keys for name, keys in sections.items() if keys}
        make_settings(SettingsFile("the flags", {SUITE_SECTION: suite, **sections}))
    except ConfigError as error:
        return {}, f"no sizes of the model are written for plan and simulate: {error}"
    return sections, "fp16 is modelled as bf16, which is as wide" if given.has("--fp16") else ""


def _complete(model: dict[str, Any], given: Given) -> None:
    """Add what is no single number, and leave out what only other models read."""
    latent = given.has("--multi-latent-attention", "--multi-head-latent-attention")
    absent = (frozenset() if latent else _LATENT) | (frozenset() if "num_moe_experts" in model else _EXPERTS)
    if not given.has("--group-query-attention") or latent:  # Megatron reads the groups only with this flag
        absent |= {"num_query_groups"}
    if latent:
        model["multi_latent_attention"] = True
        absent |= {"kv_channels"}
    for key in absent & model.keys():
        del model[key]
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
    """Return a frequency of layers: N, or a list as Megatron's scripts write it: ([0]*1+[1]*3)*2.

    Raises:
        ConfigError: it is no such text.
    """
    text = given.value(flag).replace(" ", "")
    if re.fullmatch("[0-9]{1,5}", text):
        return int(text)
    whole = re.fullmatch(r"\((.*)\)(?:\*([0-9]{1,5}))?", text)
    inner, times = (whole[1], int(whole[2] or 1)) if whole else (text, 1)
    layers: list[int] = []
    for term in inner.split("+"):
        part = re.fullmatch(r"\[([0-9]{1,5}(?:,[0-9]{1,5})*)\](?:\*([0-9]{1,5}))?", term)
        numbers = [int(number) for number in part[1].split(",")] if part else []
        repeats = int(part[2] or 1) if part else 1
        if not 0 < len(numbers) * repeats * times <= MAX_LAYERS or len(text) > 200:
            raise ConfigError(f"{flag} {given.value(flag)}: is not understood here")
        layers += numbers * repeats
    return layers * times
