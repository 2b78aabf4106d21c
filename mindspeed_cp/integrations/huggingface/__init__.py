"""Planned attention for Hugging Face models, alone or under DDP, FSDP2 and device meshes.

Six lines bring a script over::

    from mindspeed_cp.integrations import huggingface as cp

    cp.register()                                                         # once
    model = AutoModelForCausalLM.from_config(config, attn_implementation="mindspeed_cp")
    plans = cp.build_plans(model.config, documents, topology)             # for every packed batch
    batch = cp.shard_batch(batch, plans, rank, group=group)
    labels = batch.pop("shift_labels")
    loss = cp.loss(model(**batch).logits, labels, cp.count_labels(labels))

Every call of every layer is compared with the plan: a window, scale, cap of scores, sink, dropout rate or mask that the
plan does not have is an error that names the layer. Needs transformers 5, which is imported by :func:`register`.
"""

from mindspeed_cp.integrations.huggingface.batch import documents_of_batch, shard_batch
from mindspeed_cp.integrations.huggingface.families import FAMILIES, attention_config
from mindspeed_cp.integrations.huggingface.loss import count_labels, loss
from mindspeed_cp.integrations.huggingface.plans import ModelPlans, RankPlans, build_plans
from mindspeed_cp.integrations.huggingface.registration import IMPLEMENTATION, register

__all__ = [
    "FAMILIES",
    "IMPLEMENTATION",
    "ModelPlans",
    "RankPlans",
    "attention_config",
    "build_plans",
    "count_labels",
    "documents_of_batch",
    "loss",
    "register",
    "shard_batch",
]
