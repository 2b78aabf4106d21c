"""--cp-plan-planner: one rank of a machine plans for the others, in Megatron's own scripts."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.sections import check_planner
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.plan_sharing import StageSharing, launcher_problem, open_plan_sharing
from mindspeed_cp.plan_sharing.rule import system_problem

SETTING = "cp_plan_planner"


def check_planner_argument(args: Namespace) -> None:
    """Raise ConfigError if the planner is unknown, or is one that this rank cannot have."""
    planner = getattr(args, SETTING, "auto")
    check_planner(SETTING, planner)
    problem = (system_problem() or launcher_problem()) if planner == "node" else None
    if problem is not None:
        raise ConfigError(f"{SETTING} is 'node', but {problem}; valid here: replicated, or auto")


def sharing_of(args: Namespace, suite: SuiteSettings) -> StageSharing | None:
    """Return the plans that this rank shares by --cp-plan-planner, or None if it plans alone; see
    :func:`open_plan_sharing`.

    A rank waits for another as long as in collectives of Megatron (--distributed-timeout-minutes), or of this package
    (timeout_seconds), whichever is longer.

    Args:
        args: Megatron's arguments.
        suite: result of :func:`settings_of`.
    """
    minutes = getattr(args, "distributed_timeout_minutes", None) or 0
    return open_plan_sharing(
        suite,
        getattr(args, SETTING, "auto"),
        pooled=getattr(args, "cp_plan_pool", False),
        seconds=max(suite.timeout_seconds, 60.0 * minutes),
        setting=SETTING,
    )
