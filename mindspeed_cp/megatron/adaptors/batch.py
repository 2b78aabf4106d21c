"""Micro-batches for Megatron: labels, a rank's rows, and the parameters that carry the plan.

`planned_batch` cuts a batch by a plan that is given, `planned_batch_from` makes the plan by the documents that a batch
dict of a data loader tells.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp import ConfigError, Documents, Plan, Topology, verify_plan
from mindspeed_cp.algorithms.plan_cache import PlanCache
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions, with_model_sizes
from mindspeed_cp.megatron.adaptors.documents import CU_SEQLENS_KEYS, documents_of_batch, mrope_rows, token_shape
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams, RotaryTripwire
from mindspeed_cp.megatron.adaptors.settings import rows_multiple as rows_multiple_of
from mindspeed_cp.megatron.patches import versions

FORMATS = ("thd", "sbhd")


def planned_params(
    plan: Plan | Sequence[Plan],
    rank: int,
    qkv_format: str = "thd",
    *,
    batch_size: int | None = None,
    rows_multiple: int = 1,
    dropout_seed: int | None = None,
    pooled: bool = False,
) -> PlannedBatchParams:
    """Return the ``packed_seq_params`` of one micro-batch for one context-parallel rank.

    Args:
        plan: the micro-batch's plan (``build_plan``), or one for each of the different ``layer_attentions(config)``.
        rank: this context-parallel rank.
        qkv_format: "thd", one packed row, or "sbhd", `batch_size` rows of equal length.
        batch_size: rows of "sbhd"; default: one for every document. Each row holds whole documents.
        rows_multiple: pad this rank's rows to a multiple of this (``rows_multiple(config)`` under sequence
            parallelism).
        dropout_seed: needed with attention dropout; another number for every micro-batch of every step and replica, the
            same on all context- and tensor-parallel ranks (``micro_batch_seed``).
        pooled: the plan is over the context-parallel ranks of all data-parallel replicas, numbered replica by replica,
            and `rank` is the one among these (``get_data_parallel_group(with_context_parallel=True)``).

    Raises:
        ConfigError: the rank, format or batch size does not fit the plan, or plans do not fit each other.
    """
    plans = (plan,) if isinstance(plan, Plan) else tuple(plan)
    _check_plans(plans)
    first = plans[0]
    if qkv_format not in FORMATS:
        raise ConfigError(f"qkv_format is {qkv_format!r}; valid: {', '.join(FORMATS)}")
    if not 0 <= rank < first.ranks:
        raise ConfigError(
            f"rank is {rank}, but the plan has ranks 0 to {first.ranks - 1}; give the rank in the context-parallel "
            "group"
        )
    if rows_multiple < 1:
        raise ConfigError(f"rows_multiple is {rows_multiple}; valid: 1 or more, see rows_multiple(config)")
    if qkv_format == "thd":
        if batch_size not in (None, 1):
            raise ConfigError(
                f"batch_size is {batch_size} for qkv_format 'thd'; valid: 1, all documents packed into one row"
            )
        batch_size = 1
    elif batch_size is None:
        batch_size = len(first.documents)
    _check_sequences(first, rank, batch_size)
    borders = torch.from_numpy(first.documents.offsets.astype(np.int32))
    longest = int(first.documents.lengths.max(initial=0))
    params = PlannedBatchParams(
        qkv_format=qkv_format,
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=first,
        plans=plans,
        rank=rank,
        batch_size=batch_size,
        rows_multiple=rows_multiple,
        dropout_seed=dropout_seed,
        pooled=pooled,
    )
    params.cp_group = RotaryTripwire()  # from 0.16 on; before, Megatron cuts its table by
    if versions.IS_0_12:
        params.cu_seqlens_q_padded = RotaryTripwire()
    return params


def _check_plans(plans: Sequence[Plan]) -> None:
    """Raise ConfigError unless all plans are of self-attention over the same rows."""
    if not plans:
        raise ConfigError("no plan was given; build one with build_plan for each of layer_attentions(config)")
    for number, plan in enumerate(plans):
        if not plan.kv_layout_in.same_as(plan.layout):
            raise ConfigError(
                f"plan {number} has keys of other documents than its queries; valid in Megatron: self-attention, "
                "build_plan without kv_documents"
            )
        first = plans[0]
        if not plan.layout.same_as(first.layout) or not plan.batch_layout.same_as(first.batch_layout):
            raise ConfigError(
                f"plan {number} gives ranks other tokens than plan 0, but all layers of a model hold the same rows; "
                "build the plans of a micro-batch with the same documents, topology, algorithm and layout"
            )


def micro_batch_seed(seed: int, number: int) -> int:
    """Return a seed of attention dropout for one micro-batch.

    Args:
        seed: of the run, 0 or more.
        number: of the micro-batch in the run, counted over all steps and replicas.

    Returns:
        A number below 2**63; other seeds and numbers give, but for chance, other results.
    """
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _check_sequences(plan: Plan, rank: int, batch_size: int) -> None:
    """Raise ConfigError unless sequences are whole documents with equally many rows on this rank."""
    tokens = plan.documents.tokens
    if batch_size == 1:
        return
    if plan.linear_layout is not None:
        raise ConfigError(
            f"batch_size is {batch_size}, but the plan has a linear layout of its own, which cuts sequences anywhere; "
            "use qkv_format 'thd', which packs documents of any length into one row"
        )
    if batch_size < 1 or tokens % batch_size:
        raise ConfigError(
            f"batch_size is {batch_size}, but the plan has {tokens} tokens; valid: a divisor of that, or qkv_format "
            "'thd'"
        )
    length = tokens // batch_size
    borders = np.arange(batch_size + 1) * length
    if not np.isin(borders, plan.documents.offsets).all():
        raise ConfigError(
            f"batch_size is {batch_size}, but sequences of {length} tokens would cut a document of the plan; use "
            "qkv_format 'thd', which packs documents of any length into one row"
        )
    trees = np.cumsum(np.append(0, plan.documents.tree_sums(plan.documents.lengths)))
    first_row, last_row = trees[:-1] // max(length, 1), (trees[1:] - 1) // max(length, 1)
    torn = np.flatnonzero(first_row < last_row)
    if len(torn):
        root = np.flatnonzero(plan.documents.parents < 0)[torn[0]]
        raise ConfigError(
            f"batch_size is {batch_size}, but documents that continue document {root} are in another row than it; "
            "valid: rows of whole trees, or qkv_format 'thd', one row of all"
        )
    counts = np.diff(np.searchsorted(plan.layout.tokens(rank), borders))
    if counts.min() != counts.max():
        raise ConfigError(
            f"rank {rank} holds {counts.tolist()} rows of the {batch_size} sequences, and 'sbhd' needs equally many; "
            "use qkv_format 'thd', which packs documents of any length into one row"
        )


def planned_batch(
    batch: Mapping[str, Tensor | np.ndarray],
    plan: Plan | Sequence[Plan],
    rank: int,
    qkv_format: str = "thd",
    *,
    batch_size: int | None = None,
    rows_multiple: int = 1,
    dropout_seed: int | None = None,
    pooled: bool = False,
    batch_digest: int | None = None,
) -> tuple[dict[str, Tensor], PlannedBatchParams]:
    """Return this rank's rows of a micro-batch with their positions, and the ``packed_seq_params`` that belong to them.

    Args:
        batch: tokens, labels, loss_mask and the like of the whole micro-batch, each [T, ...], [1, T, ...] or, for
            "sbhd", [batch_size, S, ...]; labels shifted already (:func:`shift_labels`). For models with mrope
            "position_ids", [3, T] or [3, batch_size, S]: positions of time, height and width.
        plan, rank, qkv_format, batch_size, rows_multiple, dropout_seed, pooled: as for :func:`planned_params`.
        batch_digest: number of the whole micro-batch, the same on all its ranks, which every call of attention
            compares; default: that of its tensors, if they are on the host (:func:`digest_of_batch`).

    Returns:
        The same keys, each [1, t, ...] or [batch_size, s, ...], and "position_ids" (int64), which restart in every
        document, or are those of mrope, [3, 1, t] or [3, batch_size, s]; padding rows, if any, are zero everywhere,
        loss_mask included. Then the result of :func:`planned_params`.

    Raises:
        ConfigError: as :func:`planned_params`; a tensor does not have the plan's tokens; or the batch brings its own
            mask, or positions in one dimension.
    """
    params = planned_params(
        plan,
        rank,
        qkv_format,
        batch_size=batch_size,
        rows_multiple=rows_multiple,
        dropout_seed=dropout_seed,
        pooled=pooled,
    )
    if batch.get("attention_mask") is not None:
        raise ConfigError(
            "the batch brings its own attention_mask; leave it out: the documents of the plan determine it"
        )
    total = params.linear.documents.tokens
    wholes = {}
    for name, value in batch.items():
        if value is None or name == "position_ids":
            continue
        whole = torch.as_tensor(value)
        sequences = params.batch_size, total // params.batch_size
        if whole.shape[:2] in ((1, total), sequences):
            whole = whole.flatten(0, 1)
        elif not whole.dim() or len(whole) != total:
            raise ConfigError(
                f"{name} has shape {list(whole.shape)}, but the plan has {total} tokens; valid: [{total}, ...] or "
                f"[{sequences[0]}, {sequences[1]}, ...]"
            )
        wholes[name] = whole

    def padded(rows: Tensor) -> Tensor:
        by_sequence = rows.reshape(params.batch_size, params.linear_length, *rows.shape[1:])
        return torch.nn.functional.pad(by_sequence, (0, 0) * (rows.dim() - 1) + (0, params.linear_padding))

    rows = {name: padded(whole[params.linear_tokens(whole.device)]) for name, whole in wholes.items()}
    device = next((x.device for x in rows.values()), torch.device("cpu"))
    if batch.get("position_ids") is None:
        rows["position_ids"] = padded(torch.from_numpy(params.linear.positions(rank)).to(device))
    else:
        whole = wholes["position_ids"] = mrope_rows(batch["position_ids"], total)
        rows["position_ids"] = (
            padded(whole[params.linear_tokens(whole.device)]).permute(2, 0, 1).contiguous().to(device)
        )
        # Rows of attention are others where linear layers have a layout of their own.
        attended = torch.from_numpy(params.layout.tokens(rank)).to(whole.device)
        params.mrope_positions = whole[attended].T.contiguous()
    params.batch_digest = digest_of_batch(wholes) if batch_digest is None else batch_digest
    return rows, params


def digest_of_batch(wholes: Mapping[str, Tensor]) -> int | None:
    """Return a number of a whole micro-batch, by which ranks with other tokens, labels or loss masks are found.

    Args:
        wholes: its tensors by name.

    Returns:
        Their crc32; None if one is on a device, for which the host would have to wait: only plans are compared then.
    """
    digest = 0
    for name in sorted(wholes):
        if wholes[name].device.type != "cpu":
            return None
        digest = zlib.crc32(wholes[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data, digest)
    return digest


def shift_labels(tokens: Tensor | np.ndarray, documents: Documents) -> tuple[Tensor, Tensor]:
    """Return labels and loss mask of whole documents; call it before slicing, as a rank lacks its rows' successors.

    Args:
        tokens: token numbers [T] (or any shape with T elements in the order of the documents).
        documents: the documents' lengths, T tokens together.

    Returns:
        (labels, loss_mask), both of the shape of tokens: labels[i] = tokens[i + 1] inside a document; the last token of
        a document predicts nothing, its label is 0 and its loss_mask 0.0; loss_mask is float32. So do tokens that see
        the next one, because both are in a block.

    Raises:
        ConfigError: the number of tokens differs, or documents have parents: the first token of one that continues
            another is predicted by its parent.
    """
    if documents.trees is not None:
        raise ConfigError(
            f"the labels are of {documents!r}: the first token of a document with a parent is predicted by its "
            "parent's last token, which may have several labels; valid: trajectory_batch, which takes "
            "Documents.from_trajectories"
        )
    whole = torch.as_tensor(tokens)
    if whole.numel() != documents.tokens:
        raise ConfigError(f"tokens has {whole.numel()} elements, but the documents have {documents.tokens} tokens")
    last = torch.from_numpy(documents.offsets[1:][documents.lengths > 0] - 1).to(whole.device)
    if documents.blocks is not None:
        last = torch.cat([last, torch.from_numpy(documents.blocks.seen_labels).to(whole.device)])
    labels = whole.reshape(-1).roll(-1)
    labels[last] = 0
    mask = torch.ones(whole.numel(), dtype=torch.float32, device=whole.device)
    mask[last] = 0.0
    return labels.reshape(whole.shape), mask.reshape(whole.shape)


#: Keys that describe the batch and are left out of the result, whose parameters say the same.
DESCRIPTIONS = (*CU_SEQLENS_KEYS, "packed_seq_params", "max_seqlen", "max_seqlen_q", "max_seqlen_kv", "local_cp_size",
                "cp_group", "hybrid_cp_group")  # fmt: skip

#: Keys of hybrid context parallelism, with the reason why they must be None.
UNSUPPORTED = ("local_cp_size", "cp_group", "hybrid_cp_group")


@cache
def plan_cache(verify: bool, build: Callable[..., Plan] | None = None) -> PlanCache:
    """Return a cache of plans of this process.

    Args:
        verify: prove every new plan.
        build: builds them; default: build_plan.
    """
    return PlanCache(verify_plan if verify else None, build=build)


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
    topology, cache = suite.topology if pool is None else pool, plan_cache(suite.verify_plans)
    plans = [cache.get(documents, topology, attention, suite.algorithm, suite.options) for attention in attentions]
    passed = {name: value for name, value in batch.items() if name in pass_through or value is None}
    wholes = {
        name: _over_tokens(name, value, shape)
        for name, value in batch.items()
        if name not in (*passed, *DESCRIPTIONS, "position_ids")
    }
    rows, params = planned_batch(
        {**wholes, **({"position_ids": batch["position_ids"]} if is_mrope else {})},
        plans,
        _rank(rank, suite),
        rows_multiple=rows_multiple_of(config),
        dropout_seed=dropout_seed,
        pooled=pool is not None,
        batch_digest=batch_digest,
    )
    return {**passed, **rows}, params


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
