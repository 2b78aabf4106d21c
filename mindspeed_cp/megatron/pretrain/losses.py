"""loss_func: the loss of a micro-batch as Megatron's schedules and logs want it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor

from mindspeed_cp.megatron.adaptors.loss import REPORT_KEY, loss_function
from mindspeed_cp.megatron.patches import versions

SPIKE_FACTOR = 10  # of the largest loss so far, as in Megatron's pretrain_gpt.py


def loss_func(loss_mask: Tensor, losses: Tensor, model: Any = None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Compute Megatron's three-value loss of this rank's rows, and check it as the arguments say.

    Args:
        loss_mask: this rank's mask, as get_batch gives it.
        losses: the model's output for labels.
        model: the model, of which is read whether it is trained; None: it may be evaluated.

    Returns:
        (sum of masked losses, number of counted tokens, report) of loss_function; for Megatron 0.12, whose log adds
        nothing up, and where means of ranks are averaged (``--sft``), the report is the sum over data- and
        context-parallel ranks.
    """
    return reported(loss_function(loss_mask, losses), model)


def reported(
    loss: tuple[Tensor, Tensor, dict[str, Tensor]], model: Any = None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Check a loss as the arguments say, and return it with the report that Megatron's log takes; see `loss_func`."""
    from megatron.training import get_args

    args = get_args()
    total, count, reports = loss
    _check(total, args)
    report: Any = reports[REPORT_KEY]
    if not versions.SUMS_OVER_RANKS or _averages_means(args, model is not None and model.training):
        dist.all_reduce(report, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if not versions.SUMS_OVER_RANKS:
        report = (report[0], report[1])
    return total, count, {REPORT_KEY: report}


def _averages_means(args: Any, training: bool) -> bool:
    """Return True where Megatron averages the means of ranks, of which one may have no counted token: all ranks must
    then report the same. That is with --sft in evaluation."""
    return bool(getattr(args, "sft", False)) and not training


def _check(total: Tensor, args: Any) -> None:
    """Check a loss that is no number, or much larger than before, as Megatron's own loss function does."""
    machine = get_rerun_state_machine()
    checks: list[tuple[Any, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "found NaN in local forward loss calculation", True)]
        checks += [(torch.isinf, "found Inf in local forward loss calculation", True)]
    if args.check_for_spiky_loss:
        large = partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        checks += [(large, "Spiky loss", False)]
    for rejects, message, fatal in checks:
        machine.validate_result(result=total, rejection_func=rejects, message=message, tolerance=0.0, fatal=fatal)
