"""check_arguments: refuse arguments of Megatron that planned batches would contradict."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.rules import CONDITIONS
from mindspeed_cp.megatron.adaptors.settings import check_comm_type
from mindspeed_cp.megatron.arguments.refusals import ALL_RULES, FLAGS
from mindspeed_cp.megatron.beside_mindspeed.flags import MINDSPEED_RULES


def check_arguments(args: Namespace, suite: SuiteSettings | None = None) -> None:
    """Raise ConfigError if an argument asks for what planned batches do not compute; call it before a model is built.

    The hooks of :mod:`mindspeed_cp.megatron.pretrain` call it. Arguments that this Megatron lacks are not looked at.

    Args:
        args: Megatron's parsed arguments (``get_args()``).
        suite: the section context_parallel_suite; None leaves out what must be equal in both.
    """
    view = _with_config_names(args)
    for rule in (*MINDSPEED_RULES, *ALL_RULES):
        problem = rule.problem(view, CONDITIONS)
        if problem is not None:
            flag = FLAGS.get(rule.setting)
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


def _with_config_names(args: Namespace) -> Namespace:
    """Return the arguments with the names that TransformerConfig has for some of them."""
    names = {"num_moe_experts": "num_experts"}
    values = {new: getattr(args, old) for new, old in names.items() if hasattr(args, old)}
    return Namespace(**{**vars(args), **values})
