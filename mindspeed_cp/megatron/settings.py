"""What of Megatron's and the suite's settings planned attention can honour.  What it cannot is refused when it is read.

Nothing is dropped in silence: each refusal names the setting, its value, the valid values and what to use instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp import AttentionConfig, ConfigError
from mindspeed_cp.plan import ALIASES, algorithm_name

BACKENDS = ("auto", "cpu")


class Suite(Protocol):
    """The settings of the suite that this package reads (see mindspeed_cp.config.SuiteSettings)."""

    @property
    def algorithm(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def context_parallel_size(self) -> int: ...


@dataclass(frozen=True)
class _Rule:
    """One field of TransformerConfig: which values work, and why the others do not."""

    setting: str
    works: Callable[[Any], bool]
    valid: str
    instead: str


def _off(value: Any) -> bool:
    return not value


_RULES = (
    _Rule(
        "calculate_per_token_loss",
        bool,
        "True",
        "ranks hold unequal numbers of tokens, so averaging their means would make gradients depend on the rank count",
    ),
    _Rule("attention_dropout", _off, "0.0", "use hidden_dropout, which acts outside attention"),
    _Rule(
        "window_size", lambda v: v is None, "None", "this version has no sliding window; a whole document is visible"
    ),
    _Rule("softmax_type", lambda v: v == "vanilla", "'vanilla'", "attention sinks are not in this version"),
    _Rule("qk_clip", _off, "False", "the largest logit is not reported; qk_layernorm bounds it instead"),
    _Rule("log_max_attention_logit", _off, "False", "the largest logit is not reported"),
    _Rule(
        "multi_latent_attention",
        _off,
        "False",
        "MLA rotates inside its own projection by positions that it takes from the zig-zag of whole sequences; use "
        "grouped-query attention",
    ),
    _Rule("experimental_attention_variant", lambda v: v is None, "None", "use softmax attention in every layer"),
    _Rule("is_hybrid_model", _off, "False", "state-space layers need their tokens in order on one rank"),
    _Rule(
        "mtp_num_layers",
        _off,
        "None",
        "multi-token prediction shifts tokens across the borders of ranks by Megatron's zig-zag",
    ),
    _Rule("mrope_section", lambda v: v is None, "None", "use position_embedding_type 'rope'"),
    _Rule(
        "apply_rope_fusion", _off, "False", "rotary positions come from the plan and are applied by PlannedAttention"
    ),
    _Rule(
        "fused_single_qkv_rope",
        _off,
        "False",
        "rotary positions come from the plan and are applied by PlannedAttention",
    ),
    _Rule("hybrid_context_parallel", _off, "False", "a plan already gives each document the ranks it needs"),
    _Rule("dynamic_context_parallel", _off, "False", "a plan already gives each document the ranks it needs"),
    _Rule("fp8_dot_product_attention", _off, "False", "attention runs in the dtype of query, key and value"),
    _Rule("fp8_multi_head_attention", _off, "False", "attention runs in the dtype of query, key and value"),
    _Rule("use_kitchen_attention", _off, "False", "leave the choice of kernel to the suite's backend"),
    _Rule("enable_cuda_graph", _off, "False", "every micro-batch has its own plan and cannot be replayed"),
    _Rule("external_cuda_graph", _off, "False", "every micro-batch has its own plan and cannot be replayed"),
    _Rule(
        "cuda_graph_impl",
        lambda v: v in (None, "none"),
        "'none'",
        "every micro-batch has its own plan and cannot be replayed",
    ),
    _Rule("flash_decode", _off, "False", "generate with a model built from the original spec"),
)


def check_suite(suite: Suite) -> None:
    """Raise ConfigError unless this version runs the suite's settings."""
    section = "context_parallel_suite"
    try:
        algorithm_name(suite.algorithm)
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}; ring is exact for every document length and rank count") from None
    if suite.backend not in BACKENDS:
        raise ConfigError(
            f"{section}.backend is {suite.backend!r}; valid: {', '.join(BACKENDS)}; auto takes the backend of the "
            "tensors' device"
        )
    if not (math.isfinite(suite.timeout_seconds) and suite.timeout_seconds > 0):
        raise ConfigError(
            f"{section}.timeout_seconds is {suite.timeout_seconds}; valid: seconds above 0, for instance 600"
        )
    if suite.context_parallel_size < 1:
        raise ConfigError(f"{section}.context_parallel_size is {suite.context_parallel_size}; valid: 1 or more")


def check_model_config(config: TransformerConfig, suite: Suite) -> None:
    """Raise ConfigError unless planned attention computes exactly what this TransformerConfig asks for.

    PlannedAttention calls it when it is built; a program may call it earlier, right after reading its settings.
    """
    check_suite(suite)
    for rule in _RULES:
        if hasattr(config, rule.setting) and not rule.works(getattr(config, rule.setting)):
            value = getattr(config, rule.setting)
            raise ConfigError(
                f"{rule.setting} is {value!r}; valid with planned attention: {rule.valid} ({rule.instead})"
            )
    if config.context_parallel_size != suite.context_parallel_size:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size} in TransformerConfig, but "
            f"{suite.context_parallel_size} in context_parallel_suite; give both the same number"
        )
    kind = config.cp_comm_type
    if kind is not None and (isinstance(kind, list) or ALIASES.get(kind, kind) != algorithm_name(suite.algorithm)):
        raise ConfigError(
            f"cp_comm_type is {kind!r}, but context_parallel_suite.algorithm is {suite.algorithm!r} for all layers; "
            "leave cp_comm_type at None: algorithm takes its place"
        )


def attention_config(
    config: TransformerConfig,
    tensor_parallel_size: int | None = None,
    *,
    mask: str = "causal",
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    scale: float | None = None,
) -> AttentionConfig:
    """What one attention layer of a Megatron model computes on one tensor-parallel rank: the third input of build_plan.

    Args:
        config: the model's settings.
        tensor_parallel_size: ranks that share the heads; default: config.tensor_model_parallel_size.
        mask: "causal" or "full".
        head_dim, head_dim_v: width of q and k, and of v; default: config.kv_channels for both.
        scale: factor of q.k; default: config.softmax_scale, and head_dim ** -0.5 if that is None.

    Raises:
        ConfigError: the heads cannot be shared by that many ranks.
    """
    tp = config.tensor_model_parallel_size if tensor_parallel_size is None else tensor_parallel_size
    if config.num_attention_heads % tp:
        raise ConfigError(
            f"num_attention_heads is {config.num_attention_heads}; valid: a multiple of tensor_model_parallel_size, "
            f"which is {tp}"
        )
    groups = config.num_query_groups or config.num_attention_heads
    if groups % tp and tp % groups:
        raise ConfigError(
            f"num_query_groups is {groups}; valid: a multiple or a divisor of tensor_model_parallel_size, which is {tp}"
        )
    width = head_dim or config.kv_channels or config.hidden_size // config.num_attention_heads
    return AttentionConfig(
        heads=config.num_attention_heads // tp,
        kv_heads=max(1, groups // tp),
        head_dim=width,
        head_dim_v=head_dim_v or width,
        mask=mask,
        scale=config.softmax_scale if scale is None else scale,
    )


def rows_multiple(config: TransformerConfig) -> int:
    """What each rank's rows must be a multiple of: sequence parallelism cuts them by the tensor-parallel size."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1
