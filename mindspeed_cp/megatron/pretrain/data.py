"""Micro-batches of Megatron's own scripts: whole rows from the data iterator, planned and cut for this rank.

``--cp-plan-pool``: every replica reads its own rows, as Megatron deals them. Ranks with the same context-parallel
number gather them, with the lengths of their documents, so that every rank of the pool has the whole micro-batch of all
replicas and makes the same choice. Megatron sums gradients and tokens over the same ranks either way.

``--cp-plan-check-attention``: every N iterations, one layer of the first micro-batch is watched
(:mod:`mindspeed_cp.engine.attention_check`). It is compared when the next micro-batch begins: before the weights
change, if the iteration has several. The output is compared, and the gradient of q if the backward has run by then, as
it has without pipeline stages.
"""

from __future__ import annotations

import os
import zlib
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp import Documents
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.derived import default_token_bound
from mindspeed_cp.config.rules import pool_topology
from mindspeed_cp.data.dispatch import PoolModel
from mindspeed_cp.engine.attention_check import AttentionCheck
from mindspeed_cp.errors import ConfigError, CorruptionError
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions, model_layer_cost, with_model_sizes
from mindspeed_cp.megatron.adaptors.batch import digest_of_batch, micro_batch_seed, planned_batch_from
from mindspeed_cp.megatron.adaptors.documents import documents_of_batch, token_shape
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.pretrain.layers import transformer_config_of
from mindspeed_cp.megatron.pretrain.options import settings_of
from mindspeed_cp.plan import Topology

#: Tensors over tokens of a batch of Megatron's data sets, and their types.
TOKEN_TENSORS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}

#: Of these, what ranks must have alike beside the plan, and replicas gather; positions follow from the documents.
CONTENTS = ("tokens", "labels", "loss_mask")

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
            (whole, digest), pool, rank = of_replicas, pool_of(suite), int(dist.get_rank(_pool_group()))
    seed = None
    if drops:
        seed = micro_batch_seed(args.seed, (int(args.curr_iteration) << 32) + digest)
    rows, params = planned_batch_from(whole, config, suite, rank, dropout_seed=seed, pool=pool, batch_digest=digest)
    ATTENTION_CHECK.begin(args, config.num_layers, params, training, suite.timeout_seconds)
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
        on_host = {name: batch[name].cpu() for name in CONTENTS}
        _check_vocabulary(on_host, vocabulary)
        digest = digest_of_batch(on_host) or 0
    if group.size() == 1:
        return batch, digest
    device = torch.cuda.current_device()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    described: list[Any] = [(digest, {name: value.shape for name, value in batch.items()}) if first else None]
    dist.broadcast_object_list(described, source, group=group)
    digest, shapes = described[0]
    shared = {}
    for name, shape in shapes.items():
        dtype = TOKEN_TENSORS.get(name, torch.int32)
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


def pool_of(suite: SuiteSettings) -> Topology:
    """Return the topology of the pool of this process's stage, from LOCAL_WORLD_SIZE, which launchers set; without it
    all ranks are on one machine.

    Raises:
        ConfigError: machines hold different numbers of whole replicas.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    replicas = parallel_state.get_data_parallel_world_size()
    return pool_topology(suite, replicas, local_ranks, tensor, "cp_plan_pool")


def _pool_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def pooled_batch(
    whole: Mapping[str, Tensor],
    digest: int,
    config: TransformerConfig,
    suite: SuiteSettings,
) -> tuple[dict[str, Tensor], int] | None:
    """Return the rows of all replicas, and a number of their tokens, or None where replicas are modelled to be faster.

    A collective of the ranks of all replicas.

    Args:
        whole: micro-batch of this replica: tensors over tokens, and ends of documents.
        digest: number of its tokens.
        config: the model's settings.
        suite: the section context_parallel_suite, with the options of the plans.

    Returns:
        tokens, labels and loss_mask of all replicas, [replicas * rows, tokens], with cu_seqlens of the whole; and the
        number. None: each replica computes its own.
    """
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return None
    documents = documents_of_batch(whole, token_shape(whole), None)
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, (documents.lengths, digest), group=group)
    lengths, digests = zip(*gathered, strict=True)
    attentions = layer_attentions(config)
    model = PoolModel(
        replica=suite.topology,
        pool=pool_of(suite),
        attention=attentions[0],
        layer=model_layer_cost(config, attentions[0]),
        layers=len(attentions),
        options=with_model_sizes(suite, config).options,
    )
    ends, tokens = np.cumsum([len(own) for own in lengths]), np.concatenate(lengths)
    replicas = [[np.arange(end - len(own), end)] for own, end in zip(lengths, ends, strict=True)]
    replicas.sort(key=lambda rows: -int((tokens[rows[0]] ** 2).sum()))  # the one that may be the slowest first
    if not _all_agree(bool(model.choose(tokens, replicas, [np.arange(len(tokens))]).pooled)):
        return None
    own = {name: whole[name].to(_device(group)).contiguous() for name in CONTENTS}
    rows = {name: _gathered(x, group).flatten(0, 1) for name, x in own.items()}  # equally many of each replica
    borders = Documents(tokens).offsets.astype(np.int32)
    return {**rows, "cu_seqlens": torch.from_numpy(borders)}, zlib.crc32(np.array(digests, np.int64).tobytes())


def _all_agree(is_pooled: bool) -> bool:
    """Return True if all ranks of the stage, tensor-parallel ones too, choose the pool. Machines may round differently,
    and a rank that chose otherwise would leave the others waiting for its rows."""
    chosen = torch.tensor([int(is_pooled)])
    for group in (_pool_group(), parallel_state.get_tensor_model_parallel_group()):
        chosen = chosen.to(_device(group))
        dist.all_reduce(chosen, dist.ReduceOp.MIN, group=group)
    return bool(chosen.item())


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors the group carries."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of a group, [ranks, ...]."""
    out = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(out, own, group=group)
    return torch.stack(out)


class IterationChecks:
    """The comparisons of one process, from one micro-batch to the next."""

    def __init__(self) -> None:
        self._iteration = -1  # that was watched last
        self._check: AttentionCheck | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(self, args: Namespace, layers: int, params: PlannedBatchParams, training: bool, timeout: float) -> None:
        """Compare what was watched before, and watch this micro-batch if it is its turn.

        Args:
            args: Megatron's arguments.
            layers: of the model.
            params: of the micro-batch.
            training: False for evaluation, which is not watched.
            timeout: seconds to wait for a rank.

        Raises:
            CorruptionError: attention was wrong; raised on the rank that holds the queries.
            PeerError: a rank died or did not answer.
        """
        self._compare()
        interval, iteration = getattr(args, "cp_plan_check_attention", 0), int(getattr(args, "curr_iteration", 0) or 0)
        if not (interval and training):
            return
        if iteration % interval == 0 and iteration != self._iteration:
            self._check = AttentionCheck(layers, (args.seed, iteration), timeout)
            self._iteration = iteration
        if self._check is not None and iteration == self._iteration:
            self._group = _pool_group() if params.pooled else parallel_state.get_context_parallel_group()
            params.attention_check = self._check  # until a layer of this pipeline stage has called it

    def _compare(self) -> None:
        check = self._check
        if check is None or not check.has_observed:
            return
        self._check = None
        difference = check.compare(self._group)
        if difference is not None:
            raise CorruptionError(
                f"iteration {self._iteration}: {difference}; go on from a checkpoint of an earlier iteration; if it "
                "happens again on that rank, take its device or machine out"
            )


#: Of this process; Megatron's training loop is one for each, too.
ATTENTION_CHECK = IterationChecks()
