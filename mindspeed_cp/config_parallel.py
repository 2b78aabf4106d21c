"""Checks of how the model and its batches are split beside the context: experts, sequence parallelism, balance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings


def check_parallel(settings: Settings) -> None:
    """Raise the error of the first settings that do not fit together."""
    model, train = settings.model, settings.train
    tp, ep, experts = train.tensor_model_parallel_size, train.expert_model_parallel_size, model.num_moe_experts
    key = "train.expert_model_parallel_size"
    if experts is None:
        if ep > 1:
            rule = "there are no experts to share; give model.num_moe_experts, or use 1"
            raise bad_value(key, ep, rule)
    else:
        if experts % ep:
            valid = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            raise bad_value(key, ep, f"must divide model.num_moe_experts = {experts}; valid: {valid}")
        if tp > 1 and not train.sequence_parallel:
            rule = f"with experts and train.tensor_model_parallel_size = {tp} it must be true; Megatron asks for it"
            raise bad_value("train.sequence_parallel", False, rule)
        shared = model.moe_shared_expert_intermediate_size
        if shared is not None and shared % tp:
            rule = f"must be a multiple of train.tensor_model_parallel_size = {tp}"
            raise bad_value("model.moe_shared_expert_intermediate_size", shared, rule)
    if model.multi_latent_attention:
        _check_latent(settings)
    _check_balance(settings)
    suite = settings.context_parallel_suite
    placing = {"layout": suite.layout == "balanced", "algorithm": suite.algorithm == "hierarchical"}
    for key, places in placing.items():
        if places and model.window_layers not in (0, model.num_layers):
            rule = (
                "places documents by the work of a layer, and model.window_attn_skip_freq makes layers differ, which "
                f"must hold the same rows; use {'zigzag' if key == 'layout' else 'direct'}, or windows in all layers"
            )
            raise bad_value(f"context_parallel_suite.{key}", getattr(suite, key), rule)


def _check_balance(settings: Settings) -> None:
    model = settings.model
    kind, weight = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if settings.data.balance == "time" and model.num_moe_experts is not None and kind != "none" and weight:
        rule = (
            f"lays rows anew for every number of replicas, and model.moe_router_load_balancing_type = {kind} with "
            f"model.moe_aux_loss_coeff = {weight:g} is a loss of whole rows, which would be another one; use none, or "
            "model.moe_aux_loss_coeff: 0"
        )
        raise bad_value("data.balance", "time", rule)


def check_expert_ranks(settings: Settings, world_size: int) -> None:
    """ConfigError unless `world_size` ranks can share the experts."""
    ep = settings.train.expert_model_parallel_size
    if world_size % ep:
        raise ConfigError(
            f"{world_size} ranks do not fit train.expert_model_parallel_size = {ep}, which must divide their number: "
            f"every expert is on equally many ranks; start a multiple of {ep}"
        )


def _check_latent(settings: Settings) -> None:
    model, train = settings.model, settings.train
    tp = train.tensor_model_parallel_size
    for key, width in (
        ("model.q_lora_rank", model.q_lora_rank or 0),
        ("model.kv_lora_rank + model.qk_pos_emb_head_dim", model.kv_lora_rank + model.qk_pos_emb_head_dim),
    ):
        if width % tp:
            raise bad_value("train.tensor_model_parallel_size", tp, f"must divide {key} = {width}")
    if model.qk_layernorm and model.q_lora_rank is not None and tp > 1 and not train.sequence_parallel:
        rule = (
            "must be false with model.q_lora_rank and tensor parallelism: Megatron would add up the gradient of that "
            "norm once for every rank; or set train.sequence_parallel: true"
        )
        raise bad_value("model.qk_layernorm", True, rule)
