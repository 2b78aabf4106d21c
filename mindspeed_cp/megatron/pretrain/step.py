"""forward_step: a planned micro-batch through the model."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.pretrain.data import get_batch
from mindspeed_cp.megatron.pretrain.losses import loss_func


def forward_step(data_iterator: Any, model: nn.Module, return_schedule_plan: bool = False) -> tuple[Tensor, Any]:
    """Run the model on the next micro-batch; give it to ``pretrain`` in place of the script's own.

    Returns:
        The losses of this rank's rows (hidden states in earlier pipeline stages), and the function that sums them.

    Raises:
        ConfigError: the batch cannot be planned, or a schedule plan is asked for.
    """
    from megatron.training import get_timers

    if return_schedule_plan:
        raise ConfigError(
            "return_schedule_plan is True; valid: False, since a schedule of half layers carries no plan; leave out "
            "--overlap-moe-expert-parallel-comm"
        )
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    config = get_model_config(model)
    batch, params = get_batch(data_iterator, config)
    timers("batch-generator").stop()
    named: dict[str, Any] = {}
    if config.num_moe_experts and params.linear_padding and _takes_padding_mask(model):
        named["padding_mask"] = params.padding_mask(batch["tokens"].device)
    if config.mtp_num_layers:
        named["loss_mask"] = batch["loss_mask"]
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params, **named
    )
    return losses, partial(loss_func, batch["loss_mask"], model=model)


def _takes_padding_mask(model: nn.Module) -> bool:
    """True from Megatron 0.16 on; before, rows of padding count as tokens of experts."""
    inner: Any = model
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    return "padding_mask" in inspect.signature(inner.forward).parameters
