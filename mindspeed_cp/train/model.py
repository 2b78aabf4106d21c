"""Megatron's GPT with planned attention, its DDP wrapper, optimizer and schedule, from the settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_cp.config.model import MLA_KEYS, MOE_KEYS, ModelSettings
from mindspeed_cp.config.rules import VOCAB_SIZE_DIVISIBLE_BY
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data import VOCAB_SIZE
from mindspeed_cp.megatron import install, install_model, layer_attentions, local_spec, megatron_imports
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.train.finite_probe import FiniteProbe
from mindspeed_cp.train.fused_operators import FusedOperators, choose_fused_operators
from mindspeed_cp.train.world import EXPERT_TENSOR_PARALLEL, World

with megatron_imports():
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

NOT_CLIPPED = 1e30  # clipping to this changes nothing, and Megatron measures the norm only where it clips


@dataclass(frozen=True)
class TrainingModel:
    """Model, optimizer and schedule of a training.

    Attributes:
        config: Megatron's settings of the model.
        attentions: attention of each layer on this tensor-parallel rank: the third input of build_plan.
        gpt: the bare model, for checkpoints.
        ddp_model: the model in Megatron's DDP.
        optimizer, schedule: Megatron's.
        fused: operators that run fused.
        probe: tells which layer gave the first value of a step that is not finite.
        parameters: weights of the whole model, over all tensor- and expert-parallel ranks; shared ones counted once.
    """

    config: TransformerConfig
    attentions: tuple[AttentionConfig, ...]
    gpt: nn.Module
    ddp_model: nn.Module
    optimizer: Any
    schedule: OptimizerParamScheduler
    fused: FusedOperators
    probe: FiniteProbe
    parameters: int


def padded_vocabulary() -> int:
    """Return the rows of the embedding: byte values and the end-of-document token, padded so that tensor-parallel ranks
    can share them. The number does not depend on these ranks, as padded rows take part in the softmax."""
    return -(-VOCAB_SIZE // VOCAB_SIZE_DIVISIBLE_BY) * VOCAB_SIZE_DIVISIBLE_BY


def build_training_model(settings: Settings, world: World) -> TrainingModel:
    """Build model, optimizer and schedule; weights are equal on all ranks and for any number of ranks.

    Raises:
        ConfigError: Megatron or planned attention cannot honour a setting.
    """
    train, model = settings.train, settings.model
    torch.manual_seed(train.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(train.seed)
    config = transformer_config(settings)
    fused = choose_fused_operators(settings, world.device)
    fused.use_in_config(config)
    alibi = model.position_embedding_type == "alibi"
    spec = install(local_spec(config, norm=fused.norm), settings.context_parallel_suite, alibi=alibi)
    gpt = GPTModel(
        config,
        spec,
        vocab_size=padded_vocabulary(),
        max_sequence_length=settings.data.seq_length,
        position_embedding_type="none" if alibi else model.position_embedding_type,
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
    )
    install_model(gpt)
    fused.use_in_model(gpt)
    gpt.to(world.device)
    ddp_model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=train.use_distributed_optimizer
        ),
        Float16Module(config, gpt) if train.bf16 else gpt,
    )
    ddp_model.broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config(settings), [ddp_model])
    fused.use_in_optimizer(optimizer)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp_model.no_sync
    config.grad_scale_func = optimizer.scale_loss
    return TrainingModel(
        config=config,
        attentions=layer_attentions(config, alibi=alibi),
        gpt=gpt,
        ddp_model=ddp_model,
        optimizer=optimizer,
        schedule=_schedule(settings, optimizer),
        fused=fused,
        probe=FiniteProbe(gpt),
        parameters=_count(gpt, world.tp_size, train.expert_model_parallel_size),
    )


def transformer_config(settings: Settings) -> TransformerConfig:
    """Return Megatron's settings of the model."""
    model, train = settings.model, settings.train
    dtype = torch.bfloat16 if train.bf16 else torch.float32
    whole_layers = model.recompute_granularity == "full"
    values = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim_v,
        ffn_hidden_size=model.resolved_ffn_hidden_size,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.swiglu,
        activation_func=torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        add_bias_linear=model.add_bias_linear,
        init_method_std=model.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=model.attention_dropout,
        window_size=None if model.window_size is None else tuple(model.window_size),
        window_attn_skip_freq=model.window_attn_skip_freq,
        recompute_granularity=model.recompute_granularity,
        recompute_method="uniform" if whole_layers else None,
        recompute_num_layers=1 if whole_layers else None,
        bf16=train.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=train.tensor_model_parallel_size,
        sequence_parallel=train.sequence_parallel,
        context_parallel_size=settings.context_parallel_suite.context_parallel_size,
        deterministic_mode=train.deterministic_mode,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,  # draws whole matrices: the same for any number of ranks
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_latent(model),
        **_experts(settings),
    )
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's warning on its own default
        return kind(**values)


def _latent(model: ModelSettings) -> dict[str, Any]:
    """Return Megatron's settings of multi-latent attention."""
    if not model.multi_latent_attention:
        return {}
    return {"rotary_base": model.rotary_base, **{key: getattr(model, key) for key in MLA_KEYS}}


def _experts(settings: Settings) -> dict[str, Any]:
    """Return Megatron's settings of experts."""
    model = settings.model
    if model.num_moe_experts is None:
        return {}
    return {
        **{key: getattr(model, key) for key in ("num_moe_experts", *MOE_KEYS)},
        "moe_ffn_hidden_size": model.resolved_moe_ffn_hidden_size,
        "moe_router_dtype": "fp32",
        # The other dispatcher takes all ranks to hold equally many tokens.
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": settings.train.expert_model_parallel_size,
        "expert_tensor_parallel_size": EXPERT_TENSOR_PARALLEL,
    }


def optimizer_config(settings: Settings) -> OptimizerConfig:
    """Return Megatron's settings of Adam."""
    train = settings.train
    return OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad or NOT_CLIPPED,
        bf16=train.bf16,
        params_dtype=torch.bfloat16 if train.bf16 else torch.float32,
        use_distributed_optimizer=train.use_distributed_optimizer,
    )


def _schedule(settings: Settings, optimizer: Any) -> OptimizerParamScheduler:
    train = settings.train
    steps = train.lr_decay_iters or train.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.lr_warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=train.lr_decay_style,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # those of the settings, which may change on resume
    )


def _count(gpt: nn.Module, tp: int, ep: int) -> int:
    """Return the number of weights of the whole model; tensor-parallel ranks hold parts of matrices, and a rank holds
    only its own experts."""
    total = 0
    for name, parameter in gpt.named_parameters():
        shared_by = tp if getattr(parameter, "tensor_model_parallel", False) else 1
        total += parameter.numel() * (ep if ".local_experts." in name else shared_by)
    return total
