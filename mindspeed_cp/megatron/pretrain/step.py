"""forward_step and loss_func: a planned micro-batch through the model, and its loss as Megatron takes it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_model_config
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.loss import REPORT_KEY, loss_function
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.patches import versions
from mindspeed_cp.megatron.pretrain.data import get_batch

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
    from megatron.training import get_args

    args = get_args()
    total, count, reports = loss_function(loss_mask, losses)
    _check(total, args)
    report: Any = reports[REPORT_KEY]
    # With --sft Megatron averages the means of ranks in evaluation, of which one may have no counted token.
    averages_means = getattr(args, "sft", False) and not (model is not None and model.training)
    if not versions.SUMS_OVER_RANKS or averages_means:
        dist.all_reduce(report, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if not versions.SUMS_OVER_RANKS:
        report = (report[0], report[1])
    return total, count, {REPORT_KEY: report}


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


def forward_step(data_iterator: Any, model: nn.Module, return_schedule_plan: bool = False) -> tuple[Tensor, Any]:
    """Run the model on the next micro-batch; give it to ``pretrain`` in place of the script's own.

    Batch and model are timed for ``--log-straggler``, as in Megatron's own step.

    Returns:
        The losses of this rank's rows (hidden states in earlier pipeline stages), and the function that sums them.

    Raises:
        ConfigError: the batch cannot be planned, or a schedule plan is asked for.
    """
    from megatron.training import get_args, get_timers

    if return_schedule_plan:
        raise ConfigError(
            "return_schedule_plan is True; valid: False, since a schedule of half layers carries no plan; leave out "
            "--overlap-moe-expert-parallel-comm"
        )
    timers = get_timers()
    # Megatron's one detector of slow ranks; to construct it again would switch it off.
    straggler_timer = getattr(StragglerDetector, "_instance", None) or StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler_timer(bdata=True):
        batch, params = get_batch(data_iterator, get_model_config(model), training=model.training)
    if model.training:
        _count_operations(params, get_args())
    timers("batch-generator").stop()
    with straggler_timer:
        losses = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            packed_seq_params=params,
            **params.padding_arguments(model),
            **({"loss_mask": batch["loss_mask"]} if get_model_config(model).mtp_num_layers else {}),
        )
    return losses, partial(loss_func, batch["loss_mask"], model=model)


def _count_operations(params: PlannedBatchParams, args: Any) -> None:
    """Tell Megatron 0.19 the lengths of documents, from which it computes the TFLOP/s that it logs.

    As in Megatron, where the data set gives cu_seqlens; else it takes rows for whole.
    """
    update = getattr(sys.modules.get("megatron.training.training"), "update_seqlen_stats_from_cu_seqlens", None)
    if update and (args.sft or getattr(args, "dataloader_inter_document_masking", False)):
        update(params.cu_seqlens_q)
