"""What a model computes is compared with the plan in every call: changes behind the plan's back are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import ConfigError, Documents, Topology
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import make_config, make_model, names, whole_batch

LENGTHS = (9, 4)


def on_layer(index: int, name: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Set an attribute of the attention of a layer."""

    def change(model: Any, batch: dict[str, Any]) -> None:
        layers = [
            module
            for module in model.modules()
            if type(module).__name__.endswith(("SelfAttention", "Attention")) and hasattr(module, "layer_idx")
        ]
        assert hasattr(layers[index], name)
        setattr(layers[index], name, value)

    return change


def on_config(name: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Set a setting of the configuration, which layers read in every call."""

    def change(model: Any, batch: dict[str, Any]) -> None:
        setattr(model.config, name, value)

    return change


def as_argument(name: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Pass an argument to the model."""

    def change(model: Any, batch: dict[str, Any]) -> None:
        batch[name] = value

    return change


def scaled(index: int) -> Callable[[Any, dict[str, Any]], None]:
    """Multiply the factor of the scores of a layer."""

    def change(model: Any, batch: dict[str, Any]) -> None:
        layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
        layers[index].scaling *= 1.01

    return change


#: Model, change, and what the error names.
CHANGES: list[tuple[str, Callable[[Any, dict[str, Any]], None], str]] = [
    *[(name, scaled(index), f"layer {index} .*scaling") for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "gemma4", "deepseek_v2", "granite") for index in (0, 1)],
    ("bert", scaled(0), "layer 0 .*scaling"),
    ("mistral", on_config("sliding_window", 5), r"layer 0 .*sliding_window is 5, but the plan has window \(8, 0\)"),
    ("mistral", on_config("sliding_window", None), "layer 0 .*sliding_window is None"),
    ("mixtral", on_config("sliding_window", 4), "layer 0 .*sliding_window is 4, but the plan has window None"),
    ("qwen2", on_layer(1, "sliding_window", None), "layer 1 .*sliding_window"),
    ("qwen2", on_layer(0, "sliding_window", 7), "layer 0 .*sliding_window"),
    ("qwen3_moe", on_layer(0, "sliding_window", 3), "layer 0 .*sliding_window"),
    ("gemma2", on_layer(0, "sliding_window", 7), "layer 0 .*sliding_window"),
    ("gemma3", on_layer(0, "sliding_window", None), "layer 0 .*sliding_window"),
    ("gemma3", on_layer(1, "sliding_window", 6), "layer 1 .*sliding_window"),
    ("qwen2", on_config("sliding_window", 5), r"layer 1 .*mask hides from the query at position 5 .* with window \(6, 0\)"),
    ("gemma2", on_config("sliding_window", 3), "layer 0 .*mask hides"),
    ("gemma3", on_config("sliding_window", 3), "layer 0 .*mask hides"),
    ("gemma3", on_config("layer_types", ["sliding_attention"] * 2), "layer 1 .*mask hides"),
    ("modernbert", on_layer(1, "sliding_window", 4), "layer 1 .*sliding_window"),
    ("phi3", on_config("sliding_window", 5), r"layer 0 .*sliding_window is 5, but the plan has window \(8, 0\)"),
    ("smollm3", on_layer(0, "sliding_window", None), "layer 0 .*sliding_window is None"),
    ("gemma4", on_layer(0, "sliding_window", 7), "layer 0 .*sliding_window"),
    ("gemma4", on_config("sliding_window", 3), "layer 0 .*mask hides"),
    ("gemma4", as_argument("logits_to_keep", 3), "logits_to_keep is 3"),
    ("qwen2_moe", on_config("layer_types", ["sliding_attention"] * 2), "layer 0 .*mask"),
    ("ernie4_5", on_layer(1, "attention_dropout", 0.1), "layer 1 .*dropout is 0.1"),
    ("llama", as_argument("sliding_window", 6), "layer 0 .*sliding_window"),
    ("gemma2", on_layer(1, "attn_logit_softcapping", 30.0), "layer 1 .*softcap is 30.0"),
    ("llama", as_argument("softcap", 20.0), "layer 0 .*softcap is 20.0"),
    ("mistral", as_argument("s_aux", torch.zeros(4)), "layer 0 .*s_aux is a tensor"),
    ("qwen3", as_argument("s_aux", torch.ones(4)), "layer 0 .*s_aux is a tensor"),
    ("gpt_oss", on_layer(1, "sinks", None), "layer 1 .*s_aux is None, but the plan is for layers with sinks"),
    ("gpt_oss", on_layer(0, "sliding_window", None), "layer 0 .*sliding_window is None"),
    ("llama", as_argument("position_bias", torch.zeros(1, 4, 13, 13)), "layer 0 .*position_bias"),
    ("llama", on_layer(1, "attention_dropout", 0.1), "layer 1 .*dropout is 0.1"),
    ("llama", on_layer(1, "is_causal", False), "layer 1 .*is_causal"),
    ("qwen3", on_config("is_causal", False), "layer 0 .*is_causal"),
    ("bert", on_layer(0, "is_causal", True), "layer 0 .*is_causal"),
    ("llama", as_argument("attention_mask", torch.ones(1, 13)), "attention_mask"),
    ("llama", as_argument("attention_mask", torch.zeros(1, 1, 13, 13)), "layer 0 .*attention_mask"),
    ("gpt2", as_argument("plan", None), "layer 0 .*plan is None"),
    ("llama", on_layer(1, "layer_idx", 7), "layer 7 has no plan"),
]  # fmt: skip


def run(name: str, change: Callable[[Any, dict[str, Any]], None]) -> None:
    cp.register()
    model = make_model(make_config(name), cp.IMPLEMENTATION)
    batch, _ = cp.planned_batch(whole_batch(LENGTHS), model.config, None, documents=Documents(LENGTHS))
    change(model, batch)
    model(**batch)


@pytest.mark.parametrize(
    ("name", "change", "says"), CHANGES, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(CHANGES)]
)
def test_a_change_behind_the_plan_is_an_error(
    name: str, change: Callable[[Any, dict[str, Any]], None], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(name, change)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "hunyuan_v1_dense"])
def test_positions_that_depend_on_the_rows_of_a_rank_are_refused(name: str, rope: str) -> None:
    config = make_config(name)
    parameters = config.rope_parameters["full_attention"] if name == "gemma3" else config.rope_parameters
    parameters |= {"rope_type": rope, "alpha": None if name == "hunyuan_v1_dense" else 50.0}
    with pytest.raises(ConfigError, match=f"rope_type is '{rope}': its frequencies depend on the longest position"):
        cp.build_plans(config, Documents(LENGTHS), Topology(1, 1))


def test_a_model_that_ignores_plans_is_refused() -> None:
    cp.register()
    model = make_model(make_config("llama"), "sdpa")
    with pytest.raises(ConfigError, match="attention implementation is 'sdpa', which ignores plans; valid: "):
        cp.build_plans(model.config, Documents(LENGTHS), Topology(1, 1))
    model.set_attn_implementation(cp.IMPLEMENTATION)
    assert cp.build_plans(model.config, Documents(LENGTHS), Topology(1, 1)).layout.ranks == 1


@pytest.mark.parametrize("name", names())
def test_an_unchanged_model_runs(name: str) -> None:
    run(name, lambda model, batch: None)


#: Model, settings, and what the error says.
REFUSED = [
    ("gemma2", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0: it caps the scores.*; valid with planned attention: None"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "is_causal is False: it lets tokens see later ones"),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True: it .*; valid .*: False"),
    ("llama", {"is_causal": False}, "is_causal is False"),
    ("bert", {"is_decoder": True}, "is_decoder is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "says"), REFUSED)
def test_settings_that_no_plan_has_are_refused_by_name(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cp.attention_config(make_config(name, **settings), 0)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Llama4TextConfig", "attention_chunk_size"),
        ("Qwen3NextConfig", "linear attention"),
        ("Qwen3_5TextConfig", "linear attention"),
        ("Qwen3_5Config", "linear attention"),
        ("Qwen3VLMoeConfig", "valid: .*qwen3_moe"),
        ("T5Config", "not been compared"),
        ("Gemma3Config", "planned_batch alone.*; valid: its text model's, config.text_config"),
    ],
)
def test_models_that_are_not_computed_are_refused_by_name(kind: str, says: str) -> None:
    import transformers

    with pytest.raises(ConfigError, match=f"model_type is .*{says}.*[0-9]+ in all"):
        cp.attention_config(getattr(transformers, kind)(), 0)


def test_layers_and_ranks_that_do_not_exist_are_refused() -> None:
    config = make_config("llama")
    with pytest.raises(ConfigError, match="layer is 2; valid: 0 to 1"):
        cp.attention_config(config, 2)
    with pytest.raises(
        ConfigError, match="num_key_value_heads is 2; valid: a multiple of tensor_parallel_size, which is 4"
    ):
        cp.attention_config(config, 0, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_rank is 2; valid: 0 to 1"):
        cp.attention_config(config, 0, tensor_parallel_size=2, tensor_parallel_rank=2)
    with pytest.raises(ConfigError, match="remap is 'hidden'"):
        cp.build_plans(config, Documents(LENGTHS), Topology(1, 2), "hierarchical", remap="hidden")
    with pytest.raises(ConfigError, match=r"attention has dropout 0.2 and no dropout_seed"):
        cp.planned_batch(whole_batch(LENGTHS), make_config("llama", attention_dropout=0.2), None)
