"""Checks of Megatron's settings and of its scripts' arguments, alone and against the section context_parallel_suite.

What is not supported is the table of :mod:`mindspeed_cp.schema.unsupported`. A setting that planned attention cannot
honour is refused with its value, the valid values and what to use instead. What becomes of every other argument is in
docs/megatron_arguments.yaml, which a test compares with the parser of the Megatron at hand, so that an argument of a
new version is missed by name.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp import ConfigError
from mindspeed_cp.algorithms import ALIASES, AUTO, algorithm_name
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.data.dispatch import POOL_ALGORITHM
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions
from mindspeed_cp.megatron.mindspeed_compat import MINDSPEED_CONDITIONS, MINDSPEED_RULES
from mindspeed_cp.megatron.patches.versions import IS_0_12
from mindspeed_cp.ops.attention.backends import BACKENDS, get_backend
from mindspeed_cp.schema.numbers import check_count
from mindspeed_cp.schema.unsupported import is_split, unsupported

#: Conditions of rows that depend on the Megatron and the MindSpeed at hand.
CONDITIONS = {
    "Megatron-core before 0.16": lambda config: IS_0_12,
    "split tokens, Megatron-core before 0.16": lambda config: IS_0_12 and is_split(config),  # without PlannedRouter
    **MINDSPEED_CONDITIONS,
}

#: What is not supported of TransformerConfig in every Megatron, and in the one at hand.
RULES = (*unsupported("model"), *unsupported("this_megatron"))


#: All rules of Megatron's own arguments.
ALL_RULES = (*RULES, *unsupported("arguments"))

#: What to put on the command line, where the name of the argument does not say it.
_FLAGS = {
    "calculate_per_token_loss": "--calculate-per-token-loss",
    "apply_rope_fusion": "--no-rope-fusion",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type alltoall",
    "reset_attention_mask": "--reset-attention-mask and --reset-position-ids together, or neither",
}

#: Names of TransformerConfig, and of the arguments that they are made of.
_CONFIG_NAMES = {"num_moe_experts": "num_experts"}


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


def check_arguments(args: Namespace, suite: SuiteSettings | None = None) -> None:
    """Raise ConfigError if an argument asks for what planned batches do not compute; call it before a model is built.

    The hooks of :mod:`mindspeed_cp.megatron.pretrain` call it. Arguments that this Megatron lacks are not looked at.

    Args:
        args: Megatron's parsed arguments (``get_args()``).
        suite: the section context_parallel_suite; None leaves out what must be equal in both.
    """
    named = {name: getattr(args, given) for name, given in _CONFIG_NAMES.items() if hasattr(args, given)}
    view = Namespace(**{**vars(args), **named})
    for rule in (*MINDSPEED_RULES, *ALL_RULES):
        problem = rule.problem(view, CONDITIONS)
        if problem is not None:
            flag = _FLAGS.get(rule.setting)
            raise ConfigError(f"{problem}; pass {flag}" if flag else problem)
    if suite is None:
        return
    if args.context_parallel_size != suite.context_parallel_size:
        raise ConfigError(
            f"context_parallel_size is {args.context_parallel_size} on the command line, but "
            f"{suite.context_parallel_size} in context_parallel_suite; give both the same number"
        )
    _check_of_scripts(args, suite)
    comm_type: Any = getattr(args, "cp_comm_type", None)
    if isinstance(comm_type, list) and len(comm_type) == 1:
        comm_type = comm_type[0]  # as Megatron passes it on
    check_comm_type(comm_type, suite)


def _check_of_scripts(args: Namespace, suite: SuiteSettings) -> None:
    """Raise ConfigError for settings and for flags beside --cp-plan that Megatron's own scripts cannot take."""
    interval = getattr(args, "cp_plan_check_attention", 0)
    check_count("cp_plan_check_attention", interval, least=0, what="a number of iterations")
    if suite.algorithm == AUTO:
        raise ConfigError(
            f"algorithm is {AUTO!r}; valid in Megatron's own scripts: an algorithm by name; `mindspeed-cp simulate "
            "--choose` compares them for lengths of documents"
        )
    if suite.p2p_groups == "directional":
        raise ConfigError(
            "p2p_groups is 'directional'; valid in Megatron's own scripts: 'auto' or 'batched', which both send the "
            "messages of a step that are due at once in one launch; `mindspeed-cp train` opens directional groups"
        )
    if suite.hccl_buffer_mb is not None:
        raise ConfigError(
            f"hccl_buffer_mb is {suite.hccl_buffer_mb}; valid in Megatron's own scripts: null, since Megatron makes "
            "the process groups; set HCCL_BUFFSIZE in the environment"
        )
    if getattr(args, "cp_plan_pool", False) and suite.algorithm != POOL_ALGORITHM:
        raise ConfigError(
            f"cp_plan_pool is True, and algorithm is {suite.algorithm!r}; valid with it: {POOL_ALGORITHM!r}, whose "
            "plans have groups of any size; or leave --cp-plan-pool out"
        )


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
    key, other = "layout 'balanced'", "layout 'zigzag'"
    if suite.algorithm == "hierarchical":
        key, other = "algorithm 'hierarchical'", "algorithm 'direct'"
    elif suite.options.get("layout") != "balanced":
        return
    if len(set(layer_attentions(config, 1, 0))) > 1:
        raise ConfigError(
            f"window_attn_skip_freq is {config.window_attn_skip_freq!r}; valid with context_parallel_suite.{key}: "
            "None, since documents are placed by the work of a layer, and all layers hold the same rows; or use "
            f"{other}"
        )


def rows_multiple(config: TransformerConfig) -> int:
    """Return the divisor of each rank's number of rows.

    Sequence parallelism splits rows over tensor-parallel ranks, and linear layers in fp8 or fp4 take rows by the blocks
    of their GEMM (``get_fp8_align_size`` and ``get_fp4_align_size`` of Megatron).
    """
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if getattr(config, "fp4", None) or (config.fp8 and config.fp8_recipe == "mxfp8"):
        return 32 * shares
    return 16 * shares if config.fp8 else shares
