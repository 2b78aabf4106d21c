"""Plans for Megatron's plain PackedSeqParams, made from their cu_seqlens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_cp import AttentionConfig, ConfigError, verify_plan
from mindspeed_cp.algorithms.plan_cache import PlanCache
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.layout import Layout, row_zigzag, zigzag
from mindspeed_cp.megatron.adaptors.batch import planned_params
from mindspeed_cp.megatron.adaptors.documents import (
    CU_SEQLENS,
    PACKED_CUTS,
    build_plan_of_cut,
    documents_of_sequences,
    to_host,
)
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams


@cache
def plan_cache(cut: str | None, verify: bool) -> PlanCache:
    """Return the cache of the plans of this process.

    Args:
        cut: how a data loader has cut the rows, see :mod:`mindspeed_cp.megatron.adaptors.documents`; None: rows are
            cut by the plan.
        verify: prove every new plan.
    """
    build = None if cut is None else partial(build_plan_of_cut, cut)
    return PlanCache(verify_plan if verify else None, build=build)


class PackedPlanner:
    """Makes the plans of micro-batches that arrive with Megatron's plain PackedSeqParams.

    All layers of a micro-batch get the same PackedSeqParams object, in recomputation again, so the result is kept as
    long as that object lives and is not changed. Plans are kept longer, by the documents' lengths.

    Args:
        suite: the section context_parallel_suite.
        attentions: attention of the layers that share the result.
        cut: how the data loader cuts a packed row over the ranks: "document" or "row".

    Raises:
        ConfigError: the cut is unknown.
    """

    def __init__(self, suite: SuiteSettings, attentions: Iterable[AttentionConfig], cut: str = "document") -> None:
        if cut not in PACKED_CUTS:
            raise ConfigError(f"packed_cut is {cut!r}; valid: {', '.join(PACKED_CUTS)}")
        self.suite, self.cut = suite, cut
        self.attentions = tuple(dict.fromkeys(attentions))
        self._results: Any = WeakIdKeyDictionary()  # by identity: dataclasses that compare have no hash

    def shared(self, attentions: Iterable[AttentionConfig]) -> PackedPlanner:
        """Return a planner of the same settings for all these attentions."""
        return PackedPlanner(self.suite, attentions, self.cut)

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
                f"packed_seq_params.qkv_format is {given.qkv_format!r}; valid without a plan: 'thd'; for other formats "
                "pass planned_params(plan, rank, 'sbhd')"
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
        cache_of_cut = plan_cache(self.cut, suite.verify_plans)
        plans = [
            cache_of_cut.get(documents, suite.topology, attention, suite.algorithm, suite.options)
            for attention in self.attentions
        ]
        return planned_params(plans, group.rank())

    def check_rows(self, params: PlannedBatchParams, rows: int) -> None:
        """Raise ConfigError unless this rank has as many rows as cu_seqlens give it."""
        if rows == params.rows:
            return
        tokens, ranks = params.layout.documents.tokens, params.layout.ranks
        beyond = (
            "; rows behind the last sequence belong to no document: let it end with the row (the last entry of "
            "cu_seqlens_q_padded), or leave such rows out of the batch"
            if rows * ranks > tokens
            else ""
        )
        raise ConfigError(
            f"query has {rows} rows on rank {params.rank} of {ranks}, but cu_seqlens of packed_seq_params end at "
            f"{tokens} tokens, {params.rows} of them on this rank; valid: the batch cut with the same cu_seqlens, "
            f"or by planned_batch_from{beyond}"
        )

    def check_positions(self, params: PlannedBatchParams, position_ids: Any) -> None:
        """Raise ConfigError if positions show that the batch was cut in another way than this planner takes it.

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
        other_cut, other = (
            ("row", row_zigzag(layout.documents, layout.ranks))
            if self.cut == "document"
            else ("document", zigzag(layout.documents, layout.ranks))
        )
        if _are_positions(own, other, rank):
            raise ConfigError(
                f"packed_cut is {self.cut!r}, but position_ids are those of a batch cut by {other_cut}; valid here: "
                f"install(spec, suite, packed_cut={other_cut!r})"
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
    """Return True if two states have the same objects; numbers and names compare by value."""
    by_value = (int, str)
    return all(
        a is b or (isinstance(a, by_value) and isinstance(b, by_value) and a == b)
        for a, b in zip(before, now, strict=True)
    )
