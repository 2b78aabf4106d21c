"""--cp-plan: the section context_parallel_suite of a training script of Megatron."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import lru_cache
from pathlib import Path

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.settings import check_arguments
from mindspeed_cp.megatron.mindspeed_compat import check_mindspeed
from mindspeed_cp.schema.yaml_file import read_settings_file

SECTION = "context_parallel_suite"


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--cp-plan`` and the flags beside it to Megatron's parser: an ``extra_args_provider``."""
    group = parser.add_argument_group(title="planned context parallelism")
    group.add_argument(
        "--cp-plan",
        metavar="FILE",
        help=f"YAML file with the section {SECTION}, or of its keys alone; context_parallel_size may be left out",
    )
    group.add_argument(
        "--cp-plan-set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="other values of keys of the file, such as algorithm=ulysses",
    )
    group.add_argument(
        "--cp-plan-documents",
        action="store_true",
        help="attention stays inside the documents whose positions restart (--reset-position-ids); beside MindSpeed in "
        "place of --reset-attention-mask, for which it replaces Megatron's attention",
    )
    group.add_argument(
        "--cp-plan-pool",
        action="store_true",
        help="plan the rows of all data-parallel replicas over all their ranks as one pool, in the micro-batches where "
        "that is modelled to be faster; algorithm hierarchical",
    )
    group.add_argument(
        "--cp-plan-check-attention",
        metavar="ITERATIONS",
        type=int,
        default=0,
        help="every so many iterations, compute some queries of a layer again by the fp64 reference, and end the run "
        "if attention differs from it; 0: never",
    )
    return parser


def suite_of(args: Namespace) -> SuiteSettings:
    """Return the settings that --cp-plan names, after a check of all of Megatron's arguments.

    Call it before a model is built; :func:`settings_of` leaves out the check, for every micro-batch.

    Raises:
        ConfigError: there is no file, it is wrong, or arguments ask for what planned batches do not compute.
    """
    suite = settings_of(args)
    check_mindspeed()
    check_arguments(args, suite)
    return suite


def settings_of(args: Namespace) -> SuiteSettings:
    """Return the settings that --cp-plan names, read once for each file.

    Raises:
        ConfigError: there is no file, or it is wrong.
    """
    if not getattr(args, "cp_plan", None):
        raise ConfigError(
            "cp_plan is None; pass --cp-plan FILE with the section context_parallel_suite; the script's "
            "extra_args_provider must be mindspeed_cp.megatron.pretrain.add_arguments, or call it"
        )
    return _read(args.cp_plan, tuple(args.cp_plan_set), args.context_parallel_size)


@lru_cache
def _read(path: str, overrides: tuple[str, ...], context_parallel_size: int) -> SuiteSettings:
    if not Path(path).exists():
        raise ConfigError(
            f"--cp-plan {path}: no such file; give a YAML file with the section {SECTION}, or of its keys alone, for "
            "example one line `algorithm: ring`"
        )
    prefix = f"{SECTION}." if SECTION in read_settings_file(path).data else ""
    words = [word if word.startswith(prefix) else prefix + word for word in overrides]
    try:
        return SuiteSettings.from_yaml(path, words, context_parallel_size)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--set ", "--cp-plan-set ").replace("--set:", "--cp-plan-set:")) from None
