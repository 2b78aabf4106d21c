"""The section `model` of the settings: sizes and features of the GPT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mindspeed_cp.schema.base import FractionBelowOne, NonNegativeFloat, PositiveInt, Section
from mindspeed_cp.schema.messages import bad_value

#: Keys that require multi_latent_attention, and keys that require experts.
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
MOE_KEYS = (
    *("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_aux_loss_coeff"),
    *("moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_shared_expert_intermediate_size"),
)


class ModelSettings(Section):
    """The GPT, in the words of Megatron's TransformerConfig."""

    num_layers: PositiveInt = Field(default=4, description="transformer layers")
    hidden_size: PositiveInt = Field(default=256, description="width of the residual stream")
    num_attention_heads: PositiveInt = Field(default=8, description="query heads")
    num_query_groups: PositiveInt | None = Field(
        default=None, description="key/value heads; null: as many as query heads"
    )
    kv_channels: PositiveInt | None = Field(
        default=None, description="width of a head; null: hidden_size / num_attention_heads"
    )
    ffn_hidden_size: PositiveInt | None = Field(
        default=None, description="width inside the MLP; null: 4 * hidden_size, with swiglu 8/3 of it in steps of 64"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = Field(default="RMSNorm", description="kind of norm")
    swiglu: bool = Field(default=True, description="gated SiLU in the MLP; false: GELU")
    add_bias_linear: bool = Field(default=False, description="biases in the linear layers")
    position_embedding_type: Literal["rope", "alibi", "none"] = Field(
        default="rope",
        description="rope: rotary positions, alibi: linear biases in attention, with the paper's slopes; both are "
        "counted from 0 in each document; none: no positions",
    )
    rotary_base: PositiveInt = Field(default=10000, description="base of the rotary frequencies")
    attention_dropout: FractionBelowOne = Field(
        default=0.0,
        description="share of attention weights to drop; on CPUs the same ones for any ranks and algorithm",
    )
    window_size: list[int] | None = Field(
        default=None,
        description="[left, 0]: a token sees itself and `left` tokens before it; null: its whole document",
    )
    window_attn_skip_freq: PositiveInt | list[int] | None = Field(
        default=None,
        description="N: every N-th layer has no window; or a list with 1 (window) or 0 for each layer",
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = Field(
        default="vanilla",
        description="attention sinks, one more score for each head without a value: none, fixed at 0, or learned; "
        "Megatron-core 0.16 or later",
    )
    qk_layernorm: bool = Field(default=False, description="norm on q and k; with MLA on their compressed forms")
    multi_latent_attention: bool = Field(
        default=False,
        description="multi-head latent attention (MLA): keys and values are projected up from a compressed form",
    )
    q_lora_rank: PositiveInt | None = Field(
        default=None, description="MLA: width of the compressed query; null: not compressed"
    )
    kv_lora_rank: PositiveInt = Field(default=512, description="MLA: width of compressed keys and values")
    qk_head_dim: PositiveInt = Field(default=128, description="MLA: channels of q and k without positions")
    qk_pos_emb_head_dim: PositiveInt = Field(default=64, description="MLA: channels of q and k with rotary positions")
    v_head_dim: PositiveInt = Field(default=128, description="MLA: channels of v")
    num_moe_experts: PositiveInt | None = Field(
        default=None, description="experts in a layer; null: one MLP for all tokens"
    )
    moe_layer_freq: PositiveInt | list[int] = Field(
        default=1, description="N: every N-th layer has experts; or a list with 1 (experts) or 0 for each layer"
    )
    moe_ffn_hidden_size: PositiveInt | None = Field(
        default=None, description="width inside an expert; null: ffn_hidden_size"
    )
    moe_router_topk: PositiveInt = Field(default=2, description="experts for each token")
    moe_router_pre_softmax: bool = Field(
        default=False,
        description="softmax over all experts, not over the chosen ones; must be true for moe_router_topk = 1",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = Field(
        default="aux_loss", description="loss that balances the experts, weighted by moe_aux_loss_coeff"
    )
    moe_aux_loss_coeff: NonNegativeFloat = Field(default=0.0, description="weight of the balancing loss; 0: none")
    moe_z_loss_coeff: NonNegativeFloat | None = Field(
        default=None, description="weight of the router's z-loss, which keeps its logits small; null: none"
    )
    moe_shared_expert_intermediate_size: PositiveInt | None = Field(
        default=None, description="width of a shared expert, which every token visits; null: none"
    )
    untie_embeddings_and_output_weights: bool = Field(default=False, description="separate matrix for the output layer")
    init_method_std: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="standard deviation of the initial weights"
    )
    recompute_granularity: Literal["selective", "full"] | None = Field(
        default=None,
        description="recomputation in the backward: selective: core attention; full: whole layers; null: none",
    )

    @property
    def head_dim(self) -> int:
        """Channels of one head of q and k."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def head_dim_v(self) -> int:
        """Channels of one head of v."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Channels of one head that carry rotary positions; 0 without them."""
        if self.position_embedding_type != "rope":
            return 0
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def resolved_ffn_hidden_size(self) -> int:
        """Width inside the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, int(self.hidden_size * 8 / 3) // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def mean_ffn_hidden_size(self) -> int:
        """Width of a gated MLP with the mean work per token of the layers, moe_router_topk experts included."""
        matrices = 3 if self.swiglu else 2
        width = self.resolved_ffn_hidden_size * (self.num_layers - self.expert_layers)
        width += self.visited_ffn_hidden_size * self.expert_layers
        return max(1, round(width / self.num_layers * matrices / 3))

    @property
    def visited_ffn_hidden_size(self) -> int:
        """Width of all experts that a token visits in a layer with experts."""
        routed = self.moe_router_topk * self.resolved_moe_ffn_hidden_size
        return routed + (self.moe_shared_expert_intermediate_size or 0)

    @property
    def resolved_moe_ffn_hidden_size(self) -> int:
        """Width inside one expert."""
        return self.moe_ffn_hidden_size or self.resolved_ffn_hidden_size

    @property
    def expert_layers(self) -> int:
        """Layers that have experts: every N-th from the first one on, or those of the list."""
        if self.num_moe_experts is None:
            return 0
        pattern = self.moe_layer_freq
        return sum(pattern) if isinstance(pattern, list) else -(-self.num_layers // pattern)

    @property
    def window_layers(self) -> int:
        """Layers whose attention has a window."""
        if self.window_size is None:
            return 0
        if isinstance(self.window_attn_skip_freq, list):
            return sum(self.window_attn_skip_freq)
        return self.num_layers - self.num_layers // (self.window_attn_skip_freq or self.num_layers + 1)

    @model_validator(mode="after")
    def _check(self) -> ModelSettings:
        """Check that keys which need another one keep their defaults without it, and each feature that is on."""
        has_window, has_experts = self.window_size is not None, self.num_moe_experts is not None
        for is_on, key, value, names in (
            (has_window, "window_size", "a window", ("window_attn_skip_freq",)),
            (self.multi_latent_attention, "multi_latent_attention", "true", MLA_KEYS),
            (has_experts, "num_moe_experts", "a number of experts", MOE_KEYS),
        ):
            for name in () if is_on else names:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise bad_value(name, getattr(self, name), f"has an effect only with {key}: {value}; remove it")
        if has_window:
            self._check_window()
        if self.multi_latent_attention:
            self._check_latent()
        if has_experts:
            self._check_experts()
        return self

    def _check_window(self) -> None:
        left, *right = self.window_size or [-2]
        if left < -1 or right not in ([0], [-1]):
            rule = "must be [left, 0]: left >= 0 tokens, -1 for no limit; a GPT does not see tokens to the right"
            raise bad_value("window_size", self.window_size, rule)
        self._check_pattern("window_attn_skip_freq")

    def _check_latent(self) -> None:
        if self.position_embedding_type != "rope":
            rule = "must be rope with multi_latent_attention"
            raise bad_value("position_embedding_type", self.position_embedding_type, rule)
        if self.kv_channels is not None:
            rule = "has no effect with multi_latent_attention; give qk_head_dim, qk_pos_emb_head_dim and v_head_dim"
            raise bad_value("kv_channels", self.kv_channels, rule)
        if self.num_query_groups not in (None, self.num_attention_heads):
            rule = "must be null with multi_latent_attention: every head has its own keys and values"
            raise bad_value("num_query_groups", self.num_query_groups, rule)
        if self.qk_pos_emb_head_dim % 2:
            rule = "must be even: rotary positions rotate pairs of channels"
            raise bad_value("qk_pos_emb_head_dim", self.qk_pos_emb_head_dim, rule)

    def _check_experts(self) -> None:
        self._check_pattern("moe_layer_freq")
        if self.moe_router_topk > (self.num_moe_experts or 0):
            rule = f"must be at most num_moe_experts = {self.num_moe_experts}"
            raise bad_value("moe_router_topk", self.moe_router_topk, rule)
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            rule = "needs moe_router_pre_softmax: true, without which the router gets no gradient; or use 2"
            raise bad_value("moe_router_topk", 1, rule)
        if self.add_bias_linear:
            raise bad_value("add_bias_linear", True, "must be false with num_moe_experts: experts have no biases")

    def _check_pattern(self, name: str) -> None:
        """Raise SettingError unless a list has one entry per layer, 0 or 1."""
        pattern = getattr(self, name)
        if isinstance(pattern, list) and (len(pattern) != self.num_layers or not {*pattern} <= {0, 1}):
            rule = f"must have one entry, 0 or 1, for each of num_layers = {self.num_layers} layers: [1, 0, ...]"
            raise bad_value(name, pattern, rule)
