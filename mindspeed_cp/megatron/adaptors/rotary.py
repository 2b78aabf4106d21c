"""Rotary positions from the plan's layout instead of Megatron's hard-coded zig-zag; with mrope three for each row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.documents import POSITION_ROWS
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.patches.versions import yarn_angles


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


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x with each pair of channels (a, b) rotated to (a cos - b sin, b cos + a sin).

    Args:
        x: [rows, heads, dim].
        cos, sin: [rows, 1, dim], equal for the two channels of a pair, of the dtype of x.
        interleaved: pairs are neighbours (2i, 2i + 1); else channel i and i + dim / 2.
    """
    if interleaved:
        half = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    return x * cos + half * sin


class PlannedRotary(nn.Module):
    """Replacement of a GPTModel's ``rotary_pos_emb``; :func:`install_model` installs it.

    It returns no rotary embedding, so that Megatron rotates nothing. PlannedAttention rotates query and key by
    :meth:`rotate`, at each row's position in its own document. Frequencies are those of the module that it replaces:
    rotary_base, rotary_percent, rotary_interleaved, seq_len_interpolation_factor, rope_scaling and all settings of YaRN
    are honoured.

    Args:
        source: the RotaryEmbedding or YarnRotaryEmbedding that Megatron built.

    Attributes:
        rotary_mul: rotates channels: the function of this module, or MindSpeed's fused operator.
    """

    def __init__(self, source: RotaryEmbedding) -> None:
        super().__init__()
        self.source = source
        self.rotary_mul = rotary_mul

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


class MultimodalRotary(PlannedRotary):
    """PlannedRotary for position_embedding_type "mrope".

    The channels of a head are divided into sections: time, height and width each rotate their section by their own
    positions, which the micro-batch brings (``position_ids`` [3, ...] of the batch given to planned_batch or
    planned_batch_from).

    Args:
        source: the MultimodalRotaryEmbedding that Megatron built.
        section: channels of time, height and width, in pairs (config.mrope_section).

    Raises:
        ConfigError: the sections do not add up to the rotated channels, or channels are interleaved.
    """

    def __init__(self, source: MultimodalRotaryEmbedding, section: Sequence[int] | None) -> None:
        super().__init__(source)
        pairs = len(source.inv_freq)
        if section is None or len(section) != POSITION_ROWS or sum(section) != pairs or min(section) < 0:
            raise ConfigError(
                f"mrope_section is {section}; valid: {POSITION_ROWS} numbers, of time, height and width, that add up "
                f"to {pairs}, half of the rotated channels of a head"
            )
        if source.rotary_interleaved:
            raise ConfigError(
                "rotary_interleaved is True; valid with position_embedding_type 'mrope': False, as Megatron's own "
                "module has no interleaved sections"
            )
        self.section = list(section)

    def rotated_positions(self, params: PlannedBatchParams) -> Tensor:
        """Return positions of time, height and width of this rank's rows of attention, [3, rows]."""
        if params.mrope_positions is None:
            raise ConfigError(
                "the model rotates by mrope_section, but the micro-batch has no positions of time, height and width; "
                f"give position_ids [{POSITION_ROWS}, ...] of the whole batch to planned_batch or planned_batch_from"
            )
        return params.mrope_positions

    def angles(self, positions: Tensor) -> tuple[Tensor, float]:
        """Return Megatron's angles at positions [3, rows], fp32 [rows, 1, rotary_dim], and the factor 1."""
        frequencies = self.source.inv_freq
        where = positions.to(frequencies.device, frequencies.dtype)
        if self.source.seq_len_interpolation_factor is not None:
            where = where * (1 / self.source.seq_len_interpolation_factor)
        angles = where[:, :, None] * frequencies
        half = torch.cat([rows[i] for i, rows in enumerate(angles.split(self.section, dim=-1))], dim=-1)
        return torch.cat((half, half), dim=-1)[:, None], 1.0

    def with_positions(self, params: PlannedBatchParams, position_ids: Any) -> PlannedBatchParams:
        """Return the parameters of a micro-batch with this rank's positions: a copy with those that the model gets.

        The parameters themselves stay as they are, since the next micro-batch may have the same ones (equal lengths of
        documents) with other positions. Those of planned_batch and planned_batch_from have positions already.

        Args:
            params: parameters of the micro-batch.
            position_ids: [3, 1, rows] of this rank, padding included, or None.

        Raises:
            ConfigError: another shape, the micro-batch is one of trees, or attention has other rows than linear layers.
        """
        if params.linear.documents.trees is not None:
            raise ConfigError(
                "the micro-batch is one of trees, and position_embedding_type is 'mrope', whose positions do not go on "
                "along a path; valid with trees: rotary positions in one dimension, learned ones or none; or give each "
                "trajectory as a document of its own"
            )
        if params.mrope_positions is not None or not isinstance(position_ids, Tensor) or position_ids.dim() != 3:
            return params  # the layers refuse a micro-batch without positions
        expected = [POSITION_ROWS, 1, params.rows + params.padding]
        if params.layout is not params.linear or list(position_ids.shape) != expected:
            raise ConfigError(
                f"position_ids of the model has shape {list(position_ids.shape)}; valid with mrope: {expected}, of "
                f"rank {params.rank} of the plan, where attention has the rows of linear layers; planned_batch and "
                "planned_batch_from cut them for every plan"
            )
        own = copy.copy(params)
        own.mrope_positions = position_ids[:, 0, : params.rows]
        own.tables = WeakKeyDictionary()  # cos and sin of these positions
        return own
