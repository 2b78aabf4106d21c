"""What of Megatron's and the suite's settings planned attention can honour.  What it cannot is refused when it is read.

Nothing is dropped in silence: each refusal names the setting, its value, the valid values and what to use instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron.attentions import layer_attentions
from mindspeed_cp.megatron.rules import RULES
from mindspeed_cp.ops.attention.backends import BACKENDS, backend_named
from mindspeed_cp.plan import ALIASES, algorithm_name


class Suite(Protocol):
    """The settings of the suite that this package reads (see mindspeed_cp.config.SuiteSettings)."""

    @property
    def algorithm(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def backend(self) -> str: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def verify_plans(self) -> bool: ...


def check_suite(suite: Suite) -> None:
    """Raise ConfigError unless this version runs the suite's settings."""
    section = "context_parallel_suite"
    try:
        algorithm_name(suite.algorithm)
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}; ring is exact for every document length and rank count") from None
    backends = ("auto", *BACKENDS)
    if suite.backend not in backends:
        raise ConfigError(
            f"{section}.backend is {suite.backend!r}; valid: {', '.join(backends)}; auto takes the backend of the "
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
    for rule in RULES:
        rule.check(config)
    if config.context_parallel_size != suite.context_parallel_size:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size} in TransformerConfig, but "
            f"{suite.context_parallel_size} in context_parallel_suite; give both the same number"
        )
    _check_layers(config, suite)
    if config.deterministic_mode and suite.backend != "auto":
        check_deterministic(suite.backend)
    kind = config.cp_comm_type
    if kind is not None and (isinstance(kind, list) or ALIASES.get(kind, kind) != algorithm_name(suite.algorithm)):
        raise ConfigError(
            f"cp_comm_type is {kind!r}, but context_parallel_suite.algorithm is {suite.algorithm!r} for all layers; "
            "leave cp_comm_type at None: algorithm takes its place"
        )


def check_deterministic(backend: str) -> None:
    """Raise ConfigError if a backend of the attention operator may give other bits in the next run."""
    if not backend_named(backend).deterministic:
        valid = ", ".join(name for name, one in BACKENDS.items() if one.deterministic)
        raise ConfigError(
            f"deterministic_mode is True, but the attention backend {backend!r} may give other bits in the next run; "
            f"valid: False, or context_parallel_suite.backend: one of {valid}"
        )


def _check_layers(config: TransformerConfig, suite: Suite) -> None:
    """ConfigError where layers attend differently and the algorithm places documents by how they do."""
    hierarchical = suite.algorithm == "hierarchical"
    if (hierarchical or suite.options.get("layout") == "balanced") and len(set(layer_attentions(config, 1, 0))) > 1:
        key, value, other = (
            ("algorithm", "hierarchical", "algorithm 'direct'")
            if hierarchical
            else ("layout", "balanced", "layout 'zigzag'")
        )
        raise ConfigError(
            f"window_attn_skip_freq is {config.window_attn_skip_freq!r}; valid with context_parallel_suite.{key} "
            f"{value!r}: None, since documents are placed by the work of a layer, and all layers hold the same rows; "
            f"or use {other}"
        )


def rows_multiple(config: TransformerConfig) -> int:
    """What each rank's rows must be a multiple of: sequence parallelism cuts them by the tensor-parallel size."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1
