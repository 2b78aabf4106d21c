"""--cp-plan-pool: the rows of all data-parallel replicas over all their ranks, where that is modelled to be faster.

Every replica reads its own rows, as Megatron deals them. Ranks with the same context-parallel number gather them, with
the lengths of their documents, so that every rank of the pool has the whole micro-batch of all replicas and makes the
same choice. Megatron sums gradients and tokens over the same ranks either way.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_cp import Documents
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.config.rules import pool_topology
from mindspeed_cp.data.dispatch import PoolModel
from mindspeed_cp.megatron.adaptors.attentions import layer_attentions, model_layer_cost, with_model_sizes
from mindspeed_cp.megatron.adaptors.documents import documents_of_batch, token_shape
from mindspeed_cp.plan import Topology

#: Tensors over tokens that replicas gather; positions follow from the documents.
GATHERED = ("tokens", "labels", "loss_mask")


def pool_of(suite: SuiteSettings) -> Topology:
    """Return the topology of the pool of this process's stage, from LOCAL_WORLD_SIZE, which launchers set; without it
    all ranks are on one machine.

    Raises:
        ConfigError: machines hold different numbers of whole replicas.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size()
    tensor, replicas = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    return pool_topology(suite, replicas, local_ranks, tensor, "cp_plan_pool")


def pool_rank() -> int:
    """Return the number of this rank in the pool."""
    return int(dist.get_rank(parallel_state.get_data_parallel_group(with_context_parallel=True)))


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
    lengths, digests = _gather_lengths(documents, digest, group)
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

    def choose() -> bool:
        return bool(model.choose(tokens, replicas, [np.arange(len(tokens))]).pooled)

    if not _all_agree(choose()):
        return None
    rows = {name: _gather_rows(whole[name], group) for name in GATHERED}
    borders = Documents(tokens).offsets.astype(np.int32)
    return {**rows, "cu_seqlens": torch.from_numpy(borders)}, zlib.crc32(np.array(digests, np.int64).tobytes())


def _all_agree(is_pooled: bool) -> bool:
    """Return True if all ranks of the stage, tensor-parallel ones too, choose the pool. Machines may round differently,
    and a rank that chose otherwise would leave the others waiting for its rows."""
    chosen = torch.tensor([int(is_pooled)])
    wide = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for group in (wide, parallel_state.get_tensor_model_parallel_group()):
        chosen = _gathered(chosen.to(_device(group)), group).amin(0)
    return bool(chosen.item())


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device whose tensors the group carries."""
    return (
        torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda", torch.cuda.current_device())
    )


def _gather_lengths(documents: Documents, digest: int, group: dist.ProcessGroup) -> tuple[list[np.ndarray], list[int]]:
    """Return the lengths of the documents of each replica, int64 [documents], and their digests."""
    device = _device(group)
    sizes = _gathered(torch.tensor([len(documents), digest], device=device), group).tolist()
    own = torch.zeros(max(count for count, _ in sizes), dtype=torch.int64)
    own[: len(documents)] = torch.from_numpy(documents.lengths)
    table = _gathered(own.to(device), group).cpu().numpy()
    return [row[:count] for row, (count, _) in zip(table, sizes, strict=True)], [value for _, value in sizes]


def _gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all replicas, [replicas * rows, tokens]; Megatron deals all replicas equally many."""
    return _gathered(rows.to(_device(group)).contiguous(), group).flatten(0, 1)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of a group, [ranks, ...]."""
    out = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(out, own, group=group)
    return torch.stack(out)
