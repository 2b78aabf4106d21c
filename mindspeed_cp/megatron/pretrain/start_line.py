"""print_start_line: what will run, told once when a training script has built its model."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist
from torch import nn

from mindspeed_cp import AttentionConfig
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.model_sizes import launch_settings
from mindspeed_cp.megatron.pretrain.layers import transformer_config_of


def print_start_line(models: Sequence[nn.Module], args: Namespace, suite: SuiteSettings) -> None:
    """Print :func:`start_line` and :func:`model_line` on the first rank of all."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(start_line(models, args, suite), model_line(args, suite), sep="\n", flush=True)


def model_line(args: Namespace, suite: SuiteSettings) -> str:
    """Return the command that models this launch: the settings of --cp-plan name no model, the launch does."""
    parallel: dict[str, int | str] = {"context_parallel_size": suite.context_parallel_size, "nodes": suite.nodes}
    if suite.cluster is not None:
        parallel["cluster"] = shlex.quote(suite.cluster)
    sizes = launch_settings(transformer_config_of(args)) | parallel
    words = " ".join(f"--set {key}={value}" for key, value in sizes.items())
    return f"mindspeed-cp: modelled by: mindspeed-cp simulate --lengths LENGTHS {words}"


def start_line(models: Sequence[nn.Module], args: Namespace, suite: SuiteSettings) -> str:
    """Return a line of the algorithm, the attention of each layer of the first pipeline stage, and where documents end.

    Args:
        models: the model of the first pipeline stage, or its virtual stages.
        args: Megatron's arguments.
        suite: the settings that all layers have.
    """
    layers = sorted(
        (module.number_in_model, _attention_words(module.attention))
        for model in models
        for module in model.modules()
        if isinstance(module, PlannedAttention)
    )
    options = "".join(f", {name} {value}" for name, value in suite.options.items())
    parts = [f"mindspeed-cp: {suite.algorithm}{options} over {suite.context_parallel_size} context-parallel ranks"]
    for words, group in groupby(layers, key=lambda layer: layer[1]):
        numbers = [number for number, _ in group]
        whole = numbers == list(range(numbers[0], numbers[-1] + 1))
        text = f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))
        parts.append(f"layer{'s' if len(numbers) > 1 else ''} {text}: {words}")
    stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
    if stages > 1:
        parts.append(f"these are the layers of the first of {stages} pipeline stages")
    return "; ".join([*parts, f"documents: {_document_words(args)}"])


def _attention_words(attention: AttentionConfig) -> str:
    words = [attention.mask]
    if attention.window is not None:
        words.append(f"window {attention.window}")
    if attention.alibi is not False:
        words.append("alibi")
    if attention.dropout:
        words.append(f"dropout {attention.dropout}")
    return ", ".join(words)


def _document_words(args: Namespace) -> str:
    """Return where documents of Megatron's data sets end; a script's own batches may say it in another way."""
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            return f"by cu_seqlens (--{name.replace('_', '-')})"
    if any(getattr(args, name, False) for name in ("reset_position_ids", "cp_plan_documents")):
        return "where positions restart (--reset-position-ids)"
    return "each row of Megatron's data sets is one"
