"""Checks of Megatron's settings against the section context_parallel_suite.

A setting that planned attention cannot honour is refused with its value, the valid values and what to use instead.
"""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp import ConfigError
from mindspeed_cp.algorithms import ALIASES, algorithm_name
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions
from mindspeed_cp.megatron.mindspeed_compat import MINDSPEED_CONDITIONS, MINDSPEED_RULES
from mindspeed_cp.megatron.patches.multi_token import PACKED
from mindspeed_cp.ops.attention.backends import BACKENDS, get_backend
from mindspeed_cp.schema.unsupported import is_split, unsupported


def _divides_losses(config: TransformerConfig) -> bool:
    """True if tokens are split and Megatron (0.12) has no place for PlannedRouter in the spec."""
    return is_split(config) and "router" not in MoESubmodules.__dataclass_fields__


#: Conditions of rows that depend on the Megatron and the MindSpeed at hand.
CONDITIONS = {
    "Megatron-core before 0.16": lambda config: not PACKED,
    "split tokens, Megatron-core before 0.16": _divides_losses,
    **MINDSPEED_CONDITIONS,
}

#: What is not supported of TransformerConfig in every Megatron, and in the one at hand.
RULES = (*unsupported("model"), *unsupported("this_megatron"))


def check_model_config(config: TransformerConfig, suite: SuiteSettings) -> None:
    """Raise ConfigError unless planned attention computes exactly what this TransformerConfig asks for.

    PlannedAttention calls it when it is built; a program may call it earlier, right after reading its settings.
    """
    for rule in (*MINDSPEED_RULES, *RULES):
        rule.check(config, CONDITIONS)
    if config.context_parallel_size != suite.context_parallel_size:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size} in TransformerConfig, but "
            f"{suite.context_parallel_size} in context_parallel_suite; give both the same number"
        )
    algorithm_name(suite.algorithm)  # auto must have been replaced by the algorithm that it chose
    _check_layers(config, suite)
    if config.deterministic_mode and suite.backend != "auto":
        check_deterministic(suite.backend)
    check_comm_type(config.cp_comm_type, suite)


def check_comm_type(comm_type: str | list[str] | None, suite: SuiteSettings) -> None:
    """Raise ConfigError if Megatron's cp_comm_type names another algorithm than the suite, or one for each layer.

    "p2p" is the default of Megatron's command line, so that nobody may have asked for it: it is valid with every
    algorithm that the suite names.
    """
    algorithm = algorithm_name(suite.algorithm)
    if comm_type is None or (comm_type == "p2p" and "algorithm" in suite.model_fields_set):
        return
    if isinstance(comm_type, list) or ALIASES.get(comm_type, comm_type) != algorithm:
        raise ConfigError(
            f"cp_comm_type is {comm_type!r}, but context_parallel_suite.algorithm is {suite.algorithm!r} for all "
            "layers; leave cp_comm_type at its default (None; 'p2p' on the command line): algorithm takes its place"
        )


def check_deterministic(backend: str) -> None:
    """Raise ConfigError if a backend of the attention operator may give other bits in the next run."""
    if not get_backend(backend).deterministic:
        valid = ", ".join(name for name, known in BACKENDS.items() if known.deterministic)
        raise ConfigError(
            f"deterministic_mode is True, but the attention backend {backend!r} may give other bits in the next run; "
            f"valid: False, or context_parallel_suite.backend: one of {valid}"
        )


def _check_layers(config: TransformerConfig, suite: SuiteSettings) -> None:
    """Raise ConfigError if layers attend differently and the algorithm places documents by how they do."""
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
    """Return the divisor of each rank's number of rows.

    Sequence parallelism splits rows over tensor-parallel ranks, and linear layers in fp8 or fp4 take rows by the blocks
    of their GEMM (``get_fp8_align_size`` and ``get_fp4_align_size`` of Megatron).
    """
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return shares * _rows_of_gemm_block(config)


def _rows_of_gemm_block(config: TransformerConfig) -> int:
    """Return the divisor of the rows that a linear layer takes in the precision of the settings."""
    if getattr(config, "fp4", None):
        return 32
    if config.fp8:
        return 32 if config.fp8_recipe == "mxfp8" else 16
    return 1
