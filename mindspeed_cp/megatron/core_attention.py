"""PlannedAttention: Megatron's core_attention that runs the plan of its micro-batch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology, build_plan, context_parallel_attention
from mindspeed_cp.megatron.batch import PlannedBatchParams, planned_params
from mindspeed_cp.megatron.rotary import PlannedRotary
from mindspeed_cp.megatron.settings import Suite, attention_config, check_model_config

_MASKS = {
    AttnMaskType.causal: "causal",
    AttnMaskType.padding_causal: "causal",
    AttnMaskType.no_mask: "full",
    AttnMaskType.padding: "full",
}


class PlannedAttention(MegatronModule):
    """Exact attention over a context-parallel group, as the micro-batch's plan says.

    Obeys Megatron's contract of core_attention for grouped queries, heads split over tensor parallelism, values of
    another width than keys, and recomputation (selective and full). It has no parameters and keeps nothing between
    calls: what a call needs arrives in :class:`PlannedBatchParams`.

    Args:
        config: the model's settings, checked here.
        layer_number: 1-based, over all pipeline stages.
        attn_mask_type: causal, or no_mask for a full mask.
        attention_type: "self".
        attention_dropout: None or 0.
        softmax_scale: factor of q.k; default 1/sqrt(width of q).
        cp_comm_type: what Megatron read from config.cp_comm_type, checked there.
        k_channels, v_channels: width of q and k, and of v; default config.kv_channels.
        pg_collection: process groups; `cp` carries keys and values, `tp` splits heads.
        suite: the section context_parallel_suite.

    Raises:
        ConfigError: a setting cannot be honoured.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        suite: Suite,
    ) -> None:
        super().__init__(config=config)
        check_model_config(config, suite)
        if attention_type != "self":
            raise ConfigError(f"attention_type is {attention_type!r}; valid with planned attention: 'self'")
        if attention_dropout:
            raise ConfigError(
                f"attention_dropout is {attention_dropout}; valid with planned attention: 0.0 (use hidden_dropout)"
            )
        if attn_mask_type not in _MASKS:
            raise ConfigError(
                f"attn_mask_type is {attn_mask_type.name}; valid with planned attention: "
                f"{', '.join(t.name for t in _MASKS)}"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        if groups.cp.size() != suite.context_parallel_size:
            raise ConfigError(
                f"context_parallel_size is {suite.context_parallel_size}, but the context-parallel group has "
                f"{groups.cp.size()} ranks; initialize_model_parallel with that context_parallel_size"
            )
        self.suite = suite
        self.layer_number = layer_number
        self.cp_group = groups.cp
        self.attn_mask_type = attn_mask_type
        self.attention: AttentionConfig = attention_config(
            config,
            groups.tp.size(),
            mask=_MASKS[attn_mask_type],
            head_dim=k_channels,
            head_dim_v=v_channels,
            scale=softmax_scale,
        )
        self.rotates = not (config.no_rope_freq and config.no_rope_freq[layer_number - 1])
        self.installed = False
        self.rotary: PlannedRotary | None = None

    def use_rotary(self, rotary: PlannedRotary | None) -> None:
        """Called by install_model: rotate by this module, or, for a model without rotary positions, not at all."""
        self.rotary, self.installed = rotary, True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """One layer's attention on this rank's rows.

        Args:
            query: [s, b, heads, dim] or, for "thd", [t, heads, dim]; heads of this tensor-parallel rank, not yet
                rotated.
            key: the same with kv heads.
            value: the same with kv heads and its own dim.
            attention_mask: None; the plan's documents say what is visible.
            attn_mask_type: that of the constructor or None.
            attention_bias: None.
            packed_seq_params: from planned_params. May be None for "sbhd" if every rank holds the same even number of
                rows of each sequence, cut as Megatron cuts it (sequence length divisible by 2 * cp).

        Returns:
            [s, b, heads * dim_v] or [t, heads * dim_v].

        Raises:
            ConfigError: the batch does not fit the plan or the plan the model, or something is asked that no plan
            covers.
        """
        self._refuse(attention_mask, attn_mask_type, attention_bias)
        params = self._params(query, packed_seq_params)
        plan = params.plan
        assert plan is not None
        q, k, v = params.to_rows(query, "query"), params.to_rows(key, "key"), params.to_rows(value, "value")
        if self.rotary is not None and self.rotates:
            q, k = self.rotary.rotate(q, params), self.rotary.rotate(k, params)
        out = context_parallel_attention(
            q,
            k,
            v,
            plan,
            group=self.cp_group,
            backend=None if self.suite.backend == "auto" else self.suite.backend,
            timeout=self.suite.timeout_seconds,
        )
        return params.from_rows(out)

    def _refuse(self, mask: Tensor | None, mask_type: AttnMaskType | None, bias: Tensor | None) -> None:
        if not self.installed:
            raise ConfigError(
                "this model was built with planned attention, but its positions are not set up; call "
                "mindspeed_cp.megatron.install_model(model) once after building the model"
            )
        if mask is not None:
            raise ConfigError(
                f"attention_mask is a tensor of shape {list(mask.shape)}; valid: None, since the plan's documents say "
                "what is visible (in Megatron's own data loader: create_attention_mask=False)"
            )
        if bias is not None:
            raise ConfigError(
                f"attention_bias is a tensor of shape {list(bias.shape)}; valid: None, this version adds no bias"
            )
        if mask_type is not None and _MASKS.get(mask_type) != self.attention.mask:
            raise ConfigError(
                f"attn_mask_type is {mask_type.name} in this call; valid: {self.attn_mask_type.name}, as the layer was "
                "built"
            )

    def _params(self, query: Tensor, given: PackedSeqParams | None) -> PlannedBatchParams:
        """The parameters of this call, checked against the model and the group."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        if given is None and query.dim() == 4:
            algorithm = self.suite.algorithm
            return _params_of_equal_rows(query.shape[0], query.shape[1], ranks, rank, self.attention, algorithm)
        if not isinstance(given, PlannedBatchParams) or given.plan is None:
            raise ConfigError(
                f"packed_seq_params is {'a ' + type(given).__name__ if given is not None else None}, which has no "
                "plan; valid: what mindspeed_cp.megatron.planned_params(plan, rank) returns"
            )
        if (given.plan.ranks, given.rank) != (ranks, rank):
            raise ConfigError(
                f"packed_seq_params are those of rank {given.rank} of {given.plan.ranks}, but this is rank {rank} of "
                f"{ranks} in the context-parallel group; build the plan for that group and give planned_params its rank"
            )
        if not _computes_the_same(given.plan.attention, self.attention):
            raise ConfigError(
                f"the plan was built for {given.plan.attention}, but layer {self.layer_number} computes "
                f"{self.attention}; build plans with mindspeed_cp.megatron.attention_config(config)"
            )
        if (
            given.qkv_format == "thd"
            and self.config.pipeline_model_parallel_size > 1
            and not self.config.variable_seq_lengths
        ):
            raise ConfigError(
                "variable_seq_lengths is False; valid with pipeline parallelism and packed rows: True, since "
                "micro-batches differ in rows (Megatron then asks for moe_token_dispatcher_type='alltoall', experts "
                "or not)"
            )
        return given


def _computes_the_same(a: AttentionConfig, b: AttentionConfig) -> bool:
    """Equal but for the way of saying the default scale."""
    return replace(a, scale=None) == replace(b, scale=None) and math.isclose(a.softmax_scale, b.softmax_scale)


@lru_cache(maxsize=8)
def _params_of_equal_rows(
    rows: int, batch_size: int, ranks: int, rank: int, attention: AttentionConfig, algorithm: str
) -> PlannedBatchParams:
    """Parameters of `batch_size` whole sequences as documents, of which each rank holds `rows` rows: a pure function.

    Unambiguous only where Megatron's own slicing applies, two equal chunks of every sequence on every rank. One rank's
    odd count cannot say how long the sequence is.
    """
    if ranks > 1 and rows % 2:
        raise ConfigError(
            f"query has {rows} rows of each sequence on rank {rank}, an odd number, and no plan; pass "
            "packed_seq_params=planned_params(plan, rank, 'sbhd'), or use sequence lengths divisible by 2 * "
            "context_parallel_size"
        )
    plan = build_plan(Documents([rows * ranks] * batch_size), Topology(1, ranks), attention, algorithm)
    return planned_params(plan, rank, "sbhd", batch_size=batch_size)
