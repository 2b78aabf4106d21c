"""Trajectories in Megatron's training scripts: a micro-batch of prefix trees, its loss, and a forward step of both."""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mindspeed_cp.config.derived import default_token_bound
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import PackedTrajectories
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions, with_model_sizes
from mindspeed_cp.megatron.adaptors.batch import micro_batch_seed
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams
from mindspeed_cp.megatron.adaptors.settings import rows_multiple
from mindspeed_cp.megatron.adaptors.trajectories import trajectory_batch, trajectory_loss_function
from mindspeed_cp.megatron.adaptors.whole_batch import micro_batch_plans
from mindspeed_cp.megatron.pretrain.attention_check import ATTENTION_CHECK
from mindspeed_cp.megatron.pretrain.layers import transformer_config_of
from mindspeed_cp.megatron.pretrain.options import settings_of
from mindspeed_cp.megatron.pretrain.step import refuse_schedule_plan, reported

#: Arguments that say in another way what attends to what, or what is learned.
_OF_DATA_SETS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "sft",
                 "dataloader_inter_document_masking", "cp_plan_documents")  # fmt: skip


def get_trajectory_batch(
    packed: PackedTrajectories,
    weights: Sequence[Any] | None = None,
    config: TransformerConfig | None = None,
    *,
    training: bool = True,
) -> tuple[dict[str, Tensor], PlannedBatchParams]:
    """Return this rank's rows of a micro-batch of trajectories, on its device, and the ``packed_seq_params``.

    Args:
        packed: ``Documents.from_trajectories(...)``, the same on all tensor- and context-parallel ranks and pipeline
            stages of a replica.
        weights: loss weights, as for :func:`mindspeed_cp.megatron.trajectory_batch`.
        config: the model's settings; default: those of the arguments.
        training: False for evaluation, where no attention weights are dropped.

    Returns:
        As :func:`mindspeed_cp.megatron.trajectory_batch`.

    Raises:
        ConfigError: an argument contradicts trajectories, or the batch cannot be planned.
    """
    from megatron.training import get_args

    args = get_args()
    suite = settings_of(args)
    config = transformer_config_of(args) if config is None else config
    _refuse(args, config, packed)
    options = {**default_token_bound(suite, packed.documents.tokens), **with_model_sizes(suite, config).options}
    attentions = list(dict.fromkeys(layer_attentions(config)))
    plans = micro_batch_plans(packed.documents, suite.topology, attentions, suite, options)
    seed = None
    if training and config.attention_dropout:
        number = zlib.crc32(packed.tokens.tobytes())
        seed = micro_batch_seed(args.seed, (int(args.curr_iteration) << 32) + number)
    rank = parallel_state.get_context_parallel_rank()
    batch, params = trajectory_batch(
        packed, plans, rank, weights, rows_multiple=rows_multiple(config), dropout_seed=seed
    )
    ATTENTION_CHECK.begin(args, config, params, training, suite.timeout_seconds)
    return {name: value.cuda(non_blocking=True) for name, value in batch.items()}, params


def _refuse(args: Namespace, config: TransformerConfig, packed: PackedTrajectories) -> None:
    """Raise ConfigError for arguments that contradict trajectories."""
    for name in _OF_DATA_SETS:
        if getattr(args, name, False):
            raise ConfigError(
                f"{name} is True; valid with trajectories: False, since the trees say what attends to what, and the "
                "weights what is learned"
            )
    if getattr(args, "cp_plan_pool", False):
        raise ConfigError(
            "cp_plan_pool is True; valid with trajectories: False, since replicas do not gather each other's trees; "
            "`mindspeed-cp train` does, with data.balance: pool"
        )
    if config.mtp_num_layers:
        raise ConfigError(
            f"mtp_num_layers is {config.mtp_num_layers}; valid with trajectories: None, since a token of a tree has "
            "several successors"
        )
    longest = int(packed.positions.max(initial=0)) + 1
    table = getattr(args, "max_position_embeddings", None)
    if getattr(args, "position_embedding_type", None) == "learned_absolute" and table and longest > table:
        raise ConfigError(
            f"max_position_embeddings is {table}, and the longest trajectory has {longest} tokens; valid: so many or "
            "more"
        )


def trajectory_loss_func(
    batch: Mapping[str, Tensor], model: nn.Module, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Compute Megatron's three-value loss of this rank's trajectories, and check it as the arguments say.

    Args:
        batch: result of :func:`get_trajectory_batch`.
        model: the model.
        logits: its output without labels.

    Returns:
        As :func:`mindspeed_cp.megatron.pretrain.loss_func`.
    """
    return reported(trajectory_loss_function(batch, model, logits), model)


def trajectory_forward_step(
    data_iterator: Any, model: nn.Module, return_schedule_plan: bool = False
) -> tuple[Tensor, Any]:
    """Run the model on the next trajectories; give it to ``pretrain`` in place of the script's own.

    Args:
        data_iterator: yields PackedTrajectories, or pairs of these and their loss weights, the same on all tensor- and
            context-parallel ranks and pipeline stages of a replica.
        model: the model.
        return_schedule_plan: must be False.

    Returns:
        The logits of this rank's rows (hidden states in earlier pipeline stages), and the function that sums losses.

    Raises:
        ConfigError: as :func:`get_trajectory_batch`, the iterator yields something else, or a schedule plan is asked
            for.
    """
    refuse_schedule_plan(return_schedule_plan)
    given = next(data_iterator) if data_iterator is not None else None
    packed, weights = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(packed, PackedTrajectories):
        raise ConfigError(
            f"the data iterator gave {type(packed).__name__}; valid on every rank: Documents.from_trajectories(...), "
            "or a pair of it and loss weights"
        )
    batch, params = get_trajectory_batch(packed, weights, get_model_config(model), training=model.training)
    logits = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        packed_seq_params=params,
        **params.padding_arguments(model),
    )
    return logits, partial(trajectory_loss_func, batch, model)
