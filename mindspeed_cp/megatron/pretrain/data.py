"""get_batch: whole rows from Megatron's data iterator, planned and cut for this rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp.config.derived import default_token_bound
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.batch import digest_of_batch, micro_batch_seed, planned_batch_from
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.pretrain.attention_check import ATTENTION_CHECK
from mindspeed_cp.megatron.pretrain.layers import transformer_config_of
from mindspeed_cp.megatron.pretrain.options import settings_of
from mindspeed_cp.megatron.pretrain.pool import pool_of, pool_rank, pooled_batch

#: Tensors over tokens of a batch of Megatron's data sets, and their types.
TOKEN_TENSORS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}

#: Of these, what ranks must have alike beside the plan; positions follow from it.
DIGESTED = ("tokens", "labels", "loss_mask")

#: Ends of documents, without and with padding, int32 [rows, ends].
END_TENSORS = ("cu_seqlens", "cu_seqlens_padded")

#: Other keys, of which plans need nothing: how long the longest document is, and where a sample is from.
OTHER_KEYS = ("max_seqlen", "attention_mask", "dataset_id")


def is_dataset_built_on_rank(vp_stage: int | None = None, is_packed_sequence: bool = False) -> bool:
    """Return True on the first tensor-parallel rank of every pipeline stage, as every stage plans its micro-batches.

    Scripts with pipeline parallelism use it in place of their own, which leaves out the stages in the middle.
    """
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)


def get_batch(
    data_iterator: Any, config: TransformerConfig | None = None, *, training: bool = True
) -> tuple[dict[str, Tensor], PlannedBatchParams]:
    """Return this rank's rows of the next micro-batch, and the ``packed_seq_params`` with their plan.

    The first tensor-parallel rank reads whole rows and gives them to the others, as Megatron does. All rows of the
    micro-batch are packed into one. With ``--cp-plan-pool`` these may be the rows of all data-parallel replicas, over
    all their ranks. A rank holds at most 1.5 times its share of the tokens (`TOKENS_OVER_MEAN`), unless
    max_seqlen_per_dp_cp_rank says otherwise. Documents end where the batch's cu_seqlens say (``--sft``,
    ``--dataloader-inter-document-masking``) and where positions restart (``--reset-position-ids``); else each row is
    one.

    Args:
        data_iterator: Megatron's; None on tensor-parallel ranks other than the first.
        config: the model's settings; default: those of the arguments.
        training: False for evaluation, where no attention weights are dropped and no seed is needed.

    Returns:
        tokens, labels, loss_mask and position_ids, each [1, t]; and the parameters for the model.

    Attention compares tokens, labels and loss masks over context-parallel ranks, whose data loaders might differ.

    Raises:
        ConfigError: the batch cannot be planned, has a dense mask, or is missing on this pipeline stage.
        CorruptionError: the attention of the micro-batch before was wrong (``--cp-plan-check-attention``).
    """
    from megatron.training import get_args

    args = get_args()
    suite = settings_of(args)
    config = transformer_config_of(args) if config is None else config
    drops = training and bool(config.attention_dropout)
    whole, digest = _shared_in_tensor_parallel_group(data_iterator, getattr(args, "padded_vocab_size", None))
    suite = suite.model_copy(update={**default_token_bound(suite, whole["tokens"].numel()), **suite.options})
    pool, rank = None, None
    if getattr(args, "cp_plan_pool", False):
        of_replicas = pooled_batch(whole, digest, config, suite)
        if of_replicas is not None:
            (whole, digest), pool, rank = of_replicas, pool_of(suite), pool_rank()
    seed = None
    if drops:
        seed = micro_batch_seed(args.seed, (int(args.curr_iteration) << 32) + digest)
    rows, params = planned_batch_from(whole, config, suite, rank, dropout_seed=seed, pool=pool, batch_digest=digest)
    ATTENTION_CHECK.begin(args, config, params, training, suite.timeout_seconds)
    batch = {name: rows[name].cuda(non_blocking=True) for name in TOKEN_TENSORS}
    return batch, params


def _shared_in_tensor_parallel_group(data_iterator: Any, vocabulary: int | None) -> tuple[dict[str, Tensor], int]:
    """Return the whole micro-batch, with tokens of a vocabulary of this size, and a number of its tokens, labels and
    loss masks.

    The batch is on the host where this rank is alone in its group, else on the device. The number is computed where the
    batch is read, on the host, so that nobody waits for a device to have it; it travels with the batch's shape.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    batch = _next(data_iterator) if first else {}
    digest = 0
    if first:
        on_host = {name: batch[name].cpu() for name in DIGESTED}
        _check_vocabulary(on_host, vocabulary)
        digest = digest_of_batch(on_host) or 0
    if group.size() == 1:
        return batch, digest
    device = torch.cuda.current_device()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    names = ("tokens", *END_TENSORS)
    given = [size for name in names for size in (batch[name].shape if name in batch else (0, 0))]
    numbers = torch.tensor([digest, *given], dtype=torch.int64, device=device)
    dist.broadcast(numbers, source, group=group)
    digest, rows, length, *ends = numbers.tolist()
    shapes = {name: ((rows, length), dtype) for name, dtype in TOKEN_TENSORS.items()}
    for name, (end_rows, count) in zip(END_TENSORS, (ends[:2], ends[2:]), strict=True):
        if count:
            shapes[name] = (end_rows, count), torch.int32
    shared = {}
    for name, (shape, dtype) in shapes.items():
        value = batch[name].to(device=device, dtype=dtype) if first else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value.contiguous(), source, group=group)
        shared[name] = value
    return shared, digest


def _check_vocabulary(batch: dict[str, Tensor], size: int | None) -> None:
    """Raise ConfigError for a token, or a label that counts, beyond the vocabulary: vocabulary-parallel layers take it
    as a token of another rank, and train without a word."""
    if size is None:  # before Megatron knows it
        return
    counted = {"tokens": batch["tokens"], "labels": batch["labels"][batch["loss_mask"] != 0]}
    for name, values in counted.items():
        wrong = values[(values < 0) | (values >= size)]
        if wrong.numel():
            raise ConfigError(
                f"{name} of the batch have {int(wrong.flatten()[0])}; valid: 0 to {size - 1}, the padded vocabulary; "
                "loss_mask is 0 where a label does not count"
            )


def _next(data_iterator: Any) -> dict[str, Tensor]:
    """Return the tensors of the next micro-batch, checked."""
    if data_iterator is None:
        raise ConfigError(
            "data_iterator is None on the first tensor-parallel rank of a pipeline stage, but every stage plans its "
            "micro-batches; use is_dataset_built_on_rank of mindspeed_cp.megatron.pretrain in the script's "
            "train_valid_test_datasets_provider"
        )
    batch = {name: value for name, value in next(data_iterator).items() if value is not None}
    missing = [name for name in TOKEN_TENSORS if name not in batch]
    if missing:
        raise ConfigError(
            f"the batch has {sorted(batch)} and lacks {missing}; valid: a batch of Megatron's GPT or SFT data sets"
        )
    if "attention_mask" in batch:
        raise ConfigError(
            f"the batch has an attention_mask of shape {list(batch['attention_mask'].shape)}; valid: none; pass "
            "--no-create-attention-mask-in-dataloader"
        )
    known = (*TOKEN_TENSORS, *END_TENSORS, *OTHER_KEYS)
    unknown = sorted(set(batch) - set(known))
    if unknown:
        raise ConfigError(
            f"the batch has {unknown}, which get_batch of mindspeed_cp.megatron.pretrain would drop; valid: "
            f"{', '.join(known)}; or take planned_batch_from in a get_batch of your own"
        )
    for name in TOKEN_TENSORS:
        if batch[name].dim() != 2:
            raise ConfigError(f"{name} of the batch has shape {list(batch[name].shape)}; valid: [rows, tokens]")
    for name in END_TENSORS:
        if name in batch:
            batch[name] = _rows_of_ends(name, batch[name])
    return {name: batch[name] for name in (*TOKEN_TENSORS, *END_TENSORS) if name in batch}


def _rows_of_ends(name: str, ends: Tensor) -> Tensor:
    """Return ends of documents as [rows, ends]; one row [ends] is that of the whole micro-batch."""
    if ends.dim() not in (1, 2):
        raise ConfigError(
            f"{name} of the batch has shape {list(ends.shape)}; valid: [rows, documents + 1], or [documents + 1] of "
            "the whole micro-batch"
        )
    return ends.reshape(-1, ends.shape[-1])
