"""Writer of Megatron's checkpoint format within this process, in steps that can run at different times.

Megatron's own writer forks a process for each file and keeps a manager process for each rank for as long as the rank
lives.  A fork while other threads run (one makes batches) may inherit a lock that is never released, and the manager
outlives a rank that is killed. This one writes the same files by torch's own writer. Ranks talk in `save` and `finish`;
`copy` and `write` between them do not, and may run in another thread: `copy` during the next forward and backward,
which leave weights and optimizer state as they are, and `write` during the steps behind.

Another program may pose as a rank to gloo. So what decides which bytes are loaded, places in files and digests, travels
through files of the checkpoint's folder, in which nobody else can write; and a rank writes what its own plan says.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import _DistWrapper

from mindspeed_cp.errors import PeerError
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.checkpoint_digests import file_digest
from mindspeed_cp.train.held_folder import HeldFolder
from mindspeed_cp.train.rank_messages import MessageReader, MessageWriter

with megatron_imports():
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

_RESULTS = ".written-by-{rank}"  # until the metadata are written
#: Copies of a rank's shards in host memory, by their place in the checkpoint; every save writes into the same ones.
Copies = dict[Any, torch.Tensor]


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's "torch_dist" format, version 1, without other processes.

    Args:
        held: the folder of the checkpoint.
        copies: where `copy` puts the shards, so that `write` does not read weights that training goes on to change;
            None: `write` comes before the next step.
        changing: storages of tensors that a forward or backward changes; `save` copies these itself.

    Attributes:
        copied: set after `copy`; weights and optimizer state must not be changed before.
    """

    def __init__(self, held: HeldFolder, copies: Copies | None = None, changing: Collection[int] = ()) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self._held, self._copies, self._changing = held, copies, changing
        self.copied = threading.Event()
        self._ranks = _DistWrapper(None, True, 0)
        self._metadata: Metadata | None = None  # on the first rank
        self._outcome: BaseException | None = None  # of `copy` or `write`
        self._is_written = False

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Agree on who writes what; Megatron calls it on every rank."""
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
            self._plan = writer.prepare_local_plan(planner.create_local_plan())
            return self._plan

        def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            self._planned = {item.index for plan in plans for item in plan.items}
            return writer.prepare_global_plan(plans)

        plan = planner.finish_plan(self._own_part(self._ranks.reduce_scatter("plan", local_plan, global_plan)))
        if self._copies is not None:
            planner.begin_copy(plan, self._copies, self._changing)
        self._writer, self._planner, self._plan = writer, planner, plan

    def _own_part(self, plan: SavePlan) -> SavePlan:
        """Return the plan that the first rank sent, which leaves out of this rank's what others write."""
        own = {item.index: item for item in self._plan.items}
        prefix = getattr(plan.storage_data, "prefix", None)
        if prefix != self._prefix(self._ranks.rank) or any(item != own.get(item.index) for item in plan.items):
            raise PeerError(f"rank {self._ranks.rank}: was told to write what is not its part of a checkpoint")
        return plan

    @staticmethod
    def _prefix(rank: int) -> str:
        return f"__{rank}_"  # torch's, of the files of a rank

    def copy(self) -> None:
        """Copy this rank's shards to host memory; `finish` tells errors."""
        try:
            self._planner.copy()
        except BaseException as error:
            self._outcome = error
        finally:
            self.copied.set()

    def write(self) -> None:
        """Write this rank's shards, make them durable and read them back for their digests; `finish` tells errors."""
        if self._outcome is not None:
            return
        try:
            results = self._writer.write_data(self._plan, self._planner).wait()
            names = [path.name for path in self._held.path.glob(f"{self._prefix(self._ranks.rank)}*")]
            digests = {name: file_digest(self._held.open(name)) for name in names}
            with open(self._held.path / _RESULTS.format(rank=self._ranks.rank), "xb") as file:
                MessageWriter(file).dump((results, digests))
                file.flush()
                os.fsync(file.fileno())
            self._is_written = True
        except BaseException as error:
            self._outcome = error

    def finish(self) -> dict[str, str]:
        """Write the metadata, on the first rank; every rank calls it, after its `write`.

        Returns:
            The digests of all ranks' files, by name; on the first rank.

        Raises:
            CheckpointException: a rank could not write its shards; raised on all ranks.
        """
        digests: dict[str, str] = {}

        def own() -> None:
            if self._outcome is not None:
                raise self._outcome
            assert self._is_written, "finish comes after write"

        def complete(_: list[None]) -> None:
            assert self._metadata is not None
            all_results = []
            for rank in range(self._ranks.get_world_size()):
                name = _RESULTS.format(rank=rank)
                with self._held.open(name) as file:
                    results, own_digests = MessageReader(file).load()
                (self._held.path / name).unlink()
                all_results.append(results)
                digests.update(own_digests)
            if {result.index for results in all_results for result in results} != self._planned:
                raise PeerError("ranks wrote other parts of the checkpoint than was planned")
            self._writer.finish(self._metadata, all_results)

        self._ranks.all_reduce("write", own, complete)
        return digests


class _CopyingPlanner(MCoreSavePlanner):
    """Megatron's planner, which can hand out copies of the data."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._copied: dict[Any, Any] = {}
        self._to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []  # copy, original
        self._stream: Any = None  # on a device: beside the compute stream

    def begin_copy(self, plan: SavePlan, copies: Copies, changing: Collection[int]) -> None:
        """Make the copies of a plan's data in host memory, pinned for data on a device; fill those of `changing`."""
        copied = {}
        for item in plan.items:
            data = self.resolve_data(item)
            if isinstance(data, torch.Tensor):  # else bytes, made for this save
                original, on_device = data.detach(), data.device.type != "cpu"
                data = copies.get(item.index)
                if data is None or (data.shape, data.dtype) != (original.shape, original.dtype):
                    data = torch.empty(original.shape, dtype=original.dtype, pin_memory=on_device)
                    copies[item.index] = data
                if original.untyped_storage().data_ptr() in changing:
                    data.copy_(original)
                else:
                    self._to_copy.append((data, original))
                if on_device and self._stream is None:
                    module = torch.get_device_module(original.device)
                    self._stream = module.Stream(original.device)
                    self._stream.wait_stream(module.current_stream(original.device))
            copied[item.index] = data
        self._copied = copied
        del self.state_dict  # the originals are in _to_copy

    def copy(self) -> None:
        """Fill the other copies, in any thread."""
        if self._stream is None:
            for copy, original in self._to_copy:
                copy.copy_(original)
        else:
            with torch.get_device_module(self._stream.device).stream(self._stream):
                for copy, original in self._to_copy:
                    copy.copy_(original, non_blocking=True)
            self._stream.synchronize()
        self._to_copy = []

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data of an item: its copy, if there is one."""
        if self._copied:
            return self._copied[write_item.index]
        return super().resolve_data(write_item)
