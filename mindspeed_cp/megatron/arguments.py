"""check_arguments: refuse arguments of Megatron that planned batches would contradict.

What becomes of every other argument is in docs/megatron_arguments.yaml, which a test compares with the parser of the
Megatron at hand, so that an argument of a new version is missed by name.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.settings import CONDITIONS, RULES, check_comm_type
from mindspeed_cp.megatron.mindspeed_compat import MINDSPEED_RULES
from mindspeed_cp.schema.unsupported import unsupported

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
    comm_type: Any = getattr(args, "cp_comm_type", None)
    if isinstance(comm_type, list) and len(comm_type) == 1:
        comm_type = comm_type[0]  # as Megatron passes it on
    check_comm_type(comm_type, suite)
