"""mindspeed-cp inside Megatron-core: core attention, rotary positions, batches, loss, and a CPU mode for CI.

::

    spec = install(get_gpt_layer_local_spec(normalization="RMSNorm"), suite)     # suite: section context_parallel_suite
    model = install_model(GPTModel(config, spec, ..., position_embedding_type="rope"))

    plan = build_plan(row.documents, Topology(1, cp), attention_config(config))  # per micro-batch
    batch, params = planned_batch({"tokens": ..., "labels": ..., "loss_mask": ...}, plan, cp_rank)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
    return losses, partial(loss_function, batch["loss_mask"])                    # what a forward_step returns

A loader's batch that says by cu_seqlens, positions or end-of-document tokens where documents end goes through
`planned_batch_from(batch, config, suite)` instead of build_plan and planned_batch; a model called with Megatron's plain
`PackedSeqParams` takes its plan from their cu_seqlens. Trajectories that share prefixes, packed as trees, go through
`trajectory_batch` and `trajectory_loss_function`.

With sliding windows in some layers a micro-batch needs a plan for each of `dict.fromkeys(layer_attentions(config))`;
with attention dropout, planned_batch a `dropout_seed`; with experts, the model `**params.padding_arguments(model)`;
with multi-token prediction, the model `loss_mask=batch["loss_mask"]`. `local_spec(config)` and `local_mtp_spec(config,
spec)` are specs for every layout where Transformer Engine is absent.

Importing this package imports megatron.core (seconds) and patches nothing.
"""

from __future__ import annotations

from mindspeed_cp.megatron.patches.imports import megatron_imports

with megatron_imports():
    from mindspeed_cp.megatron.adaptors.attentions import attention_config, layer_attentions
    from mindspeed_cp.megatron.adaptors.batch import (
        micro_batch_seed,
        planned_batch,
        planned_batch_from,
        planned_params,
        shift_labels,
    )
    from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
    from mindspeed_cp.megatron.adaptors.loss import check_tokens_per_step, loss_function
    from mindspeed_cp.megatron.adaptors.model import install_model
    from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
    from mindspeed_cp.megatron.adaptors.rotary import LatentRotary, PlannedRotary
    from mindspeed_cp.megatron.adaptors.router import PlannedRouter
    from mindspeed_cp.megatron.adaptors.settings import check_model_config, rows_multiple
    from mindspeed_cp.megatron.adaptors.spec import install, local_mtp_spec, local_spec
    from mindspeed_cp.megatron.adaptors.trajectories import target_losses, trajectory_batch, trajectory_loss_function
    from mindspeed_cp.megatron.patches.compat import megatron_compat
    from mindspeed_cp.megatron.patches.device_shim import megatron_on, megatron_on_cpu, megatron_on_npu

__all__ = [
    "LatentRotary",
    "PlannedAttention",
    "PlannedBatchParams",
    "PlannedRotary",
    "PlannedRouter",
    "attention_config",
    "check_model_config",
    "check_tokens_per_step",
    "install",
    "install_model",
    "layer_attentions",
    "local_mtp_spec",
    "local_spec",
    "loss_function",
    "megatron_compat",
    "megatron_imports",
    "megatron_on",
    "megatron_on_cpu",
    "megatron_on_npu",
    "micro_batch_seed",
    "planned_batch",
    "planned_batch_from",
    "planned_params",
    "rows_multiple",
    "shift_labels",
    "target_losses",
    "trajectory_batch",
    "trajectory_loss_function",
]
