"""Planned attention for Hugging Face models, alone or under DDP, FSDP2 and device meshes.

Four lines bring a script over::

    from mindspeed_cp.integrations import huggingface as cp

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=cp.register())
    rows, labels = cp.planned_batch(batch, model.config, mesh["cp"])      # for every packed batch
    loss = cp.loss(model(**rows).logits, labels, cp.count_labels(labels))

Trajectories that share prefixes are computed once, as trees::

    packed = Documents.from_trajectories(token_lists)
    rows, targets = cp.planned_trajectories(packed, model.config, mesh["cp"], weights=masks)
    loss = cp.tree_loss(model(**rows).logits, targets, cp.sum_weights(targets))

Every call of every layer is compared with the plan: a window, scale, cap of scores, sink, dropout rate or mask that the
plan does not have is an error that names the layer. Needs transformers 5, which is imported by :func:`register`.
``cp.register(check_attention=100)`` also compares some rows of every 100th batch with an fp64 reference.
"""

from mindspeed_cp.integrations.huggingface.attention import register
from mindspeed_cp.integrations.huggingface.batch import documents_of_batch, planned_batch
from mindspeed_cp.integrations.huggingface.families import FAMILIES, IMPLEMENTATION, VISION, attention_config
from mindspeed_cp.integrations.huggingface.loss import count_labels, global_loss, loss, loss_share
from mindspeed_cp.integrations.huggingface.plans import ModelPlans, RankPlans, build_plans
from mindspeed_cp.integrations.huggingface.rows import gather_rows
from mindspeed_cp.integrations.huggingface.trainer import PlannedCollator, RepeatedRows, planned_callback
from mindspeed_cp.integrations.huggingface.trees import (
    RankTargets,
    planned_trajectories,
    sum_weights,
    trajectory_log_probs,
    tree_loss,
)

__all__ = [
    "FAMILIES",
    "IMPLEMENTATION",
    "VISION",
    "ModelPlans",
    "PlannedCollator",
    "RankPlans",
    "RankTargets",
    "RepeatedRows",
    "attention_config",
    "build_plans",
    "count_labels",
    "documents_of_batch",
    "gather_rows",
    "global_loss",
    "loss",
    "loss_share",
    "planned_batch",
    "planned_callback",
    "planned_trajectories",
    "register",
    "sum_weights",
    "trajectory_log_probs",
    "tree_loss",
]
