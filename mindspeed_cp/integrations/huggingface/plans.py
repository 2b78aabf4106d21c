"""The plans of one packed batch for all layers of a model, and what one rank needs to run them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.algorithms.plan_cache import PlanCache
from mindspeed_cp.comm import DEFAULT_TIMEOUT
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.families import IMPLEMENTATION, attention_config, family_of, latent_layer
from mindspeed_cp.layout import Documents, Layout
from mindspeed_cp.plan import AttentionConfig, Plan, Topology


@dataclass(frozen=True, eq=False)
class ModelPlans:
    """Plans of one packed batch for all layers of a model; every rank holds the same rows in all of them.

    Attributes:
        attentions: attention of each layer.
        plans: one plan for each attention that differs.
        has_sinks: True if the model's layers have attention sinks.
        vocabulary: number of tokens that the model knows; None: not known.
    """

    attentions: tuple[AttentionConfig, ...]
    plans: dict[AttentionConfig, Plan]
    has_sinks: bool = False
    vocabulary: int | None = None

    @property
    def layout(self) -> Layout:
        """Which rank holds which rows."""
        return next(iter(self.plans.values())).batch_layout

    @property
    def documents(self) -> Documents:
        """Documents of the packed batch."""
        return self.layout.documents

    @property
    def mask(self) -> str:
        """ "causal" or "full"."""
        return self.attentions[0].mask

    def of_layer(self, layer: int) -> Plan:
        """Return the plan of a layer. Raises ConfigError for an unknown layer."""
        if not 0 <= layer < len(self.attentions):
            raise ConfigError(f"layer {layer} has no plan: the plans are for {len(self.attentions)} layers")
        return self.plans[self.attentions[layer]]


def build_plans(
    config: Any,
    documents: Documents,
    topology: Topology,
    algorithm: str = "direct",
    *,
    tensor_parallel_size: int = 1,
    tensor_parallel_rank: int = 0,
    **options: object,
) -> ModelPlans:
    """Build the plans of one packed batch for all layers of a Hugging Face model.

    Args:
        config: the model's configuration (``model.config``).
        documents: documents of the batch; with parents for models with a causal mask.
        topology: context-parallel ranks.
        algorithm, options: as for :func:`mindspeed_cp.build_plan`. Latents of deepseek_v3 can travel without tensor
            parallelism, if the installed transformers expands them in a method of its own.
        tensor_parallel_size, tensor_parallel_rank: as for :func:`attention_config`.

    Raises:
        ConfigError: the model, a setting, the algorithm or an option is not supported.
    """
    family = family_of(config)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in (None, IMPLEMENTATION):
        raise ConfigError(
            f"the model's attention implementation is {implementation!r}, which ignores plans; valid: "
            'from_pretrained(..., attn_implementation=register()) or model.set_attn_implementation("mindspeed_cp")'
        )
    if options.get("remap") == "hidden":
        raise ConfigError("remap is 'hidden'; valid for Hugging Face models: 'off', 'qkv', 'auto'")
    # With tensor parallelism kv_b_proj has its own way to add up gradients over the ranks.
    has_latents = tensor_parallel_size == 1 and latent_layer(config.model_type) is not None
    attentions = tuple(
        attention_config(
            config,
            layer,
            tensor_parallel_size=tensor_parallel_size,
            tensor_parallel_rank=tensor_parallel_rank,
            has_latents=has_latents,
        )
        for layer in range(config.num_hidden_layers)
    )
    distinct = tuple(dict.fromkeys(attentions))
    plans = plan_cache().get_layers(documents, topology, distinct, algorithm, options)
    by_attention = dict(zip(distinct, plans, strict=True))
    vocabulary = getattr(config, "vocab_size", None)
    return ModelPlans(attentions, by_attention, family.has_sinks, vocabulary)


@cache
def plan_cache() -> PlanCache:
    """Return the cache of the plans of this process, for batches whose documents have the same lengths again."""
    return PlanCache()


class RankPlans:
    """What one rank needs to run the layers of one batch; models take it as the argument ``plan``.

    No dataclass, as torch's wrappers copy dataclasses among a model's arguments.

    Attributes:
        plans: plans of all layers.
        rank: this context-parallel rank.
        rows: number of this rank's rows.
        padded_rows: number of rows with padding: a rank without rows has one, as models cannot reshape tensors without
            elements.
        group: context-parallel ranks; None: all processes.
        backend, timeout: as for :func:`mindspeed_cp.context_parallel_attention`.
        dropout_seed: seed of attention dropout, which a model with dropout needs: another number for every batch, the
            same on all ranks.
        batch_digest: digest of the whole batch, compared over the group; None: it is not compared.
        shifts_labels: True if the batch had labels, which were shifted by one token.
        features: of pictures, by their kind: numbers of those of this rank's rows, and how many the whole batch has.
    """

    def __init__(
        self,
        plans: ModelPlans,
        rank: int,
        group: dist.ProcessGroup | None,
        backend: Any,
        timeout: float,
        dropout_seed: int | None,
    ) -> None:
        dropout = max(attention.dropout for attention in plans.attentions)
        if dropout and dropout_seed is None:
            raise ConfigError(
                f"the model's attention has dropout {dropout} and no dropout_seed was given; valid: another number for "
                "every batch of every step and replica, the same on all context- and tensor-parallel ranks"
            )
        self.plans, self.rank = plans, rank
        self.group, self.backend, self.timeout, self.dropout_seed = group, backend, timeout, dropout_seed
        self.batch_digest: int | None = None
        self.shifts_labels = False
        self.features: dict[str, tuple[np.ndarray, int]] = {}
        self.rows = int(plans.layout.token_counts[rank])
        self.padded_rows = max(1, self.rows)

    def padded(self, rows: Tensor, value: float = 0, dim: int = 0) -> Tensor:
        """Return rows of this rank with padding of a value behind them."""
        shape = list(rows.shape)
        shape[dim] = self.padded_rows - self.rows
        return torch.cat([rows, rows.new_full(shape, value)], dim) if shape[dim] else rows


def rank_plans_on_mesh(
    config: Any,
    documents: Documents,
    mesh: Any,
    algorithm: str = "hierarchical",
    *,
    backend: Any = None,
    timeout: float = DEFAULT_TIMEOUT,
    dropout_seed: int | None = None,
    **options: Any,
) -> RankPlans:
    """Build the plans of a packed batch for this rank of a device mesh.

    Args:
        config, documents, algorithm, options: as for :func:`build_plans`.
        mesh: device mesh of the context-parallel ranks, such as ``mesh["cp"]``; None: one process alone.
        backend, timeout, dropout_seed: as for :class:`RankPlans`.

    Raises:
        ConfigError: as for :func:`build_plans`, :class:`RankPlans` and Topology.from_mesh.
    """
    topology, rank, group = Topology(), 0, None
    if mesh is not None:
        topology, rank, group = Topology.from_mesh(mesh), mesh.get_local_rank(), mesh.get_group()
    plans = build_plans(config, documents, topology, algorithm, **options)
    return RankPlans(plans, rank, group, backend, timeout, dropout_seed)
