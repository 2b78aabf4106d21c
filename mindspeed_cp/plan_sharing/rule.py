"""When one rank of a machine plans for the others: the setting, and what `auto` means."""

from __future__ import annotations

import socket

from mindspeed_cp.config.sections import Planner
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.data.pool import POOL_ALGORITHM
from mindspeed_cp.plan_sharing.node_ranks import NodeRanks

#: auto: a rank with fewer cores than this makes its plans on a core that its training needs.
CORES_TO_PLAN_ALONE = 2


def may_share_plans(planner: Planner, suite: SuiteSettings) -> bool:
    """Return True if these settings let the ranks of a machine share plans.

    auto: where plans are searched for, which takes longer than to send them. Proofs (`verify_plans`) are also shared by
    ranks of the training command that plan alone, so auto leaves these alone.
    """
    if planner != "auto":
        return planner == "node"
    return (suite.algorithm == POOL_ALGORITHM or bool(suite.candidates)) and not suite.verify_plans


def wants_to_share(planner: Planner, node: NodeRanks) -> bool:
    """Return True if the ranks of a machine that may share plans do so.

    auto: where a rank has fewer than `CORES_TO_PLAN_ALONE` cores. With spare cores every rank plans beside its
    training, and has its plan sooner.
    """
    return planner == "node" or node.cores_per_rank < CORES_TO_PLAN_ALONE


def sharing_problem(node: NodeRanks | None) -> str | None:
    """Return why the ranks of a machine cannot share plans, or None."""
    if node is None:
        return "the launcher does not number the ranks of a machine one after the other"
    return system_problem()


def system_problem() -> str | None:
    """Return why no ranks of this system can share plans, or None."""
    return None if hasattr(socket, "AF_UNIX") else "this system has no sockets in files"
