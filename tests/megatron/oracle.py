"""The same step without planned attention: every document alone, on one rank, by attention written out in full."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.megatron import local_mtp_spec, megatron_imports
from tests.megatron.gpt import Case, Outcome, build, data, layer_spec, transformer_config

with megatron_imports():
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec


class DenseAttention(MegatronModule):
    """Megatron's core attention for one document: causal, with ALiBi if wanted, values of any width."""

    def __init__(self, config: Any, softmax_scale: float | None = None, alibi: bool = False, **_: Any) -> None:
        super().__init__(config=config)
        self.scale, self.alibi = softmax_scale, alibi

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s, 1, heads, dim] each -> [s, 1, heads * dim_v]."""
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * (self.scale or q.shape[-1] ** -0.5)
        distance = torch.arange(len(query)) - torch.arange(len(query))[:, None]
        if self.alibi:
            scores = scores + slopes(len(q))[:, None, None] * distance
        weights = scores.masked_fill(distance > 0, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)[:, None]


def slopes(heads: int) -> Tensor:
    """As the authors of ALiBi have it: geometric for a power of two, else filled up with every second one of the next."""
    power = 2 ** math.floor(math.log2(heads))
    of_power = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return torch.tensor(of_power + [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)][: heads - power])


def plain(case: Case) -> Outcome:
    """One step of Megatron with its own rotary positions, router and, unless widths or biases forbid it, attention."""
    config = transformer_config(**case.config)
    spec = layer_spec(config)
    if case.alibi or config.multi_latent_attention:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
                module=DenseAttention, params={"alibi": case.alibi}
            )
    arguments = {"position_embedding_type": "none", **case.model} if case.alibi else case.model
    if config.mtp_num_layers:
        arguments = {**arguments, "mtp_block_spec": local_mtp_spec(config, spec)}
    model = build(config, spec, **arguments)
    total, count = torch.zeros(()), 0
    for index in range(len(case.batches)):
        documents, whole = data(case, index)
        for start, stop in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
            if stop == start:
                continue
            tokens, labels, mask = (whole[name][None, start:stop] for name in ("tokens", "labels", "loss_mask"))
            hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)[None, None]
            positions = torch.arange(stop - start)[None]
            if "position_ids" in whole:
                positions = whole["position_ids"][:, None, start:stop]
            named = {"loss_mask": mask} if config.mtp_num_layers else {}
            losses = model(tokens, positions, hidden, labels=labels, **named)
            total = total + (losses * mask).sum()
            count += int(mask.sum())
    total.backward()
    gradients: dict[str, np.ndarray] = {
        name: (p.grad / max(count, 1)).numpy().copy() for name, p in model.named_parameters()
    }
    return Outcome(float(total.detach()) / max(count, 1), count, gradients)
