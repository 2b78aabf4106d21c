"""Rotary positions from the plan's layout instead of Megatron's hard-coded zig-zag."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import _rotate_half
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.batch import PlannedBatchParams


class PlannedRotary(nn.Module):
    """Takes the place of a GPTModel's ``rotary_pos_emb``; :func:`install_model` puts it there.

    Megatron asks it for rotary embeddings and gets None, so that Megatron rotates nothing. PlannedAttention then
    rotates query and key by :meth:`rotate`, at each row's position in its own document. Frequencies are those of the
    module that
    it replaces: rotary_base, rotary_percent, rotary_interleaved, seq_len_interpolation_factor and rope_scaling all
        count.

    Args:
        source: the RotaryEmbedding that Megatron built.
    """

    def __init__(self, source: RotaryEmbedding) -> None:
        super().__init__()
        self.source = source

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """No rotary embedding for Megatron's attention layers to apply."""
        return None

    def get_rotary_seq_len(self, inference_context: Any = None, *args: Any, **kwargs: Any) -> int:
        """Megatron asks for the length of the table that it wants from forward; there is none."""
        if inference_context is not None or kwargs.get("inference_params") is not None:
            raise ConfigError(
                "planned attention trains and evaluates only; generate with a model built from the original spec"
            )
        return 0

    def rotate(self, x: Tensor, params: PlannedBatchParams) -> Tensor:
        """Rotate query or key by position.

        Args:
            x: [rows, heads, dim], this rank's rows in the plan's order.
            params: the micro-batch; cos and sin are made once for it and shared by all layers.

        Returns:
            [rows, heads, dim], as Megatron's own (unfused) rotation gives it, to the bit.
        """
        if not len(x):
            return x
        tables = params.tables.setdefault(self, {})
        key = (x.device, x.dtype)
        if key not in tables:
            tables[key] = self._cos_sin(params, x.device, x.dtype)
        cos, sin = tables[key]
        turned, kept = x.unsqueeze(1).split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        turned = turned * cos + _rotate_half(turned, self.source.rotary_interleaved) * sin
        return torch.cat((turned, kept), dim=-1).squeeze(1)

    def _cos_sin(self, params: PlannedBatchParams, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [rows, 1, 1, rotary_dim] in the dtype of the rows."""
        assert params.plan is not None
        # Out of inference mode: the tables may outlive it, and training could not save them for its backward.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.from_numpy(params.plan.layout.positions(params.rank)).to(self.source.inv_freq.device)
            # Megatron's own frequencies (interpolation and scaling included) of one row at offset p, for all p at once.
            freqs = self.source.get_freqs_non_repeated(1, offset=positions)
            if self.source.rotary_interleaved:
                freqs = freqs.repeat_interleave(2, dim=-1)
            else:
                freqs = torch.cat((freqs, freqs), dim=-1)
            freqs = freqs[:, None, None, :].to(device)
            return freqs.cos().to(dtype), freqs.sin().to(dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(f"{prefix}inv_freq", None)  # stored by old checkpoints of the module this one replaces
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
