"""mrope: rotary positions with a row for time, height and width each, as in Qwen2-VL, from the plan's parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.multimodal_positions import POSITION_ROWS
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.rotary import PlannedRotary


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
            position_ids: [3, batch_size, rows] of this rank, padding included, or None.

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
        expected = [POSITION_ROWS, params.batch_size, params.length + params.padding]
        if params.layout is not params.linear or list(position_ids.shape) != expected:
            raise ConfigError(
                f"position_ids of the model has shape {list(position_ids.shape)}; valid with mrope: {expected}, of "
                f"rank {params.rank} of the plan, where attention has the rows of linear layers; planned_batch and "
                "planned_batch_from cut them for every plan"
            )
        own = copy.copy(params)
        own.mrope_positions = position_ids[..., : params.length].reshape(POSITION_ROWS, -1)
        own.tables = WeakKeyDictionary()  # cos and sin of these positions
        return own
