"""Micro-batches that a data loader has cut, without a plan: plain PackedSeqParams.

Loaders of packed rows (Megatron's --sft, verl, ms-swift) cut every sequence into 2 * cp equal chunks, of which rank r
holds chunks r and 2 * cp - 1 - r; plans are made from the cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms.linear_layout import with_caller_layout
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.layout import Layout, row_zigzag, zigzag
from mindspeed_cp.megatron.adaptors.batch import plan_cache, planned_params
from mindspeed_cp.megatron.adaptors.documents import CU_SEQLENS, documents_of_sequences, to_host
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams


def build_plan_of_cut(documents: Documents, topology: Topology, *arguments: Any, **options: Any) -> Plan:
    """Build a plan whose caller holds two chunks of every sequence; other arguments as for build_plan.

    Raises:
        ConfigError: chunks are not equal; names the sequence.
    """
    if options.get("remap") == "hidden":
        raise ConfigError(
            "remap is 'hidden'; valid for batches that a data loader has cut: 'off', since linear layers have the rows "
            "that it gave them; or cut the batch with planned_batch_from"
        )
    chunks = 2 * topology.ranks
    uneven = np.flatnonzero(documents.lengths % chunks)
    if topology.ranks > 1 and len(uneven):
        length = int(documents.lengths[uneven[0]])
        raise ConfigError(
            f"sequence {uneven[0]} of packed_seq_params has {length} tokens; valid where each sequence is cut over the "
            f"ranks: a multiple of 2 * context_parallel_size, {chunks}; pad it to {length + -length % chunks} and give "
            "the padded ends as cu_seqlens_q_padded, or cut the batch with planned_batch_from, which takes any length"
        )
    return with_caller_layout(build_plan(documents, topology, *arguments, **options), zigzag(documents, topology.ranks))


class PackedPlanner:
    """Makes the plans of micro-batches that arrive with Megatron's plain PackedSeqParams.

    All layers of a micro-batch get the same PackedSeqParams object, in recomputation again, so the result is kept as
    long as that object lives and is not changed. Plans are kept longer, by the documents' lengths.

    Args:
        suite: the section context_parallel_suite.
        attentions: attention of the layers that share the result.
    """

    def __init__(self, suite: SuiteSettings, attentions: Iterable[AttentionConfig]) -> None:
        self.suite = suite
        self.attentions = tuple(dict.fromkeys(attentions))
        self._results: Any = WeakIdKeyDictionary()  # by identity: dataclasses that compare have no hash

    def planned(self, given: PackedSeqParams, group: dist.ProcessGroup) -> PlannedBatchParams:
        """Return the parameters with the plans of a micro-batch.

        The first call for a micro-batch copies cu_seqlens to the host; where they are on a device, it waits for it.

        Args:
            given: Megatron's plain parameters, format "thd".
            group: context-parallel ranks.

        Raises:
            ConfigError: the parameters cannot be honoured, or no plan can be built.
        """
        state = _state(given)
        kept = self._results.get(given)
        if kept is not None and _is_same(kept[0], state):
            params: PlannedBatchParams = kept[1]
            return params
        params = self._make(given, group)
        self._results[given] = state, params
        return params

    def _make(self, given: PackedSeqParams, group: dist.ProcessGroup) -> PlannedBatchParams:
        suite = self.suite
        if given.qkv_format != "thd":
            raise ConfigError(
                f"packed_seq_params.qkv_format is {given.qkv_format!r}; valid: 'thd', or what planned_batch_from "
                "returns, which packs all rows into one"
            )
        local = getattr(given, "local_cp_size", None)
        own_group = getattr(given, "cp_group", None)
        if local not in (None, group.size()) or not (own_group is None or own_group is group):
            raise ConfigError(
                f"packed_seq_params has a context-parallel group of its own (local_cp_size {local}); valid: None, or "
                f"that of the model with {group.size()} ranks, since a plan already gives each document the ranks it "
                "needs; switch hybrid or dynamic context parallelism off"
            )
        mask = "full" if any(attention.mask == "full" for attention in self.attentions) else "causal"
        documents = documents_of_sequences(to_host({name: getattr(given, name, None) for name in CU_SEQLENS}), mask)
        cache = plan_cache(suite.verify_plans, build_plan_of_cut)
        plans = [
            cache.get(documents, suite.topology, attention, suite.algorithm, suite.options)
            for attention in self.attentions
        ]
        return planned_params(plans, group.rank())

    def check_positions(self, params: PlannedBatchParams, position_ids: Any) -> None:
        """Raise ConfigError if positions show that the row was cut as a whole, wherever documents end (Megatron's
        --dataloader-inter-document-masking), and not each sequence.

        Positions of another shape than this rank's rows are not looked at, nor those that follow no known way: models
        with rotary positions do not read them. Positions may restart in every document, or run through the row. Of
        mrope's, the times are compared, which are plain positions in a row without pictures.

        Args:
            params: result of :meth:`planned`.
            position_ids: positions of this rank's rows, as the model gets them, or None.
        """
        layout, rank = params.layout, params.rank
        if layout.ranks == 1 or not isinstance(position_ids, Tensor):
            return
        if position_ids.dim() == 3:  # [3, b, s]: times, heights, widths
            position_ids = position_ids[0]
        if position_ids.numel() != params.rows:
            return
        own = position_ids.detach().reshape(-1).cpu().numpy()
        if _are_positions(own, layout, rank):
            return
        if _are_positions(own, row_zigzag(layout.documents, layout.ranks), rank):
            raise ConfigError(
                "position_ids are those of a packed row that was cut as a whole, wherever documents end "
                "(--dataloader-inter-document-masking); valid: each sequence cut by itself, or planned_batch_from"
            )


def _are_positions(given: np.ndarray, layout: Layout, rank: int) -> bool:
    """Return True if these are the positions of a rank's rows: restarting in every document, or running on."""
    return np.array_equal(given, layout.positions(rank)) or np.array_equal(given, layout.tokens(rank))


def _state(given: PackedSeqParams) -> list[Any]:
    """Return what says whether parameters were changed: their fields, and how often tensors were written."""
    values = [getattr(given, name, None) for name in (*CU_SEQLENS, "qkv_format", "local_cp_size", "cp_group")]
    versions = [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in values]
    return [*values, *versions]


def _is_same(before: list[Any], now: list[Any]) -> bool:
    """Return True if two states have the same objects and equal numbers."""
    return all(a is b or (type(a) is type(b) is int and a == b) for a, b in zip(before, now, strict=True))
