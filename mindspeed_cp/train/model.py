"""Megatron's GPT with planned attention, its DDP wrapper, optimizer and schedule, from the settings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_cp.config.model import MLA_KEYS, MOE_KEYS, ModelSettings
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import layer_attentions, megatron_imports
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.train.fused_operators import FusedOperators, choose_fused_operators
from mindspeed_cp.train.stages import build_stage_models, count_parameters
from mindspeed_cp.train.world import EXPERT_TENSOR_PARALLEL, World

with megatron_imports():
    from megatron.core import __version__ as MEGATRON_VERSION
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
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
        models: the bare parts of the model that this rank holds, one for each virtual pipeline stage, for checkpoints.
        ddp_models: they in Megatron's DDP.
        optimizer, schedule: Megatron's.
        fused: operators that run fused.
        parameters: weights of the whole model, over all ranks that share it; shared ones counted once.
    """

    config: TransformerConfig
    attentions: tuple[AttentionConfig, ...]
    models: Sequence[nn.Module]
    ddp_models: Sequence[nn.Module]
    optimizer: Any
    schedule: OptimizerParamScheduler
    fused: FusedOperators
    parameters: int

    def zero_gradients(self) -> None:
        """Set the gradients of all parts to zero."""
        for model in self.ddp_models:
            model.zero_grad_buffer()  # type: ignore[operator]


def build_training_model(settings: Settings, world: World) -> TrainingModel:
    """Build model, optimizer and schedule; weights do not depend on the number of ranks. Every rank must call it.

    Raises:
        ConfigError: Megatron or planned attention cannot honour a setting.
    """
    train, model = settings.train, settings.model
    torch.manual_seed(train.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(train.seed)
    config = transformer_config(settings)
    fused = choose_fused_operators(settings, world.device)
    fused.use_in_config(config)
    models = build_stage_models(settings, config, world, fused)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=train.use_distributed_optimizer
    )
    ddp_models = [
        DistributedDataParallel(config, ddp_config, Float16Module(config, part) if train.bf16 else part)
        for part in models
    ]
    for ddp_model in ddp_models:
        ddp_model.broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config(settings), ddp_models)
    fused.use_in_optimizer(optimizer)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [part.no_sync for part in ddp_models] if len(ddp_models) > 1 else ddp_models[0].no_sync
    config.grad_scale_func = optimizer.scale_loss
    return TrainingModel(
        config=config,
        attentions=layer_attentions(config, alibi=model.position_embedding_type == "alibi"),
        models=models,
        ddp_models=ddp_models,
        optimizer=optimizer,
        schedule=_schedule(settings, optimizer),
        fused=fused,
        parameters=count_parameters(models, settings, world),
    )


def _sinks(model: ModelSettings) -> dict[str, str]:
    """Return Megatron's setting of attention sinks, which older versions do not have."""
    if model.softmax_type == "vanilla":
        return {}
    if not hasattr(TransformerConfig, "softmax_type"):
        raise ConfigError(
            f"model.softmax_type is {model.softmax_type!r}, which Megatron-core {MEGATRON_VERSION} does not "
            "have; valid: vanilla, or Megatron-core 0.16 or later"
        )
    return {"softmax_type": model.softmax_type}


def transformer_config(settings: Settings) -> TransformerConfig:
    """Return Megatron's settings of the model.

    Raises:
        ConfigError: the installed version does not have a setting.
    """
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
        **_stages(settings),
        sequence_parallel=train.sequence_parallel,
        context_parallel_size=settings.context_parallel_suite.context_parallel_size,
        deterministic_mode=train.deterministic_mode,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,  # draws whole matrices: the same for any number of ranks
        # The other one takes all to have equally many tokens; Megatron looks at it without experts too.
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_sinks(model),
        **_latent(model),
        **_experts(settings),
    )
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's warning on its own default
        return kind(**values)


def _stages(settings: Settings) -> dict[str, Any]:
    """Return Megatron's settings of pipeline stages."""
    stages, virtual = settings.train.pipeline_model_parallel_size, settings.train.virtual_pipeline_model_parallel_size
    return {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "variable_seq_lengths": stages > 1,  # micro-batches differ in the rows of a rank
        # Of two stages, each is before and behind the other: batched messages in both directions would be mixed up.
        "overlap_p2p_comm": virtual > 1,
        "batch_p2p_comm": virtual == 1,
    }


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
