"""REPLACEMENTS: the attributes of Megatron that MindSpeed replaces near attention, and what becomes of each.

Read from its sources: the features of 26.1.0 for Megatron 0.12.1 and of the branches core_r0.16.0 and core_r0.18.0. A
test compares the table with the tree that the environment variable MINDSPEED names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["kept", "unused", "refused"]

_CORE = "megatron.core"
_ATTENTION = f"{_CORE}.transformer.attention"
_LATENT = f"{_CORE}.transformer.multi_latent_attention"
_ROPE = f"{_CORE}.models.common.embeddings.rope_utils"
_ROTARY = f"{_CORE}.models.common.embeddings.rotary_pos_embedding"
_P2P = f"{_CORE}.pipeline_parallel.p2p_communication"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_LATER = f"{_CORE}.transformer.multi_token_prediction"
_DATA = f"{_CORE}.datasets.gpt_dataset"
_TE = f"{_CORE}.extensions.transformer_engine"

#: Lines of MindSpeed, by the Megatron that they are for.
LINES = ("0.12", "0.16", "0.18")


@dataclass(frozen=True)
class Replacement:
    """Attributes of Megatron that MindSpeed replaces for one purpose.

    Attributes:
        names: dotted names.
        flag: flag that makes MindSpeed replace them; "always" if none is needed.
        verdict: "kept": MindSpeed's is used; "unused": nothing calls it with planned attention; "refused": an error.
        reason: why.
        lines: those of :data:`LINES` that do so.
        kept: of a refused row, modules of MindSpeed whose replacement of the same names changes nothing.
    """

    names: tuple[str, ...]
    flag: str
    verdict: Verdict
    reason: str
    lines: tuple[str, ...] = LINES
    kept: tuple[str, ...] = ()


_OLD = ("0.12", "0.16")
_EOD = "--reset-attention-mask (pass --reset-position-ids --cp-plan-documents)"

REPLACEMENTS = (
    # Attention
    Replacement(
        (f"{_CORE}.transformer.dot_product_attention.DotProductAttention",),
        "--context-parallel-size; --position-embedding-type alibi",
        "unused",
        "PlannedAttention is core attention",
    ),
    Replacement(
        (
            f"{_CORE}.transformer.dot_product_attention.DotProductAttention.__init__",
            f"{_CORE}.transformer.dot_product_attention.DotProductAttention.forward",
        ),
        "always, without context parallelism; --multi-latent-attention; --unaligned-linear",
        "unused",
        "PlannedAttention is core attention",
    ),
    Replacement(
        (f"{_TE}.TEDotProductAttention", f"{_TE}.TEDotProductAttention.forward"),
        "always",
        "unused",
        "PlannedAttention is core attention",
        _OLD,
    ),
    Replacement(
        (f"{_TE}.TEDotProductAttention.__init__",),
        "--cp-window-size, --use-cp-send-recv-overlap",
        "unused",
        "PlannedAttention is core attention",
        ("0.18",),
    ),
    Replacement(
        (f"{_ATTENTION}.Attention.__init__",),
        "--tp-2d, --unaligned-linear",
        "refused",
        "it gives ranks other heads than plans are built for",
        kept=("mindspeed.core.context_parallel.adaptor",),
    ),
    Replacement(
        (f"{_ATTENTION}.SelfAttention.__init__",),
        "--tp-2d",
        "refused",
        "it gives ranks other heads than plans are built for",
        kept=("mindspeed.features_manager.transformer.module_rearrange.mcore_model_rearrange",),
    ),
    Replacement(
        (f"{_ATTENTION}.Attention.forward", f"{_LATENT}.MultiLatentAttention.forward"),
        _EOD,
        "refused",
        "it takes packed_seq_params for a tensor of lengths and rotates by its own positions",
    ),
    Replacement(
        (f"{_LATENT}.MLASelfAttention", f"{_LATENT}.MLASelfAttention.get_query_key_value_tensors"),
        f"{_EOD}, or --use-dsa-absorb",
        "refused",
        "PlannedMLASelfAttention derives from Megatron's",
    ),
    Replacement(
        (f"{_LATENT}.MultiLatentAttention.__init__",),
        "--multi-latent-attention",
        "kept",
        "core attention is built by the spec; plans are built for its scale, which is by mscale",
        _OLD,
    ),
    Replacement(
        (f"{_CORE}.transformer.module.MegatronModule.__init__",),
        "always",
        "kept",
        "it only reserves the order of weights for --overlap-param-gather",
    ),
    # Positions
    Replacement(
        (f"{_ROTARY}.RotaryEmbedding",),
        "--tp-2d",
        "refused",
        "rotary positions come from the plan, by Megatron's class",
    ),
    Replacement(
        (f"{_ROTARY}.RotaryEmbedding.forward", f"{_ROTARY}._apply_rotary_pos_emb_thd"),
        _EOD,
        "refused",
        "rotary positions come from the plan",
        _OLD,
    ),
    Replacement(
        (f"{_ROTARY}.RotaryEmbedding.get_rotary_seq_len",),
        f"{_EOD}, or --unaligned-linear",
        "refused",
        "rotary positions come from the plan",
    ),
    Replacement(
        (f"{_ROTARY}.get_pos_emb_on_this_cp_rank",),
        "--context-parallel-size",
        "unused",
        "no table of positions is cut: each row has its own",
        _OLD,
    ),
    Replacement(
        (f"{_ROPE}.apply_rotary_pos_emb", f"{_ROPE}._apply_rotary_pos_emb_bshd"),
        "always",
        "kept",
        "PlannedRotary calls its fused operator under --use-fused-rotary-pos-emb, on the cos and sin of the plan",
    ),
    Replacement(
        (f"{_ROPE}._apply_rotary_pos_emb_thd",),
        f"{_EOD}; 0.16: with --use-dsa-absorb",
        "refused",
        "rotary positions come from the plan",
        ("0.16", "0.18"),
    ),
    # Batches, models, losses
    Replacement(
        (f"{_CORE}.models.gpt.gpt_model.GPTModel.forward",), _EOD, "refused", "it puts a tensor in packed_seq_params"
    ),
    Replacement(
        (f"{_DATA}.GPTDataset.__getitem__", f"{_DATA}._get_ltor_masks_and_position_ids"),
        _EOD,
        "refused",
        "documents are those of restarting positions",
    ),
    Replacement(
        (
            "megatron.training.utils.get_batch_on_this_cp_rank",
            "megatron.training.utils.get_batch_on_this_tp_rank",
            f"{_CORE}.utils.get_batch_on_this_cp_rank",
            f"{_CORE}.utils.get_batch_on_this_tp_rank",
        ),
        "--context-parallel-size; --reset-attention-mask; --schedules-method dualpipev",
        "unused",
        "get_batch of mindspeed_cp.megatron.pretrain reads whole rows and cuts them by the plan",
    ),
    Replacement(
        (f"{_CORE}.tensor_parallel.cross_entropy.VocabParallelCrossEntropy.calculate_predicted_logits",),
        "always",
        "kept",
        "the loss function sums what it returns",
    ),
    Replacement(
        ("megatron.training.training.train_step",),
        "--async-log-allreduce",
        "refused",
        "its log takes losses that are already averaged",
        kept=(
            "mindspeed.functional.profile.adaptor",
            "mindspeed.functional.tflops_calculate.tflops_utils",
            "mindspeed.functional.npu_datadump.npu_datadump",
            "mindspeed.core.memory.smart_swap.swap_megatron_adaptor",
        ),
    ),
    # Groups and pipelines
    Replacement(
        (f"{_CORE}.parallel_state.initialize_model_parallel", f"{_CORE}.parallel_state.destroy_model_parallel"),
        "--context-parallel-size and others",
        "kept",
        "it adds groups of its own beside Megatron's, which planned attention asks for",
    ),
    Replacement(
        (f"{_P2P}._p2p_ops", f"{_P2P}._batched_p2p_ops", f"{_P2P}.P2PCommunicator._communicate"),
        _EOD,
        "refused",
        "it sends lengths and positions of its own between stages",
    ),
    Replacement(
        (f"{_P2P}._communicate", f"{_P2P}._communicate_shapes"),
        "--variable-seq-lengths",
        "kept",
        "stages tell each other the numbers of their rows",
    ),
    Replacement(
        (f"{_SCHEDULES}.get_tensor_shapes", f"{_SCHEDULES}.forward_step", f"{_SCHEDULES}.backward_step"),
        "--use-multiparameter-pipeline-model-parallel, --tp-2d, --schedules-method dualpipev; 0.16: "
        "pack_sequences_in_batch of Megatron-Bridge",
        "refused",
        "stages exchange rows of any number",
    ),
    # Multi-token prediction
    Replacement(
        (f"{_LATER}.MultiTokenPredictionBlock.forward", f"{_LATER}.MultiTokenPredictionLayer.forward"),
        "--moe-fb-overlap; 0.16: --fp8-format",
        "refused",
        "its layers take no packed_seq_params",
    ),
    Replacement(
        (f"{_LATER}.MultiTokenPredictionLayer._checkpointed_forward",),
        "pack_sequences_in_batch of Megatron-Bridge",
        "refused",
        "recomputed layers get packed_seq_params by a patch of this package",
        ("0.16",),
    ),
    Replacement(
        (f"{_LATER}.get_mtp_num_layers_to_build",),
        "--schedules-method dualpipev",
        "refused",
        "its schedule has not been tried with rows that differ between micro-batches",
    ),
    # Layers
    Replacement(
        (
            f"{_CORE}.transformer.torch_norm.WrappedTorchNorm",
            f"{_CORE}.models.gpt.gpt_layer_specs.LNImpl",
            f"{_CORE}.transformer.transformer_block.LayerNormImpl",
            f"{_TE}.TENorm",
        ),
        "always",
        "kept",
        "fused norms; local_spec leaves them in place",
        _OLD,
    ),
    Replacement(
        (
            f"{_CORE}.fusions.fused_bias_swiglu.SwiGLUFunction",
            f"{_CORE}.fusions.fused_bias_swiglu.BiasSwiGLUFunction",
        ),
        "always",
        "kept",
        "fused swiglu, row by row",
    ),
    Replacement(
        (
            f"{_TE}.TEColumnParallelLinear",
            f"{_TE}.TERowParallelLinear",
            f"{_TE}.TELayerNormColumnParallelLinear",
            f"{_TE}.TEGroupedLinear",
        ),
        "always",
        "kept",
        "linear layers take any number of rows",
        _OLD,
    ),
    Replacement(
        (f"{_CORE}.optimizer.get_megatron_optimizer",),
        "always",
        "kept",
        "gradients are those of Megatron's own schedule",
    ),
    Replacement(
        (f"{_CORE}.transformer.transformer_layer.TransformerLayer.forward",),
        "--recompute-norm",
        "kept",
        "it hands packed_seq_params to attention; the flag is refused where it takes no padding_mask (0.16)",
    ),
    Replacement(
        (f"{_CORE}.transformer.transformer_block.TransformerBlock._checkpointed_forward",),
        "--recompute-method block, --swap-attention",
        "kept",
        "it hands packed_seq_params to layers",
        _OLD,
    ),
    Replacement(
        (f"{_CORE}.recompute.checkpointed_forward",),
        "--recompute-method block, --swap-attention",
        "kept",
        "it hands packed_seq_params to layers",
        ("0.18",),
    ),
    Replacement(
        (f"{_CORE}.transformer.moe.router.TopKRouter.routing", f"{_CORE}.transformer.moe.moe_layer.MoELayer"),
        "--moe-tp-extend-ep, --moe-alltoall-overlap-comm, --moe-allgather-overlap-comm, --moe-alltoall-mc2",
        "refused",
        "its losses take every rank to hold as many tokens",
    ),
    # Settings
    Replacement(
        (
            f"{_CORE}.transformer.transformer_config.TransformerConfig.__init__",
            f"{_CORE}.transformer.transformer_config.TransformerConfig.__post_init__",
            f"{_CORE}.transformer.transformer_config.MLATransformerConfig.__init__",
        ),
        "always",
        "kept",
        "it puts all arguments into the config, where MINDSPEED_RULES read them",
    ),
)
