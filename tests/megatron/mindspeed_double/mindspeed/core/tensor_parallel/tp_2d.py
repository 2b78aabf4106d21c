"""MindSpeed's 2-D tensor parallelism."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class MindSpeedRotaryEmbedding2D(RotaryEmbedding):
    pass
