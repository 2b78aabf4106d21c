"""planned_batch_from: plan and rows of a whole batch dict, as data loaders give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions, with_model_sizes
from mindspeed_cp.megatron.adaptors.batch import cut_batch, planned_params
from mindspeed_cp.megatron.adaptors.documents import CU_SEQLENS_KEYS, documents_of_batch, token_shape
from mindspeed_cp.megatron.adaptors.packed import plan_cache
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.settings import rows_multiple
from mindspeed_cp.plan import Plan

#: Keys that describe the batch and are left out of the result, whose parameters say the same.
DESCRIPTIONS = (*CU_SEQLENS_KEYS, "packed_seq_params", "max_seqlen", "max_seqlen_q", "max_seqlen_kv", "local_cp_size",
                "cp_group", "hybrid_cp_group")  # fmt: skip

#: Keys of hybrid context parallelism, with the reason why they must be None.
UNSUPPORTED = ("local_cp_size", "cp_group", "hybrid_cp_group")


def planned_batch_from(
    batch: Mapping[str, Any],
    config: TransformerConfig,
    suite: SuiteSettings,
    rank: int | None = None,
    *,
    eod: int | None = None,
    alibi: bool = False,
    dropout_seed: int | None = None,
    pass_through: Sequence[str] = (),
    pool: Topology | None = None,
    batch_digest: int | None = None,
) -> tuple[dict[str, Any], PlannedBatchParams]:
    """Plan a whole batch by the documents that it tells, and return this rank's rows and ``packed_seq_params``.

    ::

        batch, params = planned_batch_from(next(data_iterator), config, suite)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)

    Documents end where the first of these says, and all that the batch has must agree:

    1. ``cu_seqlens`` or ``cu_seqlens_q``, each also ``_padded``, or Megatron's plain ``packed_seq_params``:
       [documents + 1] over the whole batch, or one row of ends for each row. A padded document is one, padding
       included.
    2. ``position_ids`` that restart at 0 inside a row; not those of mrope.
    3. end-of-document tokens, if `eod` is given.

    Without any, each row is a document. Sources on a device are copied to the host, in one copy that waits for it.

    Args:
        batch: tensors of the whole batch, the same on all context-parallel ranks, not yet cut: tokens (or input_ids),
            labels, loss_mask and other tensors over tokens, each [tokens, ...] or [rows, tokens, ...]; labels shifted
            already. With config.mrope_section, position_ids [3, rows, tokens]. None stays None.
        config: the model's settings.
        suite: the section context_parallel_suite, as given to install.
        rank: context-parallel rank; default: Megatron's.
        eod: number of the end-of-document token, which is the last of its document.
        alibi: as given to install.
        dropout_seed: as for planned_batch.
        pass_through: keys that are returned as they are, such as those of images or provenance.
        pool: the context-parallel ranks of all data-parallel replicas, for a batch of the rows of all of them: it is
            planned over these ranks, and `rank` is the one among them; None: over the context-parallel ranks.
        batch_digest: number of the whole batch, the same on all its ranks, which every call of attention compares;
            default: that of its tensors over tokens, if they are on the host (:func:`digest_of_batch`).

    Returns:
        The same keys without those that describe documents: tensors over tokens [1, t, ...], packed into one row; and
        "position_ids" (int64), which restart in every document, or those of mrope [3, 1, t]. Then the parameters with
        the plans.

    Raises:
        ConfigError: sources differ or do not fit the batch, there is a dense attention_mask, a key is neither a tensor
            over tokens nor named in `pass_through`, or no plan can be built.
    """
    shape, suite = token_shape(batch), with_model_sizes(suite, config)
    _refuse(batch, suite)
    is_mrope = _check_mrope(batch.get("position_ids"), config)
    attentions = list(dict.fromkeys(layer_attentions(config, alibi=alibi)))
    documents = documents_of_batch(batch, shape, eod)
    topology = suite.topology if pool is None else pool
    plans = micro_batch_plans(documents, topology, attentions, suite, suite.options)
    params = planned_params(
        plans,
        _rank(rank, suite),
        rows_multiple=rows_multiple(config),
        dropout_seed=dropout_seed,
        pooled=pool is not None,
    )
    passed = {name: value for name, value in batch.items() if name in pass_through or value is None}
    wholes = {
        name: _over_tokens(name, value, shape)
        for name, value in batch.items()
        if name not in (*passed, *DESCRIPTIONS, "position_ids")
    }
    rows = cut_batch(wholes, batch["position_ids"] if is_mrope else None, params, batch_digest)
    return {**passed, **rows}, params


def micro_batch_plans(
    documents: Documents,
    topology: Topology,
    attentions: Sequence[AttentionConfig],
    suite: SuiteSettings,
    options: Mapping[str, Any],
) -> list[Plan]:
    """Return the plans of a micro-batch whose rows are cut by them, one for each attention.

    Args:
        documents, topology, options: arguments of build_plan; its algorithm is that of `suite`.
        attentions: attention of layers, each once.
        suite: the section context_parallel_suite.
    """
    cache = plan_cache(None, suite.verify_plans)
    return [cache.get(documents, topology, attention, suite.algorithm, dict(options)) for attention in attentions]


def _refuse(batch: Mapping[str, Any], suite: SuiteSettings) -> None:
    mask = batch.get("attention_mask")
    if mask is not None:
        raise ConfigError(
            f"the batch has an attention_mask of shape {list(np.shape(mask))}; valid: None; say where documents end by "
            "cu_seqlens, by position_ids that restart, or by eod=, and switch the mask off "
            "(--no-create-attention-mask-in-dataloader)"
        )
    for name in UNSUPPORTED:
        if batch.get(name) is not None:
            raise ConfigError(
                f"the batch has a {name}; valid: None, since a plan already gives each document the ranks it needs; "
                "switch hybrid or dynamic context parallelism off"
            )


def _check_mrope(position_ids: Any, config: TransformerConfig) -> bool:
    """Return True for models with mrope, whose batches have positions of time, height and width; raise ConfigError if
    the batch has others than the model."""
    section = getattr(config, "mrope_section", None)
    if (section is not None) == (np.ndim(position_ids) == 3):
        return section is not None
    described = "None" if position_ids is None else f"of shape {list(np.shape(position_ids))}"
    valid = "[rows, tokens], or None" if section is None else "[3, rows, tokens], of time, height and width"
    raise ConfigError(f"position_ids is {described}, but mrope_section is {section}; valid with that: {valid}")


def _rank(given: int | None, suite: SuiteSettings) -> int:
    if given is not None:
        return given
    if parallel_state.model_parallel_is_initialized():
        return int(parallel_state.get_context_parallel_rank())
    if suite.context_parallel_size > 1:
        raise ConfigError(
            "rank is None before initialize_model_parallel; valid: the context-parallel rank, 0 to "
            f"{suite.context_parallel_size - 1}"
        )
    return 0


def _over_tokens(name: str, value: Any, shape: tuple[int, int] | None) -> Tensor:
    """Return a tensor over tokens as [T, ...], or raise ConfigError."""
    if isinstance(value, (Tensor, np.ndarray)) and shape is not None:
        tensor, tokens = torch.as_tensor(value), shape[0] * shape[1]
        if tuple(tensor.shape[:2]) in (shape, (1, tokens)):
            return tensor.flatten(0, 1)
        if tensor.dim() and len(tensor) == tokens:
            return tensor
        described = f"has shape {list(tensor.shape)}"
    else:
        described = f"is a {type(value).__name__}"
    size = "no tensor over tokens" if shape is None else f"{shape[0]} rows of {shape[1]} tokens"
    raise ConfigError(
        f"{name} of the batch {described}, and the batch has {size}; valid: a tensor over tokens, [tokens, ...] or "
        f"[rows, tokens, ...]; pass_through=[{name!r}] returns it as it is"
    )
