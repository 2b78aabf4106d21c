"""PlannedBatchParams: parameters of a micro-batch that Megatron passes to every attention layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from mindspeed_cp import AttentionConfig, ConfigError, Plan
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.engine.attention_check import AttentionCheck
from mindspeed_cp.layout import Layout, padding_rows
from mindspeed_cp.megatron.adaptors.attentions import computes_the_same


class RotaryTripwire:
    """Value of PackedSeqParams.cp_group, in Megatron 0.12 of cu_seqlens_q_padded, that refuses Megatron's own
    rotary modules, its only readers.

    They would rotate by the positions of Megatron's zig-zag.
    """

    def size(self, *_: Any) -> int:
        raise ConfigError(
            "this model still has Megatron's rotary module, whose positions do not follow the plan; call "
            "mindspeed_cp.megatron.install_model(model) once after building the model"
        )

    rank = __getitem__ = __floordiv__ = size


@dataclass(kw_only=True)
class PlannedBatchParams(PackedSeqParams):
    """PackedSeqParams that carry one micro-batch's plan; Megatron hands them unchanged to every attention layer.

    Make them with :func:`planned_params` or :func:`planned_batch`. Megatron's own fields hold the whole batch's
    documents (cu_seqlens before sharding), as in Megatron.

    Attributes:
        plans: plans of the rows, one for each different attention of the layers.
        rank: context-parallel rank of the rows; of a pooled plan, the rank in the pool.
        pooled: the plan is over the pool: the context-parallel ranks of all data-parallel replicas, replica by replica,
            which all hold a part of the same micro-batch.
        rows_multiple: divisor of this rank's rows with padding.
        dropout_seed: seed of this micro-batch; with the number of a layer it decides which attention weights are
            dropped. None without dropout.
        mrope_positions: positions of time, height and width of this rank's rows of attention, int64 [3, rows]; None:
            each row has one position, that in its document.
        tables: rotary cos and sin that layers share, by the module that made them; dropped with either.
        batch_digest: number of the whole micro-batch, which every call of attention compares over the ranks of the
            plan; None: only the plans are compared.
        attention_check: compares one layer's attention with the reference; None: not in this micro-batch.
        agreement: comparison of the plans with those of other ranks; None before the first.
    """

    plans: tuple[Plan, ...]
    rank: int
    pooled: bool = False
    rows_multiple: int = 1
    dropout_seed: int | None = None
    mrope_positions: Tensor | None = field(default=None, repr=False, compare=False)
    batch_digest: int | None = None
    attention_check: AttentionCheck | None = field(default=None, repr=False, compare=False)
    tables: WeakKeyDictionary[Any, dict[Any, Any]] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)
    agreement: CallAgreement | None = field(default=None, repr=False, compare=False)

    @property
    def plan(self) -> Plan:
        """The first plan."""
        return self.plans[0]

    @property
    def layout(self) -> Layout:
        """What attention layers hold, between their projections of q, k and v and that of the output."""
        return self.plan.layout

    @property
    def linear(self) -> Layout:
        """What all else of the model holds: the batch's tokens, embeddings, linear layers, labels."""
        return self.plan.batch_layout

    @property
    def rows(self) -> int:
        """Rows of attention on this rank, without padding."""
        return int(self.layout.token_counts[self.rank])

    @property
    def padding(self) -> int:
        """Rows added at the end, outside every document: their attention output is zero. Not needed for any document's
        length, only for `rows_multiple` and for a rank that holds no token: Megatron's own attention cannot reshape a
        tensor without rows."""
        return int(padding_rows(np.array(self.rows), self.rows_multiple))

    @property
    def linear_rows(self) -> int:
        """`rows` of linear layers."""
        return int(self.linear.token_counts[self.rank])

    @property
    def linear_padding(self) -> int:
        """`padding` of linear layers."""
        return int(padding_rows(np.array(self.linear_rows), self.rows_multiple))

    @property
    def positions(self) -> Tensor:
        """Position of each row of attention in its document, int64 [rows]."""
        return torch.from_numpy(self.layout.positions(self.rank))

    def padding_mask(self, device: torch.device | str | None = None) -> Tensor:
        """Return True for rows of padding of linear layers, bool [1, linear_rows + linear_padding].

        The first pipeline stage of a GPTModel with experts takes it, so that its router counts real tokens only;
        :meth:`padding_arguments` has what any stage takes.
        """
        rows = torch.arange(self.linear_rows + self.linear_padding, device=device)
        return (rows >= self.linear_rows)[None]

    def padding_arguments(self, model: nn.Module) -> dict[str, Tensor]:
        """Return {"padding_mask": mask} for the call of a model, or {} if it needs none::

            model(tokens, position_ids, None, packed_seq_params=params, **params.padding_arguments(model))

        It needs none without experts, without rows of padding, and in Megatron 0.12, where such rows count as
        tokens of experts. The first pipeline stage takes the mask of all rows, and splits it over sequence-parallel
        ranks. Later stages take that of the rows that their router has: Megatron does not split it there.

        Args:
            model: the GPTModel of this pipeline stage, bare or wrapped (DDP, Float16Module).
        """
        inner: Any = model
        while isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        if not (inner.config.num_moe_experts and self.linear_padding):
            return {}
        if "padding_mask" not in signature(inner.forward).parameters:
            return {}
        mask = self.padding_mask(next((parameter.device for parameter in inner.parameters()), None))
        if inner.config.sequence_parallel and not inner.pre_process:
            rows = mask.shape[1] // inner.config.tensor_model_parallel_size
            mask = mask.narrow(1, parallel_state.get_tensor_model_parallel_rank() * rows, rows)
        return {"padding_mask": mask.contiguous()}

    def plan_for(self, attention: AttentionConfig) -> Plan | None:
        """Return the plan that computes this attention, or None."""
        return next((plan for plan in self.plans if computes_the_same(plan.attention, attention)), None)

    def to_rows(self, x: Tensor, name: str) -> Tensor:
        """Convert [t, heads, dim] to the plan's rows [rows, heads, dim] without padding.

        Raises:
            ConfigError: the shape is not that of this rank's rows.
        """
        if x.dim() != 3 or len(x) != self.rows + self.padding:
            raise ConfigError(
                f"{name} has shape {list(x.shape)}, but rank {self.rank} of the plan of {self.layout.documents.tokens} "
                f"tokens has [{self.rows + self.padding}, heads, dim], {self.padding} rows of padding included; slice "
                "the batch with the same plan, rank and options as its parameters: planned_batch does both; or let the "
                "last sequence of cu_seqlens end with the row"
            )
        return x[: self.rows]

    def from_rows(self, x: Tensor) -> Tensor:
        """Convert rows to Megatron's shape, [t, heads * dim]; padding is zero."""
        out = x.flatten(1)
        return torch.nn.functional.pad(out, (0, 0, 0, self.padding)) if self.padding else out
