"""Patches Megatron when it is imported, by the flags on the command line, as core_r0.16.0 does."""

from mindspeed.args_utils import parse
from mindspeed.patch_utils import replace

ARGS = parse()

CORE = "megatron.core"
TRANSFORMER = f"{CORE}.transformer"
LATENT = f"{TRANSFORMER}.multi_latent_attention"
ROPE = f"{CORE}.models.common.embeddings.rope_utils"
ROTARY = f"{CORE}.models.common.embeddings.rotary_pos_embedding"


def patch_always() -> None:
    from mindspeed.core.fusions import fused_bias_swiglu, fused_rope
    from mindspeed.core.megatron_basic import arguments_basic
    from mindspeed.core.megatron_basic.megatron_basic import PTNorm
    from mindspeed.core.optimizer.fix_duplicate_allgather import get_megatron_optimizer_wrapper

    config = f"{TRANSFORMER}.transformer_config"
    replace(f"{config}.TransformerConfig.__init__", arguments_basic.config_init_wrapper)
    replace(f"{config}.MLATransformerConfig.__init__", arguments_basic.config_init_wrapper)
    for name in ("models.gpt.gpt_layer_specs.LNImpl", "transformer.torch_norm.WrappedTorchNorm"):
        replace(f"{CORE}.{name}", PTNorm)
    replace(f"{TRANSFORMER}.transformer_block.LayerNormImpl", PTNorm)
    replace(f"{CORE}.optimizer.get_megatron_optimizer", get_megatron_optimizer_wrapper)
    replace(f"{CORE}.fusions.fused_bias_swiglu.SwiGLUFunction", fused_bias_swiglu.SwiGLUFunction)
    replace(f"{CORE}.fusions.fused_bias_swiglu.BiasSwiGLUFunction", fused_bias_swiglu.BiasSwiGLUFunction)
    replace(f"{ROPE}._apply_rotary_pos_emb_bshd", fused_rope.apply_rotary_pos_emb_bshd)
    replace(f"{ROPE}.apply_rotary_pos_emb", fused_rope.apply_rotary_pos_emb)


def patch_context_parallelism() -> None:
    from mindspeed.core.context_parallel import adaptor, model_parallel_utils, rotary_pos_embedding_utils

    replace(f"{TRANSFORMER}.dot_product_attention.DotProductAttention", adaptor.MindSpeedCPDotProductAttention)
    replace(f"{TRANSFORMER}.attention.Attention.__init__", adaptor.attention_init_wrapper)
    replace(f"{CORE}.parallel_state.initialize_model_parallel", model_parallel_utils.initialize_model_parallel_wrapper)
    replace(f"{CORE}.parallel_state.destroy_model_parallel", model_parallel_utils.destroy_model_parallel_wrapper)
    replace(f"{ROTARY}.get_pos_emb_on_this_cp_rank", rotary_pos_embedding_utils.get_pos_emb_on_this_cp_rank)


patch_always()
if ARGS.context_parallel_size > 1:
    patch_context_parallelism()
if ARGS.multi_latent_attention:
    from mindspeed.core.transformer.multi_head_latent_attention.adaptor import multi_latent_attention_init_impl

    replace(f"{LATENT}.MultiLatentAttention.__init__", multi_latent_attention_init_impl)
if ARGS.recompute_method == "block":
    from mindspeed.core.memory.common import transformer_block_checkpointed_forward

    replace(
        f"{TRANSFORMER}.transformer_block.TransformerBlock._checkpointed_forward",
        transformer_block_checkpointed_forward,
    )
