"""forward_step: a planned micro-batch through the model."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from megatron.core.utils import StragglerDetector, get_model_config
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.pretrain.data import get_batch
from mindspeed_cp.megatron.pretrain.losses import loss_func


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
    timers, straggler_timer = get_timers(), _straggler_timer()
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


def _straggler_timer() -> Any:
    """Return Megatron's one detector of slow ranks; to construct it again would switch it off."""
    return getattr(StragglerDetector, "_instance", None) or StragglerDetector()


def _count_operations(params: PlannedBatchParams, args: Any) -> None:
    """Tell Megatron 0.19 the lengths of documents, from which it computes the TFLOP/s that it logs.

    As in Megatron, where the data set gives cu_seqlens; else it takes rows for whole.
    """
    update = getattr(sys.modules.get("megatron.training.training"), "update_seqlen_stats_from_cu_seqlens", None)
    if update and (args.sft or getattr(args, "dataloader_inter_document_masking", False)):
        update(params.cu_seqlens_q)
