"""PlannedAttention: core_attention for Megatron that runs the plan of its micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp import AttentionConfig, ConfigError, Plan, context_parallel_attention
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.engine.agreement import CallAgreement
from mindspeed_cp.megatron.adaptors.attentions import attention_config, with_model_sizes
from mindspeed_cp.megatron.adaptors.packed import PackedPlanner
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.rotary import PlannedRotary, UncutGroup
from mindspeed_cp.megatron.adaptors.settings import check_deterministic, check_model_config
from mindspeed_cp.ops.attention.backends import backend_from_settings

_MASKS = {
    AttnMaskType.causal: "causal",
    AttnMaskType.padding_causal: "causal",
    AttnMaskType.no_mask: "full",
    AttnMaskType.padding: "full",
}


class PlannedAttention(MegatronModule):
    """Exact attention over a context-parallel group by the plan of the micro-batch.

    Obeys Megatron's contract of core_attention for grouped queries, heads split over tensor parallelism, values of
    another width than keys, sliding windows of some or all layers, attention sinks, attention dropout, and
    recomputation (selective and full). It keeps nothing between calls: what a call needs arrives in
    :class:`PlannedBatchParams`, the seed of dropout too, so that recomputation drops the same. Megatron's plain
    PackedSeqParams are converted once per micro-batch (:class:`mindspeed_cp.megatron.adaptors.packed.PackedPlanner`).

    Args:
        config: the model's settings, checked here.
        layer_number: 1-based, over all pipeline stages.
        attn_mask_type: causal, or no_mask for a full mask.
        attention_type: "self".
        attention_dropout: default: config.attention_dropout.
        softmax_scale: factor of q.k; default 1/sqrt(width of q).
        cp_comm_type: config.cp_comm_type, which check_model_config checks.
        k_channels, v_channels: width of q and k, and of v; default config.kv_channels.
        pg_collection: process groups; `cp` carries keys and values, `tp` splits heads. Default: those of
            parallel_state.
        suite: the section context_parallel_suite.
        alibi: linear biases instead of rotary positions; the slopes are those of all the model's heads.

    Attributes:
        softmax_offset: attention sinks of the heads of this tensor-parallel rank, under Megatron's name; a parameter
            under softmax_type "learnable", and else None.
        layers_before: number of layers of the model that layer_number does not count; above 0 for multi-token
            prediction in Megatron 0.19, which begins again at 1 there.

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
        pg_collection: Any = None,
        *,
        suite: SuiteSettings,
        alibi: bool = False,
    ) -> None:
        super().__init__(config=config)
        check_model_config(config, suite)
        if attention_type != "self":
            raise ConfigError(f"attention_type is {attention_type!r}; valid with planned attention: 'self'")
        if attn_mask_type not in _MASKS:
            raise ConfigError(
                f"attn_mask_type is {attn_mask_type.name}; valid with planned attention: "
                f"{', '.join(t.name for t in _MASKS)}"
            )
        groups = pg_collection
        cp_group = groups.cp if groups is not None else parallel_state.get_context_parallel_group()
        cp_group = cp_group.group if isinstance(cp_group, UncutGroup) else cp_group
        tp_group = groups.tp if groups is not None else parallel_state.get_tensor_model_parallel_group()
        if cp_group.size() != suite.context_parallel_size:
            raise ConfigError(
                f"context_parallel_size is {suite.context_parallel_size}, but the context-parallel group has "
                f"{cp_group.size()} ranks; initialize_model_parallel with that context_parallel_size"
            )
        self.suite = suite
        self.layer_number, self.layers_before = layer_number, 0
        self.cp_group, self.tp_group = cp_group, tp_group
        self.attn_mask_type = attn_mask_type
        self.alibi = alibi
        self.attention: AttentionConfig = attention_config(
            config,
            tp_group.size(),
            tp_group.rank(),
            layer_number=layer_number,
            mask=_MASKS[attn_mask_type],
            alibi=alibi,
            head_dim=k_channels,
            head_dim_v=v_channels,
            scale=softmax_scale,
            dropout=attention_dropout,
        )
        self.softmax_type = getattr(config, "softmax_type", "vanilla")  # from Megatron 0.16 on
        self.softmax_offset = self._learnable_sinks(tp_group.rank() * self.attention.heads)
        self.packed = PackedPlanner(with_model_sizes(suite, config), (self.attention,))
        without_rope = getattr(config, "no_rope_freq", None)  # Megatron 0.12 has none
        self.rotates = not (without_rope and without_rope[layer_number - 1])
        self.installed = False
        self.rotary: PlannedRotary | None = None
        self._kv_up: tuple[Any, ...] = ()

    @property
    def number_in_model(self) -> int:
        """Number of the layer, 1-based, different for all layers; which weights are dropped depends on it."""
        return self.layer_number + self.layers_before

    def use_rotary(self, rotary: PlannedRotary | None) -> None:
        """Set the module that rotates queries and keys, None for a model without rotary positions; install_model calls
        this."""
        if rotary is not None and self.alibi:
            raise ConfigError(
                "install_model: the model has rotary positions and ALiBi, which takes their place; build the GPTModel "
                "with position_embedding_type='none', or install the spec without alibi"
            )
        self.rotary, self.installed = rotary, True

    def use_up_projection(self, module: Any) -> None:
        """Set the up-projection of keys and values, whose weight expands latents where plans let these travel."""
        self._kv_up = (module,)  # no submodule, so that checkpoints have it once

    def group_of(self, params: PlannedBatchParams) -> dist.ProcessGroup:
        """Return the ranks of a micro-batch's plan: the context-parallel ones, or for a pooled plan those of all
        data-parallel replicas."""
        if not params.pooled:
            return self.cp_group
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

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
        """Compute the attention of one layer on this rank's rows.

        Args:
            query: [t, heads, dim], heads of this tensor-parallel rank, not yet rotated.
            key: the same with kv heads.
            value: the same with kv heads and its own dim. Where the plan lets latents travel, key is the one head of
                channels that all heads share, and value the latent.
            attention_mask: None; the plan's documents say what is visible.
            attn_mask_type: that of the constructor or None.
            attention_bias: None.
            packed_seq_params: result of planned_params. Or Megatron's plain PackedSeqParams, format "thd", for rows
                of which a data loader has cut every sequence.

        Returns:
            [t, heads * dim_v].

        Raises:
            ConfigError: the batch does not fit the plan, the plan does not fit the model, an argument is not supported,
                or ranks have different plans or batches.
        """
        self._refuse(attention_mask, attn_mask_type, attention_bias)
        params, plan = self.plan_of(packed_seq_params)
        q, k, v = params.to_rows(query, "query"), params.to_rows(key, "key"), params.to_rows(value, "value")
        if self.rotary is not None and self.rotates:
            q, k = self.rotary.rotate(q, params), self.rotary.rotate(k, params)
        if self.config.deterministic_mode and self.suite.backend == "auto":
            check_deterministic(q.device.type)
        dropout_key, sink = self._dropout_key(params), self._sink(q)
        kv_up = None if plan.attention.latent is None else self._kv_up[0].weight
        out = context_parallel_attention(
            q,
            k,
            v,
            plan,
            group=self.group_of(params),
            backend=backend_from_settings(self.suite, q.device.type, plan.attention, q.dtype),
            timeout=self.suite.timeout_seconds,
            dropout_key=dropout_key,
            training=self.training,
            batch_digest=params.batch_digest,
            sink=sink,
            kv_up=kv_up,
        )
        check = params.attention_check
        if check is not None and check.layer == self.number_in_model:
            check.observe(q, k, v, out, plan, params.rank, dropout_key, sink, kv_up)
        return params.from_rows(out)

    def announce(self, params: PlannedBatchParams, weight: Tensor) -> None:
        """Start to compare the plans of a micro-batch with those of other ranks, before its first attention; also the
        batch itself, the type of the weights, the dropout seed, and whether the model is trained."""
        if self.group_of(params).size() > 1:
            words = f"{weight.dtype} {params.dropout_seed} {self.training} {params.batch_digest}"
            self._agreement(params, weight.device).announce(params.plans, words)

    def check_before_move(self, params: PlannedBatchParams, hidden: Tensor) -> None:
        """Raise ConfigError if ranks have different plans or batches, before hidden states move: what travels depends
        on it."""
        if self.group_of(params).size() > 1:
            self._agreement(params, hidden.device).check(
                params.plans[0], hidden.dtype, batch_digest=params.batch_digest
            )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the sinks for a distributed checkpoint, as Megatron's own core_attention stores them."""
        if self.softmax_offset is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        groups = {"tp_group": self.tp_group}
        if metadata is not None and "dp_cp_group" in metadata:
            groups["dp_cp_group"] = metadata["dp_cp_group"]
        state, axes = {"softmax_offset": self.softmax_offset}, {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets, **groups)

    def _learnable_sinks(self, first_head: int) -> torch.nn.Parameter | None:
        """Return the parameter of a layer with softmax_type "learnable", of this tensor-parallel rank's heads, drawn as
        Megatron draws it; None for others."""
        if self.softmax_type != "learnable":
            return None
        config = self.config
        whole = torch.zeros(config.num_attention_heads)
        if config.perform_initialization:
            config.init_method(whole)  # of all heads, so that they do not depend on the number of ranks
        device = None if config.use_cpu_initialization or not torch.cuda.is_available() else torch.cuda.current_device()
        own = whole[first_head : first_head + self.attention.heads]
        sinks = torch.nn.Parameter(own.to(device=device, dtype=config.params_dtype, copy=True))
        # Heads are split over tensor parallelism: norms of gradients count all ranks' sinks.
        set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        return sinks

    def _sink(self, q: Tensor) -> Tensor | None:
        """Return the sinks of this call, fp32 [heads]; None for a softmax without one."""
        if self.softmax_offset is not None:
            return self.softmax_offset.float()
        return q.new_zeros(q.shape[1], dtype=torch.float32) if self.softmax_type == "off-by-one" else None

    def _agreement(self, params: PlannedBatchParams, device: torch.device) -> CallAgreement:
        if params.agreement is None:
            params.agreement = CallAgreement(self.group_of(params), self.suite.timeout_seconds, device)
        return params.agreement

    def _dropout_key(self, params: PlannedBatchParams) -> tuple[int, int] | None:
        """Return the key that, with head, document and positions, decides which attention weights are dropped."""
        if not (self.attention.dropout and self.training):
            return None
        if params.dropout_seed is None:
            raise ConfigError(
                f"attention_dropout is {self.attention.dropout}, but the micro-batch has no dropout_seed; pass "
                "planned_batch or planned_batch_from(..., dropout_seed=micro_batch_seed(seed, number)) with the number "
                "of the micro-batch in the run, the same on all context- and tensor-parallel ranks (Megatron's plain "
                "PackedSeqParams have no place for it); or set attention_dropout to 0.0"
            )
        return params.dropout_seed, self.number_in_model

    def _refuse(self, mask: Tensor | None, mask_type: AttnMaskType | None, bias: Tensor | None) -> None:
        if mask is not None:
            raise ConfigError(
                f"attention_mask is a tensor of shape {list(mask.shape)}; valid: None, since the plan's documents say "
                "what is visible (in Megatron's own data loader: create_attention_mask=False)"
            )
        if bias is not None:
            raise ConfigError(
                f"attention_bias is a tensor of shape {list(bias.shape)}; valid: None; for linear biases use "
                "install(spec, suite, alibi=True), which makes them from positions"
            )
        if mask_type is not None and _MASKS.get(mask_type) != self.attention.mask:
            raise ConfigError(
                f"attn_mask_type is {mask_type.name} in this call; valid: {self.attn_mask_type.name}, as the layer was "
                "built"
            )

    def plan_of(self, given: PackedSeqParams | None) -> tuple[PlannedBatchParams, Plan]:
        """Return the parameters of a call, checked against model and group, and the plan of this layer.

        Args:
            given: as for :meth:`forward`.
        """
        if not self.installed:
            raise ConfigError(
                "this model was built with planned attention, but its positions are not set up; call "
                "mindspeed_cp.megatron.install_model(model) once after building the model"
            )
        if isinstance(given, PackedSeqParams) and not isinstance(given, PlannedBatchParams):
            params = self.packed.planned(given, self.cp_group)
            packed_plan = params.plan_for(self.attention)
            assert packed_plan is not None  # self.packed makes one for this attention
            return params, packed_plan
        if not isinstance(given, PlannedBatchParams):
            raise ConfigError(
                f"packed_seq_params is {'a ' + type(given).__name__ if given is not None else None}, which has no "
                "plan; valid: the parameters of mindspeed_cp.megatron.planned_batch_from or planned_batch, or "
                "Megatron's PackedSeqParams with cu_seqlens_q"
            )
        group = self.group_of(given)
        ranks, rank = group.size(), group.rank()
        if (given.plan.ranks, given.rank) != (ranks, rank):
            group_name = "pool" if given.pooled else "context-parallel group"
            raise ConfigError(
                f"packed_seq_params are those of rank {given.rank} of {given.plan.ranks}, but this is rank {rank} of "
                f"{ranks} in the {group_name}; build the plan for that group and give planned_params its rank"
            )
        plan = given.plan_for(self.attention)
        if plan is None:
            built = "; ".join(str(plan.attention) for plan in given.plans)
            raise ConfigError(
                f"the plan was built for {built}, but layer {self.layer_number} computes {self.attention}; build plans "
                "with mindspeed_cp.megatron.attention_config(config), or, where layers differ, with all of "
                "layer_attentions(config)"
            )
        if self.config.pipeline_model_parallel_size > 1 and not self.config.variable_seq_lengths:
            raise ConfigError(
                "variable_seq_lengths is False; valid with pipeline parallelism and packed rows: True, since "
                "micro-batches differ in rows (Megatron then asks for moe_token_dispatcher_type='alltoall', experts "
                "or not)"
            )
        return given, plan
