"""Rotary positions from the plan's layout instead of Megatron's hard-coded zig-zag."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.patches.versions import yarn_angles
from mindspeed_cp.ops.fused import plain


class UncutGroup:
    """A context-parallel group that reports one rank, for Megatron's rotary modules.

    These would split their tables over the ranks, or fail if a table does not divide by twice their number.

    Args:
        group: the real group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def size(self) -> int:
        """Return 1, so that no table is split."""
        return 1

    def rank(self) -> int:
        """Return the number of the only rank."""
        return 0


class PlannedRotary(nn.Module):
    """Replacement of a GPTModel's ``rotary_pos_emb``; :func:`install_model` installs it.

    It returns no rotary embedding, so that Megatron rotates nothing. PlannedAttention rotates query and key by
    :meth:`rotate`, at each row's position in its own document. Frequencies are those of the module that it replaces:
    rotary_base, rotary_percent, rotary_interleaved, seq_len_interpolation_factor, rope_scaling and all settings of YaRN
    are honoured.

    Args:
        source: the RotaryEmbedding or YarnRotaryEmbedding that Megatron built.

    Attributes:
        rotary_mul: rotates channels: mindspeed_cp.ops.fused.plain.rotary_mul, or the fused operator of an NPU.
    """

    def __init__(self, source: RotaryEmbedding) -> None:
        super().__init__()
        self.source = source
        self.rotary_mul = plain.rotary_mul

    @property
    def is_yarn(self) -> bool:
        """True for YaRN, whose module returns a pair: the embedding, and a factor of cos and sin."""
        return isinstance(self.source, YarnRotaryEmbedding)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return no rotary embedding, so that Megatron's attention layers apply none."""
        return (None, 1.0) if self.is_yarn else None

    def get_rotary_seq_len(self, inference_context: Any = None, *args: Any, **kwargs: Any) -> int:
        """Return 0, the length of the table that Megatron requests from forward."""
        if inference_context is not None or kwargs.get("inference_params") is not None:
            raise ConfigError(
                "planned attention trains and evaluates only; generate with a model built from the original spec"
            )
        return 0

    def rotate(self, x: Tensor, params: PlannedBatchParams) -> Tensor:
        """Rotate query or key by position.

        Args:
            x: [rows, heads, dim], this rank's rows in the plan's order.
            params: parameters of the micro-batch, whose cos and sin all layers share.

        Returns:
            [rows, heads, dim], bit for bit equal to Megatron's own (unfused) rotation; to rounding by a fused operator.
        """
        if not len(x):
            return x
        cos, sin = self.cos_sin(params, x)
        rotary, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat((self.rotate_channels(rotary, cos, sin), rest), dim=-1)

    def rotate_channels(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [rows, heads, dim] by cos and sin [rows, 1, dim]."""
        return self.rotary_mul(x, cos, sin, self.source.rotary_interleaved)

    def cos_sin(self, params: PlannedBatchParams, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [rows, 1, rotary_dim] of the dtype and on the device of the rows `like`."""
        tables = params.tables.setdefault(self, {})
        key = (like.device, like.dtype)
        if key not in tables:
            # Out of inference mode: tables may outlive it, and training could not save them for its backward.
            with torch.inference_mode(False), torch.no_grad():
                angles, factor = self.angles(self.rotated_positions(params))
                angles = angles.to(like.device)
                tables[key] = (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)
        return tables[key]

    def rotated_positions(self, params: PlannedBatchParams) -> Tensor:
        """Return the positions by which this rank's rows of attention are rotated."""
        if params.mrope_positions is not None:
            raise ConfigError(
                "position_ids of the micro-batch has rows of time, height and width, but the model rotates by one "
                "position; leave position_ids out, or build the model with position_embedding_type='mrope'"
            )
        return params.positions

    def angles(self, positions: Tensor) -> tuple[Tensor, float]:
        """Return Megatron's angles at positions [rows], fp32 [rows, 1, rotary_dim], and the factor of cos and sin."""
        if self.is_yarn:
            return yarn_angles(self.source, positions)
        # One row at offset p for all p at once.
        angles = self.source.get_freqs_non_repeated(1, offset=positions.to(self.source.inv_freq.device))
        if self.source.rotary_interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None], 1.0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(f"{prefix}inv_freq", None)  # old checkpoints of the replaced module have it
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class LatentRotary(PlannedRotary):
    """PlannedRotary for multi-latent attention, where only the last channels of q and k carry positions.

    Megatron gets an embedding of no channels, so that it rotates nothing.

    Args:
        source: the RotaryEmbedding or YarnRotaryEmbedding that Megatron built.
        channels: number of channels of q and k that carry positions (qk_pos_emb_head_dim).
    """

    def __init__(self, source: RotaryEmbedding, channels: int) -> None:
        super().__init__(source)
        self.channels = channels

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.empty(1, 1, 1, 0, device=self.source.inv_freq.device)
        return (nothing, 1.0) if self.is_yarn else nothing

    def rotate(self, x: Tensor, params: PlannedBatchParams) -> Tensor:
        if not len(x):
            return x
        cos, sin = self.cos_sin(params, x)
        width = cos.shape[-1]
        content, rotary, rest = x.split([x.shape[-1] - self.channels, width, self.channels - width], dim=-1)
        # Multi-latent models keep the two channels of a rotated pair side by side.
        halves = torch.cat((rotary[..., 0::2], rotary[..., 1::2]), dim=-1)
        return torch.cat((content, self.rotate_channels(halves, cos, sin), rest), dim=-1)

    def is_like(self, other: LatentRotary) -> bool:
        """Return True if both rotate equally, so that layers can share one, with its cos and sin."""
        if self.channels != other.channels:
            return False
        angles, factor = self.angles(torch.arange(2))
        other_angles, other_factor = other.angles(torch.arange(2))
        return torch.equal(angles, other_angles) and factor == other_factor
