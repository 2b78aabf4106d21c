"""Small random models of each family, and their steps: planned, and document by document without the suite."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_cp import Documents
from mindspeed_cp.integrations import huggingface as cp

VOCABULARY = 61
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GQA = {**_SMALL, "num_key_value_heads": 2}
_WIDE = {**_GQA, "head_dim": 16}
_TURNS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
_GRANITE = {
    **_GQA,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
_LATENT = {
    **_SMALL,
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}

#: Name -> class of the configuration, and its settings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA),
    "qwen2": ("Qwen2Config", {**_GQA, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GQA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mistral": ("MistralConfig", {**_GQA, "sliding_window": 9}),
    "mixtral": ("MixtralConfig", {**_GQA, "num_local_experts": 3}),
    "gemma2": ("Gemma2Config", {**_GQA, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3TextConfig", {**_GQA, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("GptOssConfig", {**_GQA, "head_dim": 8, "sliding_window": 6, "num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "first_k_dense_replace": 1}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True}),
    "bert": ("BertConfig", {**_SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "modernbert": ("ModernBertConfig", {**_SMALL, "local_attention": 8, "global_attn_every_n_layers": 2}),
    "gemma4": ("Gemma4TextConfig", {
        **_GQA, **_TURNS, "num_hidden_layers": 4, "layer_types": 2 * _TURNS["layer_types"], "head_dim": 4, "global_head_dim": 8,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "use_bidirectional_attention": "vision",
    }),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "topk_method": "group_limited_greedy", "max_position_embeddings": 64, "rope_parameters": {**_YARN, "mscale_all_dim": 1.0}}),
    "granite": ("GraniteConfig", _GRANITE),
    "ernie4_5": ("Ernie4_5Config", {**_WIDE, "use_bias": True}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**_WIDE, "rope_parameters": _ALPHA}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_GQA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "gemma": ("GemmaConfig", _WIDE),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT),
    "glm": ("GlmConfig", _WIDE),
    "glm4": ("Glm4Config", _WIDE),
    "glm4_moe": ("Glm4MoeConfig", {**_WIDE, **_ROUTED, "use_qk_norm": True}),
    "phi": ("PhiConfig", {**_GQA, "qk_layernorm": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("Phi3Config", {**_GQA, "sliding_window": 9}),
    "olmo": ("OlmoConfig", {**_GQA, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2Config", _GQA),
    "olmo3": ("Olmo3Config", {**_GQA, **_TURNS}),
    "olmoe": ("OlmoeConfig", {**_GQA, "num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3Config", {**_GQA, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7}),
    "ministral": ("MinistralConfig", {**_WIDE, **_TURNS}),
    "ministral3": ("Ministral3Config", {**_WIDE, "sliding_window": 9, "max_position_embeddings": 64, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}}),
    "cohere": ("CohereConfig", {**_GQA, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {**_GQA, **_TURNS}),
    "granitemoe": ("GraniteMoeConfig", {**_GRANITE, "num_local_experts": 3}),
    "seed_oss": ("SeedOssConfig", {**_WIDE, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {**_GQA, "moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 4}),
    "minimax_m2": ("MiniMaxM2Config", {**_WIDE, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {**_WIDE, "num_experts": 3, "moe_topk": 2, "rope_parameters": _ALPHA}),
    "dots1": ("Dots1Config", {**_GQA, **_ROUTED, **_TURNS, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "exaone4": ("Exaone4Config", {**_GQA, **_TURNS}),
    "starcoder2": ("Starcoder2Config", {**_GQA, "sliding_window": 9}),
    "gpt_neox": ("GPTNeoXConfig", {**_SMALL, "hidden_size": 64}),
    "apertus": ("ApertusConfig", _GQA),
    "arcee": ("ArceeConfig", _GQA),
    "helium": ("HeliumConfig", {**_GQA, "head_dim": 8}),
    "cwm": ("CwmConfig", {**_WIDE, **_TURNS}),
    "afmoe": ("AfmoeConfig", {**_WIDE, **_TURNS, **_EXPERTS, "num_experts": 4, "num_shared_experts": 1}),
    "exaone_moe": ("ExaoneMoeConfig", {**_WIDE, **_TURNS, **_EXPERTS, "num_experts": 4}),
    "hy_v3": ("HYV3Config", {**_WIDE, **_EXPERTS, "num_experts": 4}),
    "solar_open": ("SolarOpenConfig", {**_WIDE, **_ROUTED}),
    "youtu": ("YoutuConfig", _LATENT),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "scale_emb": 2.0}),
    "eurobert": ("EuroBertConfig", _GQA),
}  # fmt: skip

#: How many of these have tests that are not thorough. The attention of families behind them is read as that of others.
OWN = 18


def names() -> list[Any]:
    """Names of all models for a parametrized test, those behind the first OWN ones as thorough cases."""
    import pytest

    return [pytest.param(name, marks=() if i < OWN else pytest.mark.thorough) for i, name in enumerate(MODELS)]


def make_config(name: str, **changes: Any) -> Any:
    """Configuration of a small model."""
    import transformers

    kind, settings = MODELS[name]
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    return getattr(transformers, kind)(**deepcopy({**tokens, **settings, **changes}))


def make_model(config: Any, attention: str) -> torch.nn.Module:
    """Random model with the same weights for the same configuration, under an attention implementation."""
    import transformers

    kind = "AutoModelForMaskedLM" if cp.FAMILIES[config.model_type].mask == "full" else "AutoModelForCausalLM"
    torch.manual_seed(5)
    model = getattr(transformers, kind).from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # away from the zeros and ones of initialization
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            if key.endswith(".sinks"):  # as large as the scores of some tens of keys
                parameter.add_(3.0)
    return model.train()


@dataclass
class Step:
    """Result of one step: loss and gradients by the names of parameters."""

    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def largest_error(self, other: Step) -> float:
        """Largest difference of the loss, the norm of all gradients, and each gradient: relative to the largest of its
        tensor, and if that is small to a hundredth of the largest of all."""
        errors = [abs(self.loss - other.loss), abs(self.norm / other.norm - 1)]
        largest = max(float(gradient.abs().max()) for gradient in other.gradients.values())
        for name, gradient in self.gradients.items():
            scale = max(float(other.gradients[name].abs().max()), 0.01 * largest)
            errors.append(float((gradient - other.gradients[name]).abs().max()) / scale)
        return max(errors)

    @property
    def norm(self) -> float:
        """Norm of all gradients."""
        return float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm())


def mesh_of(ranks: int = 1, rank: int = 0, group: Any = None) -> Any:
    """Mesh of context-parallel ranks as one of them sees it, without processes unless there is a group."""
    return SimpleNamespace(
        mesh=np.arange(ranks), mesh_dim_names=("cp",), size=lambda: ranks, get_local_rank=lambda: rank,
        get_group=lambda: group, device_type="cpu",
    )  # fmt: skip


def whole_batch(lengths: tuple[int, ...], seed: int = 3) -> dict[str, torch.Tensor]:
    """One packed row; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(tokens.shape, generator=generator) < 0.2] = -100
    return {"input_ids": tokens, "labels": labels}


def reference_step(name: str, lengths: tuple[int, ...], **changes: Any) -> Step:
    """The documents one by one through the model as transformers computes it."""
    config = make_config(name, **changes)
    eager = name in ("gemma2", "gpt_oss")
    model = make_model(config, "eager" if eager else "sdpa")
    batch, shifts = whole_batch(lengths), cp.FAMILIES[config.model_type].mask == "causal"
    total, count = torch.zeros(()), 0
    for tokens, labels in zip(*(batch[key].split(lengths, 1) for key in ("input_ids", "labels")), strict=True):
        if not tokens.numel():
            continue
        logits = model(input_ids=tokens, use_cache=False).logits
        rows, targets = (logits[:, :-1], labels[:, 1:]) if shifts else (logits, labels)
        total = total + torch.nn.functional.cross_entropy(
            rows.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        count += int((targets != -100).sum())
    (total / count).backward()
    return Step(
        float(total.detach()) / count, {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    )


def planned_step(
    rank: int,
    group: Any,
    name: str,
    lengths: tuple[int, ...],
    algorithm: str,
    checkpoint: bool,
    changes: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> Step:
    """One rank's step; gradients are summed over the group."""
    cp.register()
    model = make_model(make_config(name, **changes), cp.IMPLEMENTATION)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ranks = 1 if group is None else group.size()
    mesh, documents = mesh_of(ranks, rank, group), Documents(lengths)
    batch, labels = cp.planned_batch(
        whole_batch(lengths), model.config, mesh, algorithm, documents=documents, dropout_seed=11, **options or {}
    )
    share = cp.loss(model(**batch).logits, labels, cp.count_labels(labels, group), group)
    share.backward()
    gradients = {key: x.grad / ranks for key, x in model.named_parameters() if x.grad is not None}
    total = share.detach() / ranks
    if ranks > 1:
        for gradient in [*gradients.values(), total]:
            dist.all_reduce(gradient, group=group)
    return Step(float(total), gradients)
