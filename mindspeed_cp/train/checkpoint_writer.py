"""Writer of Megatron's checkpoint format within this process, in steps that can run at different times.

Megatron's own writer forks a process for each file and keeps a manager process for each rank for as long as the rank
lives.  A fork while other threads run (one makes batches) may inherit a lock that is never released, and the manager
outlives a rank that is killed. This one writes the same files by torch's own writer. Ranks talk in `save` and `finish`;
`write` between them does not, and may run in another thread while the next steps are trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.checkpoint_digests import file_digest

with megatron_imports():
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

#: Copies of a rank's shards in host memory, by their place in the checkpoint; every save writes into the same ones.
Copies = dict[Any, torch.Tensor]


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's "torch_dist" format, version 1, without other processes.

    Args:
        copies: where to copy the shards, so that `write` does not read weights that training goes on to change; None:
            `write` comes before the next step.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self._copies = copies
        self._ranks = _DistWrapper(None, True, 0)
        self._metadata: Metadata | None = None  # on the first rank
        self._outcome: tuple[list[WriteResult], dict[str, str]] | BaseException | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Agree on who writes what, and copy this rank's shards; Megatron calls it on every rank."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = _CopyingPlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        # Copying ahead is for shards on a device, and would open one in the thread that writes copies.
        ahead = 10_000_000 if self._copies is None else 0  # bytes; the first is torch's default
        writer = FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True, per_thread_copy_ahead=ahead)

        def local_plan() -> SavePlan:
            planner.set_up_planner(
                mcore_to_pyt_state_dict(renamed, False), writer.storage_meta(), self._ranks.is_coordinator
            )
            writer.set_up_storage_writer(self._ranks.is_coordinator)
            return writer.prepare_local_plan(planner.create_local_plan())

        def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        plan = planner.finish_plan(self._ranks.reduce_scatter("plan", local_plan, global_plan))
        if self._copies is not None:
            planner.copy(plan, self._copies)
        self._writer, self._planner, self._plan = writer, planner, plan

    def write(self) -> None:
        """Write this rank's shards, make them durable and read them back for their digests; `finish` tells errors."""
        try:
            results = self._writer.write_data(self._plan, self._planner).wait()
            files = Path(self._writer.path).glob(f"{self._plan.storage_data.prefix}*")
            self._outcome = results, {path.name: file_digest(path) for path in files}
        except BaseException as error:
            self._outcome = error

    def finish(self) -> dict[str, str]:
        """Write the metadata, on the first rank; every rank calls it, after its `write`.

        Returns:
            The digests of all ranks' files, by name.

        Raises:
            CheckpointException: a rank could not write its shards; raised on all ranks.
        """

        def own() -> tuple[list[WriteResult], dict[str, str]]:
            assert self._outcome is not None, "finish comes after write"
            if isinstance(self._outcome, BaseException):
                raise self._outcome
            return self._outcome

        def complete(outcomes: list[tuple[list[WriteResult], dict[str, str]]]) -> dict[str, str]:
            assert self._metadata is not None
            self._writer.finish(self._metadata, [results for results, _ in outcomes])
            return {name: digest for _, digests in outcomes for name, digest in digests.items()}

        return self._ranks.all_reduce("write", own, complete)


class _CopyingPlanner(MCoreSavePlanner):
    """Megatron's planner, which can hand out copies of the data."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._copied: dict[Any, Any] = {}

    def copy(self, plan: SavePlan, copies: Copies) -> None:
        """Copy the data of a plan to host memory, which is pinned for shards on a device; hand out the copies."""
        copied = {}
        for item in plan.items:
            data = self.resolve_data(item)
            if isinstance(data, torch.Tensor):  # else bytes, made for this save
                copy = copies.get(item.index)
                if copy is None or (copy.shape, copy.dtype) != (data.shape, data.dtype):
                    pinned = data.device.type != "cpu"
                    copy = copies[item.index] = torch.empty(data.shape, dtype=data.dtype, pin_memory=pinned)
                data = copy.copy_(data.detach())
            copied[item.index] = data
        self._copied = copied
        del self.state_dict  # the originals are not needed any more

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of an item: its copy, if there is one."""
        if self._copied:
            return self._copied[write_item.index]
        return super().resolve_data(write_item)
