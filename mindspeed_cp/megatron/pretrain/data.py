"""get_batch: whole rows from Megatron's data iterator, planned and cut for this rank."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.batch import micro_batch_seed
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.whole_batch import planned_batch_from
from mindspeed_cp.megatron.pretrain.layers import transformer_config_of
from mindspeed_cp.megatron.pretrain.options import suite_of

#: Tensors over tokens of a batch of Megatron's data sets, and their types.
TOKEN_TENSORS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}

#: Other keys: documents, how long the longest is, and where a sample is from.
OTHER_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "attention_mask", "dataset_id")


def is_dataset_built_on_rank(vp_stage: int | None = None, is_packed_sequence: bool = False) -> bool:
    """Return True on the first tensor-parallel rank of every pipeline stage, as every stage plans its micro-batches.

    Scripts with pipeline parallelism use it in place of their own, which leaves out the stages in the middle.
    """
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)


def get_batch(
    data_iterator: Any, config: TransformerConfig | None = None
) -> tuple[dict[str, Tensor], PlannedBatchParams]:
    """Return this rank's rows of the next micro-batch, and the ``packed_seq_params`` with their plan.

    The first tensor-parallel rank reads whole rows and gives them to the others, as Megatron does. All rows of the
    micro-batch are packed into one. Documents end where the batch's cu_seqlens say (``--sft``,
    ``--dataloader-inter-document-masking``) and where positions restart (``--reset-position-ids``); else each row is
    one.

    Args:
        data_iterator: Megatron's; None on tensor-parallel ranks other than the first.
        config: the model's settings; default: those of the arguments.

    Returns:
        tokens, labels, loss_mask and position_ids, each [1, t]; and the parameters for the model.

    Raises:
        ConfigError: the batch cannot be planned, has a dense mask, or is missing on this pipeline stage.
    """
    from megatron.training import get_args

    args = get_args()
    suite = suite_of(args)
    config = transformer_config_of(args) if config is None else config
    whole = _shared_in_tensor_parallel_group(data_iterator, args)
    seed = None
    if config.attention_dropout:
        digest = zlib.crc32(whole["tokens"].cpu().numpy().tobytes())
        seed = micro_batch_seed(args.seed, (int(args.curr_iteration) << 32) + digest)
    rows, params = planned_batch_from(whole, config, suite, dropout_seed=seed)
    batch = {name: rows[name].cuda(non_blocking=True) for name in TOKEN_TENSORS}
    return batch, params


def _shared_in_tensor_parallel_group(data_iterator: Any, args: Any) -> dict[str, Tensor]:
    """Return the whole micro-batch: on the host where this rank is alone in its group, else on the device."""
    group, ranks = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    batch = _next(data_iterator) if first else {}
    if ranks == 1:
        return batch
    device = torch.cuda.current_device()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    ends = batch.get("cu_seqlens")
    sizes = torch.tensor(
        [*batch["tokens"].shape, *(ends.shape if ends is not None else (0, 0))] if first else [0] * 4,
        dtype=torch.int64,
        device=device,
    )
    dist.broadcast(sizes, source, group=group)
    rows, length, end_rows, end_count = sizes.tolist()
    shapes = {name: ((rows, length), dtype) for name, dtype in TOKEN_TENSORS.items()}
    if end_count:
        shapes["cu_seqlens"] = ((end_rows, end_count), torch.int32)
    shared = {}
    for name, (shape, dtype) in shapes.items():
        value = batch[name].to(device=device, dtype=dtype) if first else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value.contiguous(), source, group=group)
        shared[name] = value
    return shared


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
    unknown = sorted(set(batch) - {*TOKEN_TENSORS, *OTHER_KEYS})
    if unknown:
        raise ConfigError(
            f"the batch has {unknown}, which get_batch of mindspeed_cp.megatron.pretrain would drop; valid: "
            f"{', '.join((*TOKEN_TENSORS, *OTHER_KEYS))}; or take planned_batch_from in a get_batch of your own"
        )
    return {name: batch[name] for name in (*TOKEN_TENSORS, "cu_seqlens") if name in batch}
