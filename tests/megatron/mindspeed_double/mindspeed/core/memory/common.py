"""MindSpeed's recomputation of the first layers of a stage; its layers get no padding_mask."""

from typing import Any

from megatron.core import tensor_parallel
from mindspeed.calls import CALLS
from torch import Tensor


def transformer_block_checkpointed_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any,
    context: Any,
    context_mask: Any,
    rotary_pos_emb: Any,
    attention_bias: Any,
    packed_seq_params: Any,
    use_inner_quantization_context: bool,
    padding_mask: Tensor | None = None,
) -> Tensor:
    for number, layer in enumerate(self.layers):
        CALLS["recomputation"] += 1

        def forward(x: Tensor, layer: Any = layer) -> Tensor:
            output: Tensor = layer(hidden_states=x, attention_mask=None, packed_seq_params=packed_seq_params)[0]
            return output

        recomputed = number < self.config.recompute_num_layers
        hidden_states = (
            tensor_parallel.checkpoint(forward, False, hidden_states) if recomputed else forward(hidden_states)
        )
    return hidden_states
