"""Planned attention for Hugging Face models, alone or under DDP, FSDP2 and device meshes.

Four lines bring a script over::

    from mindspeed_cp.integrations import huggingface as cp

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=cp.register())
    rows, labels = cp.planned_batch(batch, model.config, mesh["cp"])      # for every packed batch
    loss = cp.loss(model(**rows).logits, labels, cp.count_labels(labels))

Every call of every layer is compared with the plan: a window, scale, cap of scores, sink, dropout rate or mask that the
plan does not have is an error that names the layer. Needs transformers 5, which is imported by :func:`register`.
"""

from mindspeed_cp.integrations.huggingface.batch import documents_of_batch, planned_batch, shard_batch
from mindspeed_cp.integrations.huggingface.families import FAMILIES, IMPLEMENTATION, attention_config
from mindspeed_cp.integrations.huggingface.loss import count_labels, loss
from mindspeed_cp.integrations.huggingface.plans import ModelPlans, RankPlans, build_plans
from mindspeed_cp.integrations.huggingface.registration import register
from mindspeed_cp.integrations.huggingface.trainer import PlannedCollator, RepeatedRows, planned_callback

__all__ = [
    "FAMILIES",
    "IMPLEMENTATION",
    "ModelPlans",
    "PlannedCollator",
    "RankPlans",
    "RepeatedRows",
    "attention_config",
    "build_plans",
    "count_labels",
    "documents_of_batch",
    "loss",
    "planned_batch",
    "planned_callback",
    "register",
    "shard_batch",
]
