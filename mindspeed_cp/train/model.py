"""Megatron's GPT with planned attention, its DDP wrapper, optimizer and schedule, from the settings.

For pipeline stages and the distributed optimizer there is Megatron's own script (docs/megatron.md).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_cp.config.model import MLA_KEYS, MOE_KEYS
from mindspeed_cp.config.rules import VOCAB_SIZE_DIVISIBLE_BY
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.data.corpus import VOCAB_SIZE
from mindspeed_cp.megatron import install, install_model, layer_attentions, local_spec, megatron_imports
from mindspeed_cp.plan import AttentionConfig
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
        world: this rank among all, and the settings of the run.
        config: Megatron's settings of the model.
        attentions: attention of each layer on this tensor-parallel rank: the third input of build_plan.
        model: the bare model, for checkpoints.
        ddp_model: it in Megatron's DDP.
        optimizer, schedule: Megatron's.
    """

    world: World
    config: TransformerConfig
    attentions: tuple[AttentionConfig, ...]
    model: GPTModel
    ddp_model: DistributedDataParallel
    optimizer: Any
    schedule: OptimizerParamScheduler


def build_training_model(world: World) -> TrainingModel:
    """Build model, optimizer and schedule; weights do not depend on the number of ranks. Every rank must call it.

    Raises:
        ConfigError: Megatron or planned attention cannot honour a setting.
    """
    settings = world.settings
    train, model = settings.train, settings.model
    torch.manual_seed(train.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(train.seed)
    config = transformer_config(settings)
    gpt = build_gpt(config, world)
    ddp_model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        Float16Module(config, gpt) if train.bf16 else gpt,
    )
    ddp_model.broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config(settings), [ddp_model])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp_model.no_sync
    config.grad_scale_func = optimizer.scale_loss
    return TrainingModel(
        world=world,
        config=config,
        attentions=layer_attentions(config, alibi=model.position_embedding_type == "alibi"),
        model=gpt,
        ddp_model=ddp_model,
        optimizer=optimizer,
        schedule=_schedule(settings, optimizer),
    )


def transformer_config(settings: Settings) -> TransformerConfig:
    """Return Megatron's settings of the model."""
    model, train = settings.model, settings.train
    dtype = torch.bfloat16 if train.bf16 else torch.float32
    whole_layers = model.recompute_granularity == "full"
    values: dict[str, Any] = dict(
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
        softmax_type=model.softmax_type,
        window_size=None if model.window_size is None else tuple(model.window_size),
        window_attn_skip_freq=model.window_attn_skip_freq,
        recompute_granularity=model.recompute_granularity,
        recompute_method="uniform" if whole_layers else None,
        recompute_num_layers=1 if whole_layers else None,
        bf16=train.bf16,
        params_dtype=dtype,
        tensor_model_parallel_size=train.tensor_model_parallel_size,
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
    )
    if model.num_moe_experts is not None:
        values |= {key: getattr(model, key) for key in ("num_moe_experts", *MOE_KEYS)}
        values |= dict(
            moe_ffn_hidden_size=model.resolved_moe_ffn_hidden_size,
            moe_router_dtype="fp32",
            expert_model_parallel_size=train.expert_model_parallel_size,
            expert_tensor_parallel_size=EXPERT_TENSOR_PARALLEL,
        )
    kind = TransformerConfig
    if model.multi_latent_attention:
        kind = MLATransformerConfig
        values |= {key: getattr(model, key) for key in ("rotary_base", *MLA_KEYS)}
        values |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}  # Megatron's defaults are of YaRN
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # Megatron's warning on its own default
        return kind(**values)


def build_gpt(config: TransformerConfig, world: World) -> GPTModel:
    """Return the model, on this rank's device, with planned attention; a weight has the same initial value for any
    number of ranks.

    Raises:
        ConfigError: Megatron or planned attention cannot honour a setting.
    """
    settings, model = world.settings, world.settings.model
    alibi = model.position_embedding_type == "alibi"
    spec = install(local_spec(config), settings.context_parallel_suite, alibi=alibi)
    gpt = GPTModel(
        config,
        spec,
        # The padding does not depend on tensor-parallel ranks, as padded rows take part in the softmax.
        vocab_size=-(-VOCAB_SIZE // VOCAB_SIZE_DIVISIBLE_BY) * VOCAB_SIZE_DIVISIBLE_BY,
        max_sequence_length=settings.data.seq_length,
        position_embedding_type="none" if alibi else model.position_embedding_type,
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
    )
    install_model(gpt)
    return gpt.to(world.device)


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
