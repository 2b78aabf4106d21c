"""The section `model` of the settings: the GPT, and which of its parts go together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mindspeed_cp.config_base import Count, Fraction, NotNegative, Positive, Section
from mindspeed_cp.config_errors import bad_value

#: Keys that mean something with multi_latent_attention only, and with experts only.
LATENT_KEYS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    "mscale_all_dim",
)
EXPERT_KEYS = (
    *("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_aux_loss_coeff"),
    *("moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_shared_expert_intermediate_size"),
)


class ModelSettings(Section):
    """The GPT, in the words of Megatron's TransformerConfig."""

    num_layers: Count = Field(default=4, description="transformer layers")
    hidden_size: Count = Field(default=256, description="width of the residual stream")
    num_attention_heads: Count = Field(default=8, description="query heads")
    num_query_groups: Count | None = Field(default=None, description="key/value heads; null: as many as query heads")
    kv_channels: Count | None = Field(
        default=None, description="width of a head; null: hidden_size / num_attention_heads"
    )
    ffn_hidden_size: Count | None = Field(
        default=None, description="width inside the MLP; null: 4 * hidden_size, with swiglu 8/3 of it in steps of 64"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = Field(default="RMSNorm", description="kind of norm")
    swiglu: bool = Field(default=True, description="gated SiLU in the MLP; false: GELU")
    add_bias_linear: bool = Field(default=False, description="biases in the linear layers")
    position_embedding_type: Literal["rope", "alibi", "none"] = Field(
        default="rope",
        description="rope: rotary positions, alibi: linear biases in attention, with the paper's slopes; both are "
        "counted from 0 in each document",
    )
    rotary_base: Count = Field(default=10000, description="base of the rotary frequencies")
    attention_dropout: Fraction = Field(
        default=0.0,
        description="share of attention weights that is dropped, the same ones for any number of ranks and algorithm",
    )
    window_size: list[int] | None = Field(
        default=None,
        description="[left, 0]: a token sees itself and `left` tokens before it; null: its whole document",
    )
    window_attn_skip_freq: Count | list[int] | None = Field(
        default=None,
        description="N: every N-th layer sees whole documents all the same; or 1 (window) or 0 for each layer",
    )
    qk_layernorm: bool = Field(default=False, description="a norm on q and k; with MLA on their compressed forms")
    multi_latent_attention: bool = Field(
        default=False, description="MLA: keys and values are unfolded from a compressed form"
    )
    q_lora_rank: Count | None = Field(
        default=None, description="MLA: width of the compressed query; null: not compressed"
    )
    kv_lora_rank: Count = Field(default=512, description="MLA: width of compressed keys and values")
    qk_head_dim: Count = Field(default=128, description="MLA: channels of q and k without positions")
    qk_pos_emb_head_dim: Count = Field(default=64, description="MLA: channels of q and k with rotary positions")
    v_head_dim: Count = Field(default=128, description="MLA: channels of v")
    rope_type: Literal["rope", "yarn"] = Field(default="rope", description="MLA: kind of rotary positions")
    rotary_scaling_factor: Positive = Field(default=1.0, description="YaRN: how much longer the context becomes")
    original_max_position_embeddings: Count = Field(default=4096, description="YaRN: the context before")
    beta_fast: Positive = Field(default=32.0, description="YaRN: turns within the context from which nothing is scaled")
    beta_slow: Positive = Field(default=1.0, description="YaRN: turns up to which everything is scaled")
    mscale: NotNegative = Field(default=1.0, description="YaRN: scale of cos and sin")
    mscale_all_dim: NotNegative = Field(default=0.0, description="YaRN: scale of the attention scores")
    num_moe_experts: Count | None = Field(default=None, description="experts in a layer; null: one MLP for all tokens")
    moe_layer_freq: Count | list[int] = Field(
        default=1, description="N: every N-th layer has experts; or 1 (experts) or 0 for each layer"
    )
    moe_ffn_hidden_size: Count | None = Field(default=None, description="width inside an expert; null: ffn_hidden_size")
    moe_router_topk: Count = Field(default=2, description="experts for each token")
    moe_router_pre_softmax: bool = Field(
        default=False, description="weigh experts among all, not among the chosen ones; must be true for one expert"
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = Field(
        default="aux_loss", description="what keeps experts equally busy, with moe_aux_loss_coeff"
    )
    moe_aux_loss_coeff: NotNegative = Field(default=0.0, description="weight of that loss; 0: none")
    moe_z_loss_coeff: NotNegative | None = Field(
        default=None, description="weight of a loss that keeps the router's logits small; null: none"
    )
    moe_shared_expert_intermediate_size: Count | None = Field(
        default=None, description="width of an expert that sees every token; null: there is none"
    )
    untie_embeddings_and_output_weights: bool = Field(
        default=False, description="a matrix of its own for the output layer"
    )
    init_method_std: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="standard deviation of the initial weights"
    )
    recompute_granularity: Literal["selective", "full"] | None = Field(
        default=None,
        description="recompute in the backward: selective: core attention, full: whole layers, null: nothing",
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
    def ffn_size(self) -> int:
        """Width inside the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, int(self.hidden_size * 8 / 3) // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def ffn_width(self) -> int:
        """Width of a gated MLP with as much work for a token as this model's layers have on average, experts counted
        as often as a token visits them."""
        matrices = 3 if self.swiglu else 2
        width = self.ffn_size * (self.num_layers - self.expert_layers)
        if self.expert_layers:
            visited = self.moe_router_topk * self.expert_ffn_size + (self.moe_shared_expert_intermediate_size or 0)
            width += visited * self.expert_layers
        return max(1, round(width / self.num_layers * matrices / 3))

    @property
    def expert_ffn_size(self) -> int:
        """Width inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        if self.num_moe_experts is None:
            return 0
        if isinstance(self.moe_layer_freq, list):
            return sum(self.moe_layer_freq)
        return -(-self.num_layers // self.moe_layer_freq)

    @property
    def window_layers(self) -> int:
        """Layers whose attention has a window."""
        if self.window_size is None:
            return 0
        if isinstance(self.window_attn_skip_freq, list):
            return sum(self.window_attn_skip_freq)
        return self.num_layers - self.num_layers // (self.window_attn_skip_freq or self.num_layers + 1)

    @field_validator("window_size", mode="before")
    @classmethod
    def _is_window(cls, value: Any) -> Any:
        if value is None or (isinstance(value, list) and len(value) == 2 and all(type(side) is int for side in value)):
            return value
        raise bad_value("window_size", value, "must be [left, 0], whole numbers of tokens, or null")

    @field_validator("window_attn_skip_freq", "moe_layer_freq", mode="before")
    @classmethod
    def _is_pattern(cls, value: Any, info: Any) -> Any:
        of_layers = isinstance(value, list) and all(type(one) is int and one in (0, 1) for one in value)
        if of_layers or (type(value) is int and value >= 1) or (value is None and info.field_name[0] == "w"):
            return value
        raise bad_value(info.field_name, value, "must be an integer >= 1, or 0 or 1 for each layer: [1, 0, ...]")

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        self._check_window()
        self._check_latent()
        self._check_experts()
        return self

    def _check_window(self) -> None:
        if self.window_size is None:
            self._only_with("window_size", "a window", ("window_attn_skip_freq",))
            return
        left, right = self.window_size
        if left < -1 or right not in (0, -1):
            rule = "must be [left, 0]: left >= 0 tokens, -1 for no limit; a token of a GPT sees none to its right"
            raise bad_value("window_size", self.window_size, rule)
        self._check_pattern("window_attn_skip_freq")

    def _check_latent(self) -> None:
        if not self.multi_latent_attention:
            self._only_with("multi_latent_attention", "true", LATENT_KEYS)
            return
        if self.position_embedding_type != "rope":
            rule = "must be rope with multi_latent_attention, which has rotary positions inside (rope_type)"
            raise bad_value("position_embedding_type", self.position_embedding_type, rule)
        if self.kv_channels is not None:
            rule = "means nothing with multi_latent_attention; give qk_head_dim, qk_pos_emb_head_dim and v_head_dim"
            raise bad_value("kv_channels", self.kv_channels, rule)
        if self.num_query_groups not in (None, self.num_attention_heads):
            rule = "must be null with multi_latent_attention, where every head has its own keys and values"
            raise bad_value("num_query_groups", self.num_query_groups, rule)
        if self.qk_pos_emb_head_dim % 2:
            rule = "must be even: rotary positions turn pairs of channels"
            raise bad_value("qk_pos_emb_head_dim", self.qk_pos_emb_head_dim, rule)
        if self.rope_type == "rope":
            self._only_with("rope_type", "yarn", LATENT_KEYS[LATENT_KEYS.index("rope_type") + 1 :])

    def _check_experts(self) -> None:
        experts = self.num_moe_experts
        if experts is None:
            self._only_with("num_moe_experts", "a number of experts", EXPERT_KEYS)
            return
        self._check_pattern("moe_layer_freq")
        if self.moe_router_topk > experts:
            raise bad_value("moe_router_topk", self.moe_router_topk, f"must be at most num_moe_experts = {experts}")
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            rule = (
                "with moe_router_pre_softmax: false the router would not learn; use 2, or moe_router_pre_softmax: true"
            )
            raise bad_value("moe_router_topk", 1, rule)
        if self.add_bias_linear:
            raise bad_value("add_bias_linear", True, "must be false with num_moe_experts: experts have no biases")

    def _only_with(self, key: str, value: str, names: tuple[str, ...]) -> None:
        """SettingError if a key has another value than its default, though it means nothing."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise bad_value(name, getattr(self, name), f"only means something with {key}: {value}; remove it")

    def _check_pattern(self, name: str) -> None:
        """SettingError unless a list for layers has one entry for each."""
        pattern = getattr(self, name)
        if isinstance(pattern, list) and len(pattern) != self.num_layers:
            rule = f"must have one entry for each of num_layers = {self.num_layers} layers, not {len(pattern)}"
            raise bad_value(name, pattern, rule)
